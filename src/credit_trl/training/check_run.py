"""`CreditTrainer.check`: one rollout and one step before a run, with the time, memory and disk that it needs.

The check trains on two generation batches with an optimizer of its own, at rate 0. The first is a usual one, of which
a rollout is shown; in the second, completions and teacher prompts have the longest lengths of the configuration.
"""

import copy
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor
from transformers import DefaultFlowCallback, TrainerCallback

from credit_trl.config import CreditConfig
from credit_trl.contexts.prompts import images_of
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts
from credit_trl.rollout.batch import GenerationBatch, is_successful, loss_mask
from credit_trl.teacher.models import TeacherUpdate
from credit_trl.teacher.sharding import local_part
from credit_trl.training.micro_batches import take_rows
from credit_trl.training.reporting import escape_controls, text_block
from credit_trl.training.step import CreditStep

SHOWN_CHARACTERS = 4000  # of each text of the rollout
# Attributes of the trainer that the check restores, and those that it replaces by copies meanwhile.
_CHANGED = (
    *("state", "control", "optimizer", "lr_scheduler", "log_completions", "mask_truncated_completions"),
    *("entropy_coef", "_last_world_entropy", "_entropy_window_stats"),
)
_COPIED = ("args", "callback_handler", "alarms", "clock", "credit_step", "generation_config", "vllm_generation")


