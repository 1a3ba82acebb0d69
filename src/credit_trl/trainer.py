"""`CreditTrainer`: TRL's GRPO trainer with per-token credit from feedback. The stages are elsewhere; this wires them.

rollout (TRL) → verdict → contexts, contrast → scores (teacher, scoring, kernels) → objective (kernels)
"""

from __future__ import annotations

import textwrap
from functools import partial
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from trl.trainer.utils import get_config_model_id

from credit_trl.config import CreditConfig
from credit_trl.contexts.build import build_contexts
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.privileged import gather_privileged_contexts, unread_feedback
from credit_trl.contexts.prompts import Render, chat_renderer
from credit_trl.contexts.tokens import TokenContexts, context_masks, pack_contexts, unpack_contexts
from credit_trl.contexts.turns import place_turns
from credit_trl.loss import CreditLoss, Scores, Support, TeacherStates, credit_loss
from credit_trl.loss.head import lm_head
from credit_trl.loss.weights import token_weights
from credit_trl.rollout.batch import (
    GenerationBatch,
    loss_mask,
    mask_skipped_rewards,
    mask_skipped_tokens,
    total_rewards,
)
from credit_trl.rollout.turns import set_current_turn, turn_starts
from credit_trl.rollout.verdict import VerdictLog, VerifierPolicy
from credit_trl.rollout.vllm import PolicyGeneration, await_engine
from credit_trl.teacher.causal_lm import completion_states, keep_quantized_differentiable, use_fp32_lm_head
from credit_trl.teacher.models import TeacherUpdate, make_teacher
from credit_trl.teacher.scoring import check_packing, gather_states, score_completions, stored_scores
from credit_trl.teacher.sharding import full_shape, run_in_wrapped_forward
from credit_trl.training import checks
from credit_trl.training.adaptive import CoefficientUpdate, make_adaptive
from credit_trl.training.checkpoints import ResumableTrainer
from credit_trl.training.metrics import Alarms, context_counts, context_metrics, token_metrics
from credit_trl.training.timing import StageClock
from credit_trl.training.trl_compat import check_trl

check_trl()  # again, for those who import this module directly

# Supports that depend on the live student are scored inside the step; the others once a generation batch.
_IN_STEP = ("full", "student_topk")
# Evaluation draws its contrasts from random streams beyond those of any training batch.
_EVAL_STREAM = 2**31


