"""`CreditTrainer`: TRL's GRPO trainer with credit for each token. It wires the stages and computes nothing itself."""

import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any, ClassVar

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from trl import GRPOTrainer

from credit_trl.config import PAPER, CreditConfig, check_combinations, fit_batch
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.gather import ignored_feedback
from credit_trl.contexts.images import ImageReader, PromptImages, trl_image_fields, with_local_images
from credit_trl.contexts.prompts import (
    chat_renderer,
    check_local_images,
    images_of,
    prompt_columns,
    with_images_in_prompts,
)
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.lab.report.callback import run_callbacks
from credit_trl.loss.projection import TokenPolicy
from credit_trl.loss.sampling import SamplingDistribution
from credit_trl.loss.token_weight import TokenWeight
from credit_trl.mistakes import check_arguments, check_model_of, refuse_unknown
from credit_trl.quickstart_model import model_path
from credit_trl.rollout.batch import (
    EVALUATION_INDEX,
    GenerationBatch,
    is_graded,
    loss_mask,
    mask_skipped_rewards,
    mask_skipped_tokens,
    total_rewards,
)
from credit_trl.rollout.thinking import mark_thinking, thinking_marks, use_marks
from credit_trl.rollout.verdict import VerdictLog, VerifierPolicy
from credit_trl.rollout.vllm import PolicyGeneration
from credit_trl.run_directory import describe_data
from credit_trl.sandbox.user_code import undisturbed
from credit_trl.teacher import causal_lm
from credit_trl.teacher.external import build_teacher
from credit_trl.teacher.models import Teacher, TeacherUpdate
from credit_trl.teacher.packing import cannot_pack
from credit_trl.training import checks, micro_batches, reporting
from credit_trl.training.card import card_writer
from credit_trl.training.check_model import check_logits, check_model
from credit_trl.training.check_run import check_run
from credit_trl.training.checkpoints import BestWeights, ResumableTrainer
from credit_trl.training.metrics import Alarms, TokenMetrics, context_metrics, drop_undefined, teacher_success_weights
from credit_trl.training.step import CreditStep
from credit_trl.training.weights import WeightChange, reduce_gradients_in_fp32
from credit_trl.trl_compat import check_behaviour, check_returned, get_config_model_id


@dataclass
class RolloutState:
    """What the stages of one generation batch leave for later ones."""

    dataset_prompts: list[dict[str, Any]] = field(default_factory=list)  # prompts and images of the dataset's rows
    prompt_images: list[PromptImages | None] = field(default_factory=list)  # of each prompt
    turn: int = 0  # of a rollout with tools
    batch: GenerationBatch | None = None
    # (B, T) what moves log-probabilities of sampled tokens from the engine's distribution to the policy's.
    outside_logps: Tensor | None = None


