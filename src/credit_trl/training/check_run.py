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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
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

_RED = "\x1b[31m"
_BLUE = "\x1b[34m"
_NO_COLOUR = "\x1b[0m"
SHOWN_CHARACTERS = 4000  # of each text of the rollout
# Attributes of the trainer that the check restores, and those that it replaces by copies meanwhile.
_CHANGED = (
    "state control optimizer lr_scheduler log_completions mask_truncated_completions entropy_coef _last_world_entropy "
    "_entropy_window_stats".split()
)
_COPIED = "args callback_handler alarms clock credit_step generation_config vllm_generation".split()


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
    folder = output_dir / ".check"
    try:
        with _changed_trainer(trainer, meter, folder), torch.random.fork_rng():
            trainer.train()
        trainer.accelerator.wait_for_everyone()
        size = 0
        for path in folder.glob("checkpoint-*/**/*"):
            size += path.stat().st_size if path.is_file() else 0
    finally:
        if trainer.accelerator.is_main_process:
            _remove_folders(output_dir, folder)
    gigabytes = size / 1e9
    meter.rows["a checkpoint"] = f"{gigabytes:10.3f} GB"
    begin, middle, end = meter.times
    usual = timedelta(seconds=round(steps * (middle - begin) / meter.updates))
    longest = timedelta(seconds=round(steps * (end - middle) / meter.updates))
    lines = [meter.rollout]
    lines += [f"success {name:<25}{value}" for name, value in meter.facts.items()]
    lines.append("one step at the longest lengths, on this process")
    lines += [f"  {name:<22}{value}" for name, value in meter.rows.items()]
    lines.append(f"the run of {steps} steps: {usual} as in the first batch, {longest} at the longest lengths")
    lines.append(f"its checkpoints: {checkpoints} with {checkpoints * gigabytes:.3f} GB")
    return "\n".join(lines)


@contextmanager
def _changed_trainer(trainer: Any, meter: "StepMeter", folder: Path) -> Iterator[None]:
    """Let the trainer write into `folder` and change no weights, without the run's callbacks; restored afterwards."""
    attributes = vars(trainer).copy()
    try:
        for name in _COPIED:
            setattr(trainer, name, copy.copy(getattr(trainer, name, None)))
        trainer.log_completions = False
        trainer.mask_truncated_completions = False
        trainer.optimizer = None
        trainer.lr_scheduler = None
        args = trainer.args
        args.output_dir = str(folder)
        args.max_steps = 2 * meter.updates
        args.save_steps = 2 * meter.updates
        args.logging_steps = meter.updates
        args.save_strategy = args.logging_strategy = "steps"
        args.eval_strategy = "no"
        args.eval_on_start = False
        args.learning_rate = 0.0
        args.lr_scheduler_type = "constant"
        args.lr_scheduler_kwargs = {}
        args.load_best_model_at_end = False
        args.push_to_hub = False
        callbacks = [meter]
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, DefaultFlowCallback | TeacherUpdate):
                callbacks.insert(-1, callback)
        trainer.callback_handler.callbacks = callbacks
        if trainer.credit_step is not None:
            trainer.credit_step.prepare = meter.prepare
        yield
    finally:
        for name in (*_CHANGED, *_COPIED):
            if name in attributes:
                setattr(trainer, name, attributes[name])
            else:
                vars(trainer).pop(name, None)


def _remove_folders(output_dir: Path, check_folder: Path) -> None:
    """Remove the folder of the check, and the output folder where it is empty, with its empty relative parents."""
    shutil.rmtree(check_folder, ignore_errors=True)
    parents = [] if output_dir.is_absolute() else list(output_dir.parents)[:-1]
    for folder in (output_dir, *parents):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


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
        is_first = not self.rollout
        if not is_first:
            length = self.trainer.args.max_reprompt_len
            contexts = [_lengthened(sample_contexts, length) for sample_contexts in contexts]
        prepared = self._prepare(batch, tensors, contexts)
        lengths = tensors["completion_mask"].sum(dim=1).tolist()
        sequence_counts = []
        teacher_tokens = 0
        for sample_contexts, completion_length in zip(contexts, lengths, strict=True):
            sequences = [ids for ids, _ in sample_contexts.sequences()]
            sequence_counts.append(len(sequences))
            teacher_tokens += sum(map(len, sequences)) + len(sequences) * completion_length
        student_tokens = int(tensors["prompt_mask"].sum()) + sum(lengths)
        self.rows["tokens, student"] = f"{student_tokens:10,}"
        self.rows["tokens, teacher"] = f"{teacher_tokens:10,}"
        if is_first:
            self._first_batch = (batch, contexts)
            sample = int(np.argmax(sequence_counts))
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
        weights = list(model.parameters())
        state: list[Any] = []
        for values in self.trainer.optimizer.state.values():
            state += values.values()
        self.rows["weights"] = _size(weights)
        self.rows["gradients"] = _size([weight.grad for weight in weights])
        self.rows["optimizer's state"] = _size(state)
        self.rows["teacher's weights"] = _size(self.trainer._teacher_weights().values())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.rollout:  # without a teacher
            self.rollout = _rollout_block(self.trainer, self.trainer._generation_batch, 0, TokenContexts(None), None)
        if state.global_step == state.max_steps:
            self.times.append(time.perf_counter())
            resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident
            self.rows["peak memory"] = f"{memory / 2**30:10.3f} GiB"
            if self._first_batch is not None:
                batch, contexts = self._first_batch
                self.facts = success_with_feedback(self.trainer, batch, contexts)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, value in logs.items():
            if name.startswith("credit/seconds_"):
                self.rows[name.removeprefix("credit/seconds_")] = f"{value:10.3f} s"