def check_run(trainer: Any) -> str:
    """Report of the check. Weights and random state are as before, and an empty `output_dir` is removed.

    Every process must call it. The first error of data, verifier, generation, scoring, update or checkpoint is raised.
    """
    args = trainer.args
    output_dir = Path(args.output_dir)
    steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    save_steps = args.save_steps if args.save_steps >= 1 else args.save_steps * steps
    every = {"no": math.inf, "epoch": steps / args.num_train_epochs}.get(args.save_strategy, save_steps)
    checkpoints = min(math.ceil(steps / every), args.save_total_limit or steps)  # also after the last step
    meter = StepMeter(trainer)
    options = {"max_steps": 2 * meter.updates, "save_steps": 2 * meter.updates, "logging_steps": meter.updates}
    options |= {"save_strategy": "steps", "logging_strategy": "steps", "eval_strategy": "no", "learning_rate": 0.0}
    options |= {"eval_on_start": False, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}}
    options |= {"output_dir": str(output_dir / ".check"), "load_best_model_at_end": False, "push_to_hub": False}
    attributes = {name: vars(trainer)[name] for name in (*_CHANGED, *_COPIED) if name in vars(trainer)}
    try:
        vars(trainer).update({name: copy.copy(attributes[name]) for name in _COPIED if name in attributes})
        vars(trainer).update(
            log_completions=False, mask_truncated_completions=False, optimizer=None, lr_scheduler=None
        )
        vars(trainer.args).update(options)
        callbacks = trainer.callback_handler.callbacks
        callbacks_of_step = [
            callback for callback in callbacks if isinstance(callback, DefaultFlowCallback | TeacherUpdate)
        ]
        trainer.callback_handler.callbacks = [*callbacks_of_step, meter]
        if trainer.credit_step is not None:
            trainer.credit_step.prepare = meter.prepare
        with torch.random.fork_rng():
            trainer.train()
        trainer.accelerator.wait_for_everyone()
        files = [path for path in output_dir.glob(".check/checkpoint-*/**/*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e9
    finally:
        vars(trainer).update(attributes)
        if trainer.accelerator.is_main_process:
            shutil.rmtree(output_dir / ".check", ignore_errors=True)
            new_folders = [output_dir, *([] if output_dir.is_absolute() else output_dir.parents[:-1])]
            for folder in new_folders:
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
    meter.rows["a checkpoint"] = f"{size:10.3f} GB"
    seconds = [steps * (end - start) / meter.updates for start, end in pairwise(meter.times)]
    usual, longest = (timedelta(seconds=round(duration)) for duration in seconds)
    lines = [
        meter.rollout,
        *(f"success {name:<25}{value}" for name, value in meter.facts.items()),
        "one step at the longest lengths, on this process",
        *(f"  {name:<22}{value}" for name, value in meter.rows.items()),
        f"the run of {steps} steps: {usual} as in the first batch, {longest} at the longest lengths",
        f"its checkpoints: {checkpoints} with {checkpoints * size:.3f} GB",
    ]
    return "\n".join(lines)


class StepMeter(TrainerCallback):
    """Describes a rollout of the first generation batch, and lengthens and measures the second.

    A failure ends the run, which only measures.
    """

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self.trainer = trainer
        self.updates = max(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps, 1)
        self.rollout = ""
        self.facts: dict[str, str] = {}  # success by what is read
        self.rows: dict[str, str] = {}  # what is measured -> value with unit
        self.times: list[float] = []  # when the first batch begins, when the second begins and when it ends
        self._first_batch: tuple[GenerationBatch, list[TokenContexts]] | None = None
        self._prepare = trainer.credit_step and trainer.credit_step.prepare

    def prepare(
        self, batch: GenerationBatch, tensors: dict[str, Any], contexts: list[TokenContexts]
    ) -> dict[str, Any]:
        """`CreditStep.prepare`, with contexts of `max_reprompt_len` tokens in the second batch."""
        args = self.trainer.args
        if self.rollout:
            contexts = [
                index if index.teacher is None else _lengthened(index, args.max_reprompt_len) for index in contexts
            ]
        prepared = self._prepare(batch, tensors, contexts)
        lengths = tensors["completion_mask"].sum(dim=1).tolist()
        with_lengths = zip(contexts, lengths, strict=True)
        teacher = sum(
            len(ids) + length for sample_contexts, length in with_lengths for ids, _ in sample_contexts.sequences()
        )
        self.rows["tokens, student"] = f"{int(tensors['prompt_mask'].sum()) + sum(lengths):10,}"
        self.rows["tokens, teacher"] = f"{teacher:10,}"
        if not self.rollout:
            self._first_batch = (batch, contexts)
            sample = max(range(len(contexts)), key=lambda sample: len([*contexts[sample].sequences()]))
            advantages = self._advantages(take_rows(tensors | prepared, [sample]))
            self.rollout = _rollout_block(self.trainer, batch, sample, contexts[sample], advantages)
        return prepared

    @torch.no_grad()
    def _advantages(self, inputs: dict[str, Any]) -> Float[Tensor, " T"]:
        """R_t of a sample's tokens as the loss has it, conditional on a renormalised support; 0 without a score."""
        step: CreditStep = self.trainer.credit_step
        mask = loss_mask(inputs) & inputs["teacher_mask"][:, None]
        advantages = step.loss(step.teacher.student, inputs).terms.advantages
        return advantages.new_zeros(mask.shape).masked_scatter(mask, advantages)[0]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (0, self.updates):
            self.times.append(time.perf_counter())
        if state.global_step != self.updates:
            return
        self.trainer.alarms.enabled = False  # texts without an end would raise them
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if self.trainer.use_vllm:
            options = {"min_tokens": args.max_completion_length, "ignore_eos": True}
            self.trainer.vllm_generation.generation_kwargs = options
        else:
            self.trainer.generation_config.min_new_tokens = args.max_completion_length

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """What the step holds, before the gradients are freed."""
        states = self.trainer.optimizer.state.values()
        tensors_of = {"weights": [*model.parameters()], "gradients": [item.grad for item in model.parameters()]}
        tensors_of["optimizer's state"] = [
            value for item in states for value in item.values() if torch.is_tensor(value)
        ]
        tensors_of["teacher's weights"] = [*self.trainer._teacher_weights().values()]
        self.rows |= {name: _size(tensors) for name, tensors in tensors_of.items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.rollout:  # without a teacher
            self.rollout = _rollout_block(self.trainer, self.trainer._generation_batch, 0, TokenContexts(None), None)
        if state.global_step == state.max_steps:
            self.times.append(time.perf_counter())
            memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            memory = memory or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.rows["peak memory"] = f"{memory / 2**30:10.3f} GiB"
            if self._first_batch is not None:
                batch, contexts = self._first_batch
                self.facts = success_with_feedback(self.trainer, batch, contexts)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        stages = {name.removeprefix("credit/seconds_"): logs[name] for name in logs if "/seconds_" in name}
        self.rows |= {stage: f"{seconds:10.3f} s" for stage, seconds in stages.items()}


def success_with_feedback(trainer: Any, batch: GenerationBatch, contexts: Sequence[TokenContexts]) -> dict[str, str]:
    """Share of successes of a generation batch without z, with z, and with z of another prompt.

    Each sample with z is answered again by the policy. Every process must call it. Empty with tools or images.
    """
    if trainer.tools or trainer.environment_factories or any(images_of(prompt) for prompt in batch.prompts):
        return {}
    builder = trainer.context_builder
    prompts: dict[str, list[list[int] | None]] = {"with z": [], "with another prompt's z": []}
    for i, (prompt, sample_contexts) in enumerate(zip(batch.prompts, contexts, strict=True)):
        foreign = contexts[(i + batch.group_size) % len(contexts)].privileged
        is_other = len(contexts) > batch.group_size and bool(foreign)
        prompts["with z"].append(sample_contexts.teacher)
        prompts["with another prompt's z"].append(builder.build(prompt, foreign).teacher if is_other else None)
    facts = {"without z": _share(batch.rewards, trainer.args, [True] * len(batch.rewards))}
    if trainer.use_vllm:
        trainer.vllm_generation.generation_kwargs = trainer.args.generation_kwargs or {}
    else:
        trainer.generation_config.min_new_tokens = None
    for name, prompt_ids in prompts.items():
        students = [
            ids or builder.encode(prompt, PrivilegedContext())
            for ids, prompt in zip(prompt_ids, batch.prompts, strict=True)
        ]
        completion_ids = trainer._generate_single_turn(students, None, {}, 1)[0]
        texts = trainer._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        is_text = isinstance(batch.prompts[0], str)
        completions = texts if is_text else [[{"role": "assistant", "content": text}] for text in texts]
        trainer._calculate_rewards(batch.rows, batch.prompts, completions, completion_ids)
        is_read = gather_object([ids is not None for ids in prompt_ids])
        facts[name] = _share(trainer._rollouts.rewards, trainer.args, is_read)
    return facts


def _share(rewards: Sequence[float], args: CreditConfig, is_counted: Sequence[bool]) -> str:
    successes = is_successful(rewards, args.success_reward_threshold)
    counted = [success for success, counts in zip(successes, is_counted, strict=True) if counts]
    return f"{sum(counted) / len(counted):.0%} of {len(counted)} answers" if counted else "no answer has any"


def _size(tensors: list[Any]) -> str:
    """GiB of the local shards of tensors, with their dtypes."""
    present = [tensor for tensor in tensors if tensor is not None]
    local = list(map(local_part, present))
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in local}
    return f"{sum(tensor.nbytes for tensor in local) / 2**30:10.3f} GiB  {', '.join(sorted(dtypes))}"


def _lengthened(contexts: TokenContexts, length: int) -> TokenContexts:
    """Contexts whose prompts are repeated up to `length` tokens, feedback on single turns included."""
    teacher, *contrasts = [(ids * math.ceil(length / len(ids)))[:length] for ids, _ in contexts.sequences()]
    return TokenContexts(teacher, contrasts)


def _rollout_block(
    trainer: Any, batch: GenerationBatch, sample: int, contexts: TokenContexts, advantage: Tensor | None
) -> str:
    """Prompt, completion, verdict, prompts of the teacher, and tokens by R_t of a local sample."""
    decode = trainer._tokenizer.decode
    ids = batch.completion_ids[sample]
    teacher, contrast, *_ = [
        *(decode(prompt_ids)[:SHOWN_CHARACTERS] for prompt_ids, _ in contexts.sequences()),
        "none",
        "none",
    ]
    parts = {
        "prompt": batch.prompts[sample],
        "completion": decode(ids)[:SHOWN_CHARACTERS],
        "verdict": f"reward {batch.rewards[batch.first + sample]:g}, feedback: {batch.feedback[sample]}",
        "teacher's prompt": teacher,
        "contrast prompt": contrast,
    }
    if advantage is None:
        return text_block(parts)
    tokens = [
        _coloured(escape_controls(decode([token_id])), value)
        for token_id, value in zip(ids, advantage.tolist(), strict=False)
    ]
    title = "--- R_t of the tokens: red is rewarded, blue is punished"
    return "\n".join([text_block(parts), title, "".join(tokens), "---"])


def _coloured(text: str, value: float) -> str:
    """A token in the colour of its R_t, with none near 0; with the number where there is no colour."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return f"{text}[{value:+.1f}]"
    return text if abs(value) < 0.05 else f"\x1b[{31 if value > 0 else 34}m{text}\x1b[0m"