class CreditTrainer(ResumableTrainer):
    """Train a language model from verdicts with feedback.

    Takes the arguments of [`~trl.GRPOTrainer`] and `token_weight`. A reward function may return [`Verdict`]s. Their
    feedback and a successful rollout of the group form the privileged context under which the model acts as its own
    teacher. The dataset column `privileged_context` holds feedback that does not depend on the rollout.

    Example:

    ```python
    def verifier(completions, answer, **kwargs):
        texts = [completion[-1]["content"] for completion in completions]
        return [Verdict(float(a in text), f"It begins with {a[0]}.") for text, a in zip(texts, answer)]

    trainer = CreditTrainer("Qwen/Qwen3-0.6B", verifier, CreditConfig("runs/first"), dataset)
    trainer.train()
    ```

    Args:
        token_weight: function of a generation batch's credit that weighs the tokens of the distillation loss or of
            GRPO's, see [`TokenCredit`]. With it the teacher scores at `distillation_weight=0` too.

    Attributes:
        run_log: writes `run.json` and `log.jsonl`; entries of `run_log.facts` are added to `run.json`.
        token_metrics: means over tokens for the log; entries of `token_metrics.functions` are added to them.
        credit_step: the stages after a rollout; None where nothing reads the credit.
        policy_step: reads the policy for GRPO's loss; None where TRL does.

    Raises:
        TypeError: `args` is not a `CreditConfig`.
        ValueError: the data or the model cannot train with this configuration. Checked before anything is generated.
    """

    credit_step: CreditStep | None = None
    _rollout = RolloutState()
    _picks_successful = False  # whether the rewards decide on what is a success, without a threshold
    _generation_batch: GenerationBatch | None = None  # the last; None where a run resumed inside it
    policy_step: CreditStep | None = None
    _policy_tokens: TokenPolicy | None = None  # of the micro-batch, for GRPO's loss
    _nonfinite: Tensor | None = None  # samples of the micro-batch whose distillation loss is not finite
    _tag_names: ClassVar = ["trl", "credit"]
    _name = "CREDIT"
    _paper: ClassVar = PAPER["card"]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: CreditConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        *,
        token_weight: TokenWeight | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_unknown("CreditTrainer", "argument", kwargs, inspect.signature(GRPOTrainer).parameters)
        if isinstance(model, PathLike):
            model = str(model)
        if isinstance(reward_funcs, tuple):
            reward_funcs = list(reward_funcs)
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        check_arguments(model, reward_funcs, args, token_weight, kwargs | datasets)
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = CreditConfig(f"{name.split('/')[-1]}-CREDIT")
        if isinstance(model, str):
            model = model_path(model)
        check_behaviour()
        self._verdicts = VerdictLog(VerifierPolicy(args.on_verifier_error, args.verifier_timeout))
        distills = args.distillation_weight > 0.0 or token_weight is not None
        train_dataset, eval_dataset = map(with_local_images, (train_dataset, eval_dataset))
        datasets = checks.named_datasets(train_dataset, eval_dataset)
        checks.check_datasets(args, datasets, reward_funcs, kwargs, distills=distills)
        checks.check_engine_options(args)
        if distills:
            fit_batch(args, len(train_dataset) if isinstance(train_dataset, Dataset) else None)
        if distills and args.distillation_weight == 0.0:
            check_combinations(args)  # which the configuration has not
        checks.check_paths(args, model, reward_funcs)
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, **kwargs)
        self._set_signature_columns_if_needed()
        self._signature_columns += ["privileged_context", "task"]
        self._init_model()
        for position, func in enumerate(self.reward_funcs):
            if not isinstance(func, nn.Module):
                self.reward_funcs[position] = self._verdicts.wrap(func, position)
        self.context_builder = self._make_builder(distills)
        self._init_reports(distills)
        self.run_log.facts["data"] = describe_data(reward_funcs or [], args.reward_weights)
        self.run_log.rows = {"train": train_dataset, "test": eval_dataset}
        check_model_of(self)
        checks.check_prompts(self, datasets, distills=distills)
        if distills:
            self._init_credit(token_weight)
        self._init_policy_step()
        for callback in run_callbacks(self):
            self.add_callback(callback)

    def _init_model(self) -> None:
        """Prepare the model and the engine that TRL has loaded."""
        causal_lm.keep_quantized_differentiable(self.model)
        if self.args.cast_lm_head_to_fp32:
            causal_lm.use_fp32_lm_head(self.model)
        if self.use_vllm:
            self.vllm_generation = PolicyGeneration.adopt(self.vllm_generation, self.args.seed)
            checks.check_server(self)

    def _make_builder(self, distills: bool) -> ContextBuilder:
        options = {"chat_template": self.chat_template} | self.chat_template_kwargs
        render = chat_renderer(self.processing_class, self._is_vlm, **options)
        reader = ImageReader(self.processing_class) if self._is_vlm and distills else None
        marks = thinking_marks(self.processing_class, self.chat_template)
        return ContextBuilder(self._tokenizer, self.args, self.eos_token_ids, render, reader, marks)

    @cached_property
    def clock(self) -> reporting.StageClock:
        """Seconds of the stages of training."""
        return reporting.StageClock(counts=lambda: self.model.training)

    @property
    def _distillation_weight(self) -> float:
        """w; 0 where no teacher scores, as in a trainer that was built without `__init__`."""
        return 0.0 if self.credit_step is None else self.args.distillation_weight

    def _init_reports(self, distills: bool) -> None:
        args = self.args
        self._eval_batches = 0
        self.create_model_card = card_writer(self.create_model_card, args.output_dir)
        self.run_log = reporting.RunLog(self)
        is_main = self.accelerator.is_main_process
        self.alarms = Alarms(is_main, self.run_log.note_warning)
        self._eval_alarms = Alarms(is_main, self.run_log.note_warning)  # which replace none of training
        self.token_metrics = TokenMetrics(self.args, self._sum_over_processes)
        self.callback_handler.callbacks.insert(0, BestWeights(self))
        self.add_callback(self.run_log)
        self.add_callback(WeightChange(self.alarms, self.model))
        self.num_completions_to_print = 0  # of TRL's table, see `print_completions`
        shows_successful = distills and args.use_successful_as_teacher and args.teacher_prompt == "privileged"
        functions = int(self.reward_weights.count_nonzero())
        self._picks_successful = shows_successful and args.success_reward_threshold is None
        sums = functions > 1 and self.reward_weights.max() >= 1.0
        self.alarms.raise_if(self._picks_successful and sums, "summed_rewards", functions=functions)

    def _init_credit(self, token_weight: TokenWeight | None) -> None:
        args = self.args
        reduce_gradients_in_fp32(self.accelerator)
        self.teacher = build_teacher(args, self.model, self.accelerator, self._tokenizer)
        check_model(self.model, self.accelerator, reads_padding=args.distillation_weight < 1.0)
        if args.teacher_model_kind == "model":
            check_logits(self.teacher.models()[0], self.accelerator)
        reason = cannot_pack(self.model) if args.packed else None
        self._forbid_placeholders()
        logit_bias = self.vllm_generation.generation_kwargs.get("logit_bias") if self.use_vllm else None
        self.credit_step = CreditStep(
            args,
            self.context_builder,
            self.teacher,
            processes=self.accelerator.num_processes,
            reduce=self._sum_over_processes,
            token_weight=token_weight,
            router_loss=self.aux_loss_enabled,
            sampling=SamplingDistribution.from_config(args, logit_bias),
        )
        self.alarms.raise_if(reason is not None, "not_packed", reason=reason)
        if self.credit_step.engine_role == "correction":
            self.vllm_importance_sampling_correction = False  # TRL's, which costs a forward pass
        if args.teacher_model_kind == "ema":
            self.add_callback(TeacherUpdate(self))

    def _forbid_placeholders(self) -> None:
        """Keep vLLM from sampling placeholders of images, as TRL does without vLLM."""
        if self.use_vllm and self.context_builder.reader is not None:
            never = dict.fromkeys(self.context_builder.reader.placeholder_ids, -100.0)
            options = self.vllm_generation.generation_kwargs
            options["logit_bias"] = never | (options.get("logit_bias") or {})

    def _init_policy_step(self) -> None:
        """Read packed rows for GRPO's loss: in a mixture as for the distillation, without it with `packed=True`."""
        args = self.args
        if self.credit_step is not None and self.credit_step.serves_grpo:
            self.policy_step = self.credit_step
        elif args.packed and args.distillation_weight == 0.0:
            reason = "images need padded rows" if self._is_vlm else cannot_pack(self.model)
            self.alarms.raise_if(reason is not None, "not_packed", reason=reason)
            if reason is None:
                check_model(self.model, self.accelerator, reads_padding=False)
                policy = Teacher(self.model, self.accelerator)
                options = {"router_loss": self.aux_loss_enabled, "sampling": SamplingDistribution()}
                self.policy_step = CreditStep(args, self.context_builder, policy, **options)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _log_values(self, values: dict[str, float]) -> None:
        """Add values to TRL's metrics, which average them until the next log."""
        for name, value in values.items():
            self._metrics[self._mode][name].append(value)

    def _sum_over_processes(self, values: Tensor) -> Tensor:
        return self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum")

    def _generate(self, prompts: list) -> Any:
        """Read the images of the prompts. TRL gets none, as its processor fails on prompts with and without."""
        for prompt in prompts:
            check_local_images(prompt)
        if self.credit_step is None:
            return check_returned("GRPOTrainer._generate", super()._generate(prompts))
        builder = self.context_builder
        builder.forget_texts()
        if any(map(images_of, prompts)):
            checks.check_image_options(self)
        if builder.reader is not None:
            builder.reader.clear()
            self._rollout.prompt_images = list(map(builder.read_images, prompts))
        tools = self._sample_tools(len(prompts))
        if self.use_vllm and builder.reader is not None:
            self.vllm_generation.unexpanded = builder.unexpanded(prompts, tools)
        *outputs, _, tool_images = check_returned("GRPOTrainer._generate", super()._generate(prompts))
        checks.check_rollout_images(self, prompts, outputs[0], tools, tool_images)
        return *outputs, None, tool_images

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Set `current_turn` of environments that have it, before their tools run."""
        outputs = check_returned("GRPOTrainer._generate_single_turn", super()._generate_single_turn(*args, **kwargs))
        for environment in self.environments or ():
            if hasattr(environment, "current_turn"):
                environment.current_turn = self._rollout.turn
        self._rollout.turn += 1
        return outputs

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        """Run the reward functions. Sets the generation batch of `_rollout`."""
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        rows = []
        columns_of_rows = self._rollout.dataset_prompts or [{}] * len(inputs)
        for row, columns, ids in zip(inputs, columns_of_rows, completion_ids_list, strict=False):
            rows.append({**row, **columns, "truncated": ids[-1] not in ends})  # TRL refuses empty completions
        self._verdicts.clear()
        index = self._next_batch_index()
        with self.clock.stage("verdict"):
            graded = self._marked_completions(prompts, completions, completion_ids_list)
            with use_marks(self.context_builder.marks), self._undisturbed(index):
                rewards_per_func = super()._calculate_rewards(rows, prompts, graded, completion_ids_list)
            check_returned("GRPOTrainer._calculate_rewards", rewards_per_func)
        if self.args.on_verifier_error == "skip":
            share = mask_skipped_rewards(rewards_per_func, self._verdicts.has_failed, self.accelerator)
            self._log_values({"credit/frac_verifier_skipped": share})
        dataset = self._current_dataset()
        self._rollout.batch = GenerationBatch(
            rows=rows,
            prompts=prompts,
            completion_ids=completion_ids_list,
            rewards=total_rewards(rewards_per_func, self.reward_weights),
            verdict_feedback=self._verdicts.feedback(len(prompts)),
            turn_feedback=self._verdicts.turn_feedback(len(prompts)),
            first=self.accelerator.process_index * len(prompts),
            group_size=self.num_generations if self.model.training else self.num_generations_eval,
            index=index,
            dataset=dataset if isinstance(dataset, Dataset) else self.train_dataset,
            tools=self._sample_tools(len(prompts)),
        )
        return rewards_per_func

    def _current_dataset(self) -> Any:
        """The data of training, or of the evaluation that runs."""
        return self.train_dataset if self.model.training else self.callback_handler.eval_dataloader.dataset

    def _next_batch_index(self) -> int:
        """`GenerationBatch.index` of the batch that is graded."""
        if self.model.training:
            return self._step // (self.args.steps_per_generation * self.num_iterations)
        self._eval_batches += 1
        return EVALUATION_INDEX + self._eval_batches

    def _marked_completions(self, prompts: list, completions: list, completion_ids: list[list[int]]) -> list:
        """Completions whose text tells thinking from answer, where TRL does not parse them."""
        has_parser = getattr(self._tokenizer, "response_template", None) or getattr(
            self._tokenizer, "response_schema", None
        )
        template = self.chat_template or self.processing_class.chat_template
        renders_itself = isinstance(prompts[0], list) and not template  # a `rollout_func` at weight 0
        if self.tools or self.environment_factories or has_parser or renders_itself:
            return completions
        builder = self.context_builder
        return mark_thinking(
            completions, completion_ids, self._tokenizer, lambda i: builder.student_text(prompts[i]), builder.marks
        )

    def _undisturbed(self, index: int) -> AbstractContextManager[None]:
        """Block in which functions of the user run for the generation batch of an index."""
        key = [self.args.seed, index, self.accelerator.process_index]
        return undisturbed(key, lambda text: self.alarms.raise_if(True, "changed_state", text=text))

    def _sample_tools(self, count: int) -> list[list[Any] | None]:
        """Tools that the chat template lists for each local sample; empty without any."""
        if self.environment_factories is not None:
            return [self._env_tools[self._batch_environments[sample]] for sample in range(count)]
        return [self.tools] * count if self.tools else []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        is_changed = self.environment_factories is not None or self.rollout_func is not None
        dataset = self._current_dataset()
        if isinstance(dataset, IterableDataset) and not is_changed:
            checks.check_stream_rows("a generation batch", dataset, inputs, needs_user=self.credit_step is not None)
        rollout = RolloutState()
        self._rollout = rollout
        if self.credit_step is not None:
            rollout.dataset_prompts = list(map(prompt_columns, inputs))
            inputs = with_images_in_prompts(inputs, self._is_vlm)
        with self.clock.stage("rollout"):
            output = super()._generate_and_score_completions(inputs)
            check_returned("GRPOTrainer._generate_and_score_completions", output)
        if rollout.outside_logps is not None:  # from the distribution of the engine to the whole vocabulary
            for name in ("old_per_token_logps", "sampling_per_token_logps"):
                output[name] = output[name] + rollout.outside_logps
        if self.args.on_verifier_error == "skip":
            mask_skipped_tokens(output, self._verdicts.has_failed, self.accelerator)
        batch = rollout.batch.with_turns(loss_mask(output))
        self._generation_batch = batch
        metrics = self._metrics[self._mode]
        if self.model.training:
            checks.check_truncated(self, metrics["completions/clipped_ratio"][-1])
            self.alarms.raise_if(batch.is_flat, "flat_reward", mean=metrics["reward"][-1])
        if "importance_sampling_ratio" in output:  # TRL logs its other moments
            ratio = output["importance_sampling_ratio"].expand_as(output["completion_mask"])
            median = self.accelerator.gather(ratio[loss_mask(output)].median())
            self._log_values({"sampling/importance_sampling_ratio/median": median.nanmean().item()})
        contexts = None
        if self.credit_step is not None:
            if any(gather_object([any(rollout.prompt_images)])):
                output["prompt_images"] = rollout.prompt_images
            with self.clock.stage("contexts"), self._undisturbed(batch.index):
                contexts = self._build_contexts(batch)
                output["success_weights"] = self._weigh_successes(batch, contexts, loss_mask(output))
            with self.clock.stage("scores"), self._undisturbed(batch.index):
                output.update(self.credit_step.prepare(batch, output, contexts))
        reporting.add_completion_columns(self, output, batch, contexts)
        return output

    def _build_contexts(self, batch: GenerationBatch) -> list[TokenContexts]:
        """Teacher and contrast contexts of the local samples."""
        if self._picks_successful:
            names = ", ".join(self.reward_func_names)
            highest = np.nanmax([0.0, *batch.rewards])
            self.alarms.raise_if(is_graded(batch.rewards), "graded_reward", names=names, highest=highest)
        contexts = self.credit_step.build_contexts(batch)
        shares = context_metrics(contexts, self.args.contrasts, self._sum_over_processes)
        self._log_values(shares)
        alarms = self.alarms if self.model.training else self._eval_alarms
        alarms.check_contexts(shares, self._metrics[self._mode].get("credit/frac_verifier_skipped", [0.0])[-1])
        longest = 0
        for sample_contexts, completion_ids in zip(contexts, batch.completion_ids, strict=True):
            for ids, _ in sample_contexts.sequences():
                longest = max(longest, len(ids) + len(completion_ids))
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or longest
        self.alarms.raise_if(longest > positions, "positions", longest=longest, positions=positions)
        is_ignored, missing_turns = ignored_feedback(batch, self.args)
        self.alarms.raise_if(is_ignored, "feedback_off")
        self.alarms.raise_if(bool(missing_turns), "lost_turns", turn=min(missing_turns, default=None))
        return contexts

    def _weigh_successes(self, batch: GenerationBatch, contexts: list[TokenContexts], mask: Tensor) -> Tensor:
        """(B,) weights. The mean of the weighted sums over micro-batches and processes is the teacher's fidelity."""
        steps = self.args.steps_per_generation if self.model.training else 1
        weights, mixed, scored = teacher_success_weights(batch, contexts, mask, self.args.success_reward_threshold)
        if self.model.training:
            has_teacher = any(c.teacher is not None for c in contexts)
            self.alarms.raise_if(has_teacher and not scored, "no_tokens")
        self._log_values({"credit/fidelity_groups": mixed})
        return weights * steps * self.accelerator.num_processes

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        """Micro-batches with little padding; TRL's own at `distillation_weight=0`, unless rows are packed."""
        buffered = self._buffered_inputs
        inputs = check_returned("GRPOTrainer._prepare_inputs", super()._prepare_inputs(generation_batch))
        step = self.credit_step if self._distillation_weight > 0.0 else self.policy_step
        if step is None:
            return inputs
        if not self.model.training:
            return micro_batches.without_padding(inputs)
        if self._buffered_inputs is not buffered:
            exchanged = micro_batches.exchanged_count(self.args, self.aux_loss_enabled)
            self._buffered_inputs = micro_batches.evened(self._buffered_inputs, exchanged, step.packed)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Log-probabilities without padding: of the loss by `policy_step`, else of a rollout without gradients.

        TRL's method computes those of the reference model, of prompts with images in the loss, and of weight 0.
        """
        if compute_entropy and self._policy_tokens is not None:  # only the loss asks for entropies
            tokens, self._policy_tokens = self._policy_tokens, None
            return tokens
        is_plain = all(value is None or isinstance(value, bool) for value in kwargs.values())
        is_policy = compute_entropy or model is self.model
        step = self.policy_step if is_policy else None
        prompt_images = self._rollout.prompt_images
        if not compute_entropy and (any(prompt_images) or (is_policy and self._distillation_weight > 0.0)):
            step = self.credit_step
        if step is None or not is_plain:
            returned = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **kwargs
            )
            return check_returned("GRPOTrainer._get_per_token_logps_and_entropies", returned)
        parts = {}
        for kind, values in (("ids", input_ids), ("mask", attention_mask)):
            parts[f"prompt_{kind}"] = values[:, :-logits_to_keep]
            parts[f"completion_{kind}"] = values[:, -logits_to_keep:]
        if compute_entropy:
            return step.policy_tokens(model, parts)
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        role = step.engine_role
        # Of the two passes of the policy in a rollout, the second is that of the KL term's reference.
        moves = (corrects or role == "old") and not step.sampling.is_policy and self._rollout.outside_logps is None
        has_ratio = self.args.distillation_is_clip is not None and role != "old"
        if self.args.distillation_weight == 1.0 and not has_ratio and not corrects and not moves:
            return None, None, None  # nothing reads them
        if any(prompt_images):
            parts["prompt_images"] = prompt_images
        with self.clock.stage("old_logps"):
            logps = step.policy_and_sampling_logps(model, parts, batch_size)
        if moves and model is self.model:
            self._rollout.outside_logps = logps.full - logps.sampled
            return logps.sampled, None, None  # which TRL compares with the engine's
        return logps.full, None, None

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self.model.training:
            self.clock.steps += self.accelerator.sync_gradients
        weight = self._distillation_weight
        loss = 0.0
        self._nonfinite = None
        if weight > 0.0:
            loss = weight * self._distillation_loss(model, inputs)
        if weight < 1.0:
            policy_loss = super()._compute_loss(model, inputs | trl_image_fields(inputs))
            loss = loss + (1.0 - weight) * check_returned("GRPOTrainer._compute_loss", policy_loss)
        return self._guarded(loss, inputs, self._nonfinite)

    def _distillation_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        accumulation = self.current_gradient_accumulation_steps if self.model.training else 1.0
        result = self.credit_step.loss(model, inputs, accumulation)
        loss = result.terms.loss
        if result.aux_loss is not None:
            loss = loss + self.router_aux_loss_coef * result.aux_loss / accumulation
            self._log_values({"aux_loss": self.accelerator.gather_for_metrics(result.aux_loss).mean().item()})
        self.token_metrics.add(self._mode, result)
        self._policy_tokens = result.policy
        self._nonfinite = result.nonfinite
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics[self._mode]
        metrics.update({name: [value] for name, value in self.token_metrics.read(self._mode).items()})
        self.alarms.check_log(metrics, logs, self.model.config.get_text_config().vocab_size)
        if self.model.training:
            self._log_values(self.clock.report(sum(metrics.get("step_time", ())), self._current_train_step_time))
            if self.credit_step is not None:
                self._log_values({"credit/teacher_drift": self.teacher.drift()})
        self._eval_batches = 0  # so that every evaluation draws the same contrast prompts
        drop_undefined(metrics)
        super().log(logs, start_time)
        is_frozen = self.args.teacher_model_kind in ("base", "model")
        self.alarms.check_drift(self.state.log_history, frozen_teacher=is_frozen)
        if self.log_completions and self.accelerator.is_main_process and "train_runtime" not in logs:
            reporting.print_completions(self._logs, self.state.global_step, self.args.num_completions_to_print)

    def check(self) -> None:
        """Print a rollout as the teacher reads it, and the time, memory and disk of the run. Changes no weight."""
        self.accelerator.print(check_run(self))