def success_with_feedback(trainer: Any, batch: GenerationBatch, contexts: Sequence[TokenContexts]) -> dict[str, str]:
    """Share of successes of a generation batch without z, with z, and with z of another prompt.

    Each sample with z is answered again by the policy. Every process must call it. Empty with tools or images.
    """
    if trainer.tools or trainer.environment_factories or any(images_of(prompt) for prompt in batch.prompts):
        return {}
    builder = trainer.context_builder
    with_z = [sample_contexts.teacher for sample_contexts in contexts]
    with_foreign_z: list[list[int] | None] = [None] * len(contexts)
    if len(contexts) > batch.group_size:
        for i, prompt in enumerate(batch.prompts):
            foreign = contexts[(i + batch.group_size) % len(contexts)].privileged
            if foreign:
                with_foreign_z[i] = builder.build(prompt, foreign).teacher
    facts = {"without z": _share(batch.rewards, trainer.args, [True] * len(batch.rewards))}
    if trainer.use_vllm:
        trainer.vllm_generation.generation_kwargs = trainer.args.generation_kwargs or {}
    else:
        trainer.generation_config.min_new_tokens = None
    for name, prompt_ids in (("with z", with_z), ("with another prompt's z", with_foreign_z)):
        policy_ids = []
        for ids, prompt in zip(prompt_ids, batch.prompts, strict=True):
            policy_ids.append(ids or builder.encode(prompt, PrivilegedContext()))
        completion_ids = trainer._generate_single_turn(policy_ids, None, {}, 1)[0]
        completions = trainer._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        if not isinstance(batch.prompts[0], str):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        trainer._calculate_rewards(batch.rows, batch.prompts, completions, completion_ids)
        is_read = gather_object([ids is not None for ids in prompt_ids])
        facts[name] = _share(trainer._rollout.batch.rewards, trainer.args, is_read)
    return facts


def _share(rewards: Sequence[float], args: CreditConfig, is_counted: Sequence[bool]) -> str:
    if not any(is_counted):
        return "no answer has any"
    successes = np.array(is_successful(rewards, args.success_reward_threshold))[np.array(is_counted)]
    return f"{successes.mean():.0%} of {len(successes)} answers"


def _size(values: Iterable[Any]) -> str:
    """GiB of the local shards of the tensors among some values, with their dtypes."""
    size = 0
    dtypes = set()
    for value in values:
        if torch.is_tensor(value):
            part = local_part(value)
            size += part.nbytes
            dtypes.add(str(part.dtype).removeprefix("torch."))
    return f"{size / 2**30:10.3f} GiB  {', '.join(sorted(dtypes))}"


def _lengthened(contexts: TokenContexts, length: int) -> TokenContexts:
    """Contexts whose prompts are repeated up to `length` tokens, feedback on single turns included."""
    if contexts.teacher is None:
        return contexts
    prompts = []
    for ids, _ in contexts.sequences():
        repeated = ids * math.ceil(length / len(ids))
        prompts.append(repeated[:length])
    return TokenContexts(prompts[0], prompts[1:])


def _rollout_block(
    trainer: Any, batch: GenerationBatch, sample: int, contexts: TokenContexts, advantage: Tensor | None
) -> str:
    """Prompt, completion, verdict, prompts of the teacher, and tokens by R_t of a local sample."""
    decode = trainer._tokenizer.decode
    ids = batch.completion_ids[sample]
    texts = [decode(prompt_ids)[:SHOWN_CHARACTERS] for prompt_ids, _ in contexts.sequences()]
    teacher, contrast = [*texts, "none", "none"][:2]
    parts = {
        "prompt": batch.prompts[sample],
        "completion": decode(ids)[:SHOWN_CHARACTERS],
        "verdict": f"reward {batch.rewards[batch.first + sample]:g}, feedback: {batch.feedback[sample]}",
        "teacher's prompt": teacher,
        "contrast prompt": contrast,
    }
    if advantage is None:
        return text_block(parts)
    title = "--- R_t of the tokens: red is rewarded, blue is punished"
    tokens = ""
    for token_id, value in zip(ids, advantage.tolist(), strict=False):
        tokens += _coloured(escape_controls(decode([token_id])), value)
    return "\n".join([text_block(parts), title, tokens, "---"])


def _coloured(text: str, value: float) -> str:
    """A token in the colour of its R_t, with none near 0; with the number where there is no colour."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return f"{text}[{value:+.1f}]"
    if abs(value) < 0.05:
        return text
    colour = _RED if value > 0 else _BLUE
    return f"{colour}{text}{_NO_COLOUR}"