class CreditTrainer(ResumableTrainer):
    """Train a language model from verdicts with feedback.

    It takes the arguments of [`~trl.GRPOTrainer`]. A reward function may return [`Verdict`]s, whose feedback, with a
    successful rollout of the group, makes the model its own teacher; the dataset column `privileged_context` is
    feedback that does not depend on the rollout.

    Example:

    ```python
    trainer = CreditTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=lambda completions, answer, **kwargs: [
            Verdict(float(a in c[-1]["content"]), f"Correct answer: {a}")
            for c, a in zip(completions, answer)
        ],
        args=CreditConfig(output_dir="runs/first", gradient_accumulation_steps=8),
        train_dataset=dataset,  # columns `prompt`, as messages, and `answer`
    )
    trainer.train()
    ```

    Raises:
        TypeError: `args` is not a `CreditConfig`.
        ValueError: the data or the model cannot train with this configuration; the message names the fix. Nothing is
            generated before these checks.
    """

    _tag_names: ClassVar = ["trl", "credit"]
    _name = "CREDIT"
    _paper: ClassVar = {
        "title": "From Generic Correlation to Input-Specific Credit in On-Policy Self Distillation",
        "citation": textwrap.dedent("""\
            @article{shen2026credit,
                title  = {{From Generic Correlation to Input-Specific Credit in On-Policy Self Distillation}},
                author = {Guobin Shen and Lei Huang and Xiang Cheng and Chenxiao Zhao and Jindong Li and Dongcheng Zhao
                          and Xing Yu},
                year   = 2026,
            }"""),
    }

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: CreditConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            # A process's 8 x 8 rollouts are 8 problems, the paper's mini-batch on LiveCodeBench.
            args = CreditConfig(f"{name.split('/')[-1]}-CREDIT", gradient_accumulation_steps=8)
        if not isinstance(args, CreditConfig):
            raise TypeError(f"`args` must be a `CreditConfig` (it extends `GRPOConfig`), got {type(args).__name__}.")
        self._verdicts = VerdictLog(VerifierPolicy(args.on_verifier_error, args.verifier_timeout))
        self.clock = StageClock(counts=lambda: self.model.training)
        self._eval_batches = 0
        checks.check_datasets(args, train_dataset, eval_dataset, kwargs.get("environment_factory"))
        checks.check_reward_columns(reward_funcs, train_dataset, kwargs.get("rollout_func"))
        await_engine(args)
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, **kwargs)
        keep_quantized_differentiable(self.model)
        if args.cast_lm_head_to_fp32:
            use_fp32_lm_head(self.model)
        if self.use_vllm:
            self.vllm_generation = PolicyGeneration.adopt(self.vllm_generation, args.seed)
        self.reward_funcs = [
            func if isinstance(func, nn.Module) else self._verdicts.recording(func, position)
            for position, func in enumerate(self.reward_funcs)
        ]
        self.alarms = Alarms(self.accelerator.is_main_process)
        if self._distills:
            self._init_distillation()

    @property
    def _distills(self) -> bool:
        return self.args.distillation_weight > 0.0

    @property
    def _loss_dtype(self) -> torch.dtype:
        """fp32, or fp64 for a model in fp64."""
        return torch.promote_types(self.model.dtype, torch.float32)

    def _init_distillation(self) -> None:
        checks.check_machine(self.args, self.model, self.accelerator)
        vocabulary = checks.check_vocabulary(self.args, self.model)
        is_complete = "topk" in self.args.distillation_support and self.args.distillation_topk == vocabulary
        self.support: Support = "full" if is_complete else self.args.distillation_support
        self.teacher = make_teacher(
            self.args.teacher_model_kind, self.model, self.accelerator, self.args.teacher_offload
        )
        checks.check_model(self.model, self.accelerator)
        if self.args.scoring_packed:
            check_packing(self.model)
        self._scoring_options = {
            "temperature": self.temperature,
            "batch_tokens": self.args.scoring_batch_tokens,
            "baseline": self.args.contrastive_baseline,
            "packed": self.args.scoring_packed,
            "kernels": self.args.distillation_kernels,
        }
        self.context_builder = ContextBuilder(self._tokenizer, self.args, self.eos_token_ids)
        if self.args.teacher_model_kind == "ema":
            self.add_callback(TeacherUpdate(self))
        if self.args.contrastive_coef == "auto":
            self.adaptive_coef = make_adaptive(self.args)
            self.add_callback(CoefficientUpdate(self.adaptive_coef))

    @property
    def contrastive_coef(self) -> float:
        """λ of the next update."""
        return self.args.contrastive_coef if self.adaptive_coef is None else self.adaptive_coef.value

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, "privileged_context", "task"]))

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        checks.check_enough_rows(self.args, self.train_dataset if dataset is None else dataset)
        return super()._get_train_sampler(dataset)

    # ------------------------------------------------------------------ rollout, verdict, contexts, scores

    def _generate(self, prompts: list) -> Any:
        self._turn = 0
        with self.clock.stage("rollout"):
            return super()._generate(prompts)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Environments that have `current_turn` are told it: their tools run next."""
        generated = super()._generate_single_turn(*args, **kwargs)
        set_current_turn(self.environments or (), self._turn)
        self._turn += 1
        return generated

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        """Verdicts: TRL gets the rewards, `self._rollouts` keeps what the contexts need."""
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        inputs = [
            {"truncated": ids[-1] not in ends, **row} for row, ids in zip(inputs, completion_ids_list, strict=True)
        ]
        self._verdicts.clear()
        with self.clock.stage("verdict"):
            rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.args.on_verifier_error == "skip":
            share = mask_skipped_rewards(rewards_per_func, self._verdicts.skipped(len(prompts)), self.accelerator)
            self._metrics["train" if self.model.training else "eval"]["credit/frac_verifier_skipped"].append(share)
        self._rollouts = GenerationBatch(
            rows=inputs,
            prompts=prompts,
            completion_ids=completion_ids_list,
            rewards=total_rewards(rewards_per_func, self.reward_weights),
            verdict_feedback=self._verdicts.feedback(len(prompts)),
            turn_feedback=self._verdicts.turn_feedback(len(prompts)),
            first=self.accelerator.process_index * len(prompts),
            group_size=self.num_generations if self.model.training else self.num_generations_eval,
        )
        return rewards_per_func

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._distills:
            checks.check_no_images(inputs)
        output = super()._generate_and_score_completions(inputs)
        if self.args.on_verifier_error == "skip":
            mask_skipped_tokens(output, self._verdicts.skipped(len(inputs)), self.accelerator)
        mode = "train" if self.model.training else "eval"
        self.alarms.check_engine(self._metrics[mode])
        if mode == "train":
            self.alarms.check_rewards(self._metrics[mode]["frac_reward_zero_std"][-1] == 1.0)
        if self._distills:
            checks.check_no_images([output])
            self._rollouts.turn_starts = [turn_starts(row) for row in loss_mask(output).tolist()]
            with self.clock.stage("contexts"):
                contexts = self._build_contexts(mode)
            with self.clock.stage("scores"):
                output.update(self._score(output, contexts))
        return output

    def _build_contexts(self, mode: str) -> list[TokenContexts]:
        """Teacher and contrast prompts of the local samples, with feedback on turns where there is any."""
        rollouts = self._rollouts
        decode = partial(self.processing_class.batch_decode, skip_special_tokens=True)
        privileged = gather_privileged_contexts(rollouts, self.args, decode)
        source = self._contrast_source(mode)
        built = build_contexts(rollouts, privileged, self.args, self.context_builder, self._renderer, *source)
        built = place_turns(built, rollouts, self.context_builder, self._renderer)
        counts = context_counts(built, wants_contrast=self.args.contrasts).to(self.accelerator.device)
        shares = context_metrics(self.accelerator.reduce(counts, reduction="sum"))
        for name, value in shares.items():
            self._metrics[mode][name].append(value)
        self.alarms.check_contexts(shares)
        self.alarms.check_unread(*unread_feedback(rollouts, self.args))
        return built

    def _contrast_source(self, mode: str) -> tuple[Any, int]:
        """The rows to draw other questions from, and the number of this generation batch."""
        if mode == "train":
            return self.train_dataset, self._step // (self.args.steps_per_generation * self.num_iterations)
        self._eval_batches += 1
        has_rows = isinstance(self.eval_dataset, Dataset)
        return self.eval_dataset if has_rows else self.train_dataset, _EVAL_STREAM + self._eval_batches

    def _renderer(self, sample: int) -> Render:
        """How the student's prompt of this sample was rendered, up to tokenisation."""
        has_environments = self.environment_factories is not None
        tools = self._env_tools[self._batch_environments[sample]] if has_environments else self.tools
        return chat_renderer(self.processing_class, self._is_vlm, tools, self.chat_template, self.chat_template_kwargs)

    def _score(self, output: dict[str, Any], contexts: list[TokenContexts]) -> dict[str, Tensor]:
        device = output["completion_ids"].device
        scores = context_masks(contexts, device)
        if self.support in _IN_STEP:
            return scores | pack_contexts(contexts, device)
        mask = loss_mask(output) & scores["teacher_mask"][:, None]
        return scores | score_completions(
            self.teacher,
            [c.ids for c in contexts],
            output["completion_ids"],
            output["completion_mask"],
            mask,
            support=self.support,
            topk=self.args.distillation_topk,
            tail=self.args.distillation_tail,
            **self._scoring_options,
            chunk_size=self.args.distillation_chunk_size,
            columns=[c.columns for c in contexts],
        )

    # ------------------------------------------------------------------ objective

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        weight = self.args.distillation_weight
        if weight == 0.0:
            return super()._compute_loss(model, inputs)
        loss = self._distillation_loss(model, inputs)
        if weight == 1.0:
            return loss
        return weight * loss + (1.0 - weight) * super()._compute_loss(model, inputs)

    def _distillation_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        mask = loss_mask(inputs) & inputs["teacher_mask"][:, None]
        contrasted = inputs["contrast_mask"][:, None].expand_as(mask)[mask]
        student_loss = partial(
            self._student_loss,
            inputs,
            self._token_weights(inputs, mode)[mask],
            contrasted.to(self._loss_dtype) * self.contrastive_coef,
            self._teacher_of(inputs, mask),
        )
        loss, terms, aux_loss = run_in_wrapped_forward(model, self.accelerator.unwrap_model(model), student_loss, mask)
        if aux_loss is not None:
            steps = self.current_gradient_accumulation_steps if mode == "train" else 1.0
            loss = loss + self.router_aux_loss_coef * aux_loss / steps
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss).mean().item())
        self._log_tokens(CreditLoss(loss=loss, **terms), contrasted, mode)
        return loss

    def _teacher_of(self, inputs: dict[str, Any], mask: Tensor) -> Scores | TeacherStates:
        if self.support not in _IN_STEP:
            return stored_scores(inputs, mask)
        contexts, columns = unpack_contexts(inputs)
        return gather_states(
            self.teacher,
            contexts,
            inputs["completion_ids"],
            inputs["completion_mask"],
            mask,
            columns=columns,
            **self._scoring_options,
        )

    def _student_loss(
        self, inputs: dict[str, Any], weights: Tensor, coef: Tensor, teacher: Scores | TeacherStates, mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Runs inside the wrapper's forward, so that DDP and FSDP see backbone and head used there."""
        model = self.accelerator.unwrap_model(self.model)
        with self.accelerator.autocast():
            hidden, aux_loss = completion_states(model, inputs, router_loss=self.aux_loss_enabled)
        old_token_logps = inputs.get("old_per_token_logps")
        terms = credit_loss(
            hidden[mask],
            lm_head(model, self.temperature, self.args.distillation_kernels),
            inputs["completion_ids"][mask],
            weights,
            teacher,
            contrastive_coef=coef,
            rule=self.args.contrast_rule,
            alpha=self.args.distillation_alpha,
            support=self.support,
            topk=self.args.distillation_topk,
            tail=self.args.distillation_tail,
            old_token_logps=None if old_token_logps is None else old_token_logps[mask],
            is_clip=self.args.distillation_is_clip,
            chunk_size=self.args.distillation_chunk_size,
        )
        return terms.loss, {name: value for name, value in vars(terms).items() if name != "loss"}, aux_loss

    def _token_weights(self, inputs: dict[str, Any], mode: str) -> Tensor:
        train = mode == "train"  # an evaluation batch is neither split nor accumulated
        return token_weights(
            inputs,
            self.loss_type,
            accumulation=self.current_gradient_accumulation_steps if train else 1.0,
            max_completion_length=self.max_completion_length,
            num_processes=self.accelerator.num_processes,
            steps_per_generation=self.args.steps_per_generation if train else 1,
            dtype=self._loss_dtype,
        )

    def _log_tokens(self, terms: CreditLoss, contrasted: Tensor, mode: str) -> None:
        metrics = token_metrics(terms, contrasted, lambda sums: self.accelerator.reduce(sums, reduction="sum"))
        entropy, contrasted_tokens = metrics.pop("credit/student_entropy"), metrics.pop("credit/contrasted_tokens")
        if self.adaptive_coef is not None:
            if mode == "train":
                self.adaptive_coef.observe(metrics[self.adaptive_coef.metric], contrasted_tokens)
            metrics["credit/contrastive_coef"] = self.adaptive_coef.value
        if self.support == "sampled":  # one token is no distribution
            for name in ("kl_to_target", "kl_to_teacher", "support_mass_student", "support_mass_teacher"):
                metrics.pop(f"credit/{name}")
        self.alarms.check_tokens(metrics, full_shape(self.model.get_output_embeddings().weight)[0])
        if self.args.distillation_weight == 1.0:  # else GRPO's own
            self._metrics[mode]["entropy"].append(entropy)
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    # ------------------------------------------------------------------ logging, time

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        with self.clock.around("update"):
            return super().training_step(model, inputs, num_items_in_batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            for name, seconds in self.clock.report(self.state.global_step).items():
                self._metrics["train"][name].append(seconds)
            if self._distills:
                lost = self.alarms.check_gradient(logs, self._metrics["train"])
                self._metrics["train"]["credit/frac_lost_gradient"].append(lost)
                self._metrics["train"]["credit/teacher_drift"].append(self.teacher.drift())
        self._eval_batches = 0  # every evaluation draws alike, one after a resumption too
        super().log(logs, start_time)
