"""`CreditTrainer.check`: one rollout and one step before a run, with the time, memory and disk that it needs.

The check trains on two generation batches with learning rate 0. The first is a usual one, of which a rollout is shown;
in the second, completions and the teacher's prompts have the longest lengths of the configuration.
"""

from __future__ import annotations

import copy
import math
import os
import resource
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DefaultFlowCallback, TrainerCallback

from credit_trl.contexts.tokens import TokenContexts
from credit_trl.objective import credit_target
from credit_trl.rollout.batch import GenerationBatch
from credit_trl.teacher.models import TeacherUpdate

SHOWN_CHARACTERS = 4000  # of each text of the rollout
_SECONDS = "credit/seconds_"
# Of the trainer, which a run changes, and of which it works on copies during the check.
_CHANGED = ("state", "control", "optimizer", "lr_scheduler", "log_completions", "mask_truncated_completions")
_COPIED = ("args", "callback_handler", "alarms", "clock", "credit_step", "generation_config", "vllm_generation")


def check_run(trainer: Any) -> str:
    """Report of the check. Weights, random state and `output_dir` are as before. Every process must call it.

    The first error of data, verifier, generation, scoring, update or checkpoint is raised.
    """
    args = trainer.args
    output_dir = Path(args.output_dir)
    folder = output_dir / "check"
    steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    save_steps = args.save_steps if args.save_steps >= 1 else args.save_steps * steps
    every = {"no": math.inf, "epoch": steps / args.num_train_epochs}.get(args.save_strategy, save_steps)
    checkpoints = min(int(steps / every), args.save_total_limit or steps)
    meter = StepMeter(trainer)
    last = 2 * meter.updates
    options = {"max_steps": last, "save_steps": last, "save_strategy": "steps", "logging_strategy": "steps"}
    options |= {"output_dir": str(folder), "learning_rate": 0.0, "logging_steps": 1, "eval_strategy": "no"}
    options |= {"load_best_model_at_end": False, "push_to_hub": False}
    own = {name: vars(trainer)[name] for name in (*_CHANGED, *_COPIED) if name in vars(trainer)}
    try:
        vars(trainer).update({name: copy.copy(own[name]) for name in _COPIED if name in own})
        vars(trainer).update(log_completions=False, mask_truncated_completions=False)
        vars(trainer.args).update(options)
        callbacks = trainer.callback_handler.callbacks
        kept = [one for one in callbacks if isinstance(one, DefaultFlowCallback | TeacherUpdate)]
        trainer.callback_handler.callbacks = [*kept, meter]
        if trainer.credit_step is not None:
            trainer.credit_step.prepare = meter.prepare
        with torch.random.fork_rng():
            trainer.train()
        trainer.accelerator.wait_for_everyone()
        size = sum(path.stat().st_size for path in folder.glob("checkpoint-*/**/*") if path.is_file()) / 1e9
    finally:
        vars(trainer).update(own)
        if trainer.accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            if output_dir.is_dir() and not any(output_dir.iterdir()):
                output_dir.rmdir()
    return "\n".join(
        [
            *meter.rollout,
            "one step at the longest lengths, on this process",
            *(f"  {stage:<20}{seconds:10.2f} s" for stage, seconds in meter.stages.items()),
            *(f"  tokens, {model:<12}{count:10,}" for model, count in meter.tokens.items()),
            f"  peak memory         {meter.memory / 2**30:10.2f} GiB",
            f"  a checkpoint        {size:10.3f} GB",
            f"the run of {steps} steps: {timedelta(seconds=round(steps * meter.seconds / meter.updates))}, "
            f"{checkpoints * size:.3f} GB in {checkpoints} checkpoints",
        ]
    )


class StepMeter(TrainerCallback):
    """Describes a rollout of the first generation batch, and lengthens and measures the second."""

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self.trainer = trainer
        self.updates = max(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps, 1)
        self.rollout: list[str] = []  # lines
        self.tokens: dict[str, int] = {}
        self.stages: dict[str, float] = {}  # seconds
        self.seconds = 0.0
        self.memory = 0
        self._prepare = trainer.credit_step and trainer.credit_step.prepare

    def prepare(
        self, batch: GenerationBatch, tensors: dict[str, Any], contexts: list[TokenContexts]
    ) -> dict[str, Any]:
        """`CreditStep.prepare`, with contexts of `max_reprompt_len` tokens in the second batch."""
        args = self.trainer.args
        is_first = not self.tokens
        if not is_first:
            contexts = [one if one.teacher is None else _lengthened(one, args.max_reprompt_len) for one in contexts]
        prepared = self._prepare(batch, tensors, contexts)
        lengths = tensors["completion_mask"].sum(dim=1).tolist()
        read = zip(contexts, lengths, strict=True)
        teacher = sum(len(ids) + length for own, length in read for ids, _ in own.sequences())
        self.tokens = {"student": int(tensors["prompt_mask"].sum()) + sum(lengths), "teacher": teacher}
        if is_first:
            step = self.trainer.credit_step
            coef = args.contrastive_coef * prepared["contrast_mask"]
            scores = (prepared["teacher_token_logps"], prepared["generic_token_logps"])
            logps = step.policy_logps(step.teacher.student, tensors)
            advantage = credit_target(*scores, coef, args.contrastive_form) - logps
            shown = max(range(len(contexts)), key=lambda one: len([*contexts[one].sequences()]))
            self.rollout = _rollout_lines(self.trainer, batch, shown, contexts[shown], advantage[shown])
        return prepared

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.updates:
            return
        self._started = time.perf_counter()
        self.trainer.alarms.enabled = False  # texts without an end would raise them
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if self.trainer.use_vllm:
            options = {"min_tokens": args.max_completion_length, "ignore_eos": True}
            self.trainer.vllm_generation.generation_kwargs = options
        else:
            self.trainer.generation_config.min_new_tokens = args.max_completion_length

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.rollout:  # without a teacher
            self.rollout = _rollout_lines(self.trainer, self.trainer._generation_batch, 0, TokenContexts(None), None)
        if state.global_step == state.max_steps:
            self.seconds = time.perf_counter() - self._started
            memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            self.memory = memory or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, seconds in logs.items() if state.global_step > self.updates else ():
            if name.startswith(_SECONDS):
                stage = name.removeprefix(_SECONDS)
                self.stages[stage] = self.stages.get(stage, 0.0) + seconds


def _lengthened(contexts: TokenContexts, length: int) -> TokenContexts:
    """Contexts whose prompts are repeated up to `length` tokens, feedback on single turns included."""
    teacher, *contrasts = [(ids * math.ceil(length / len(ids)))[:length] for ids, _ in contexts.sequences()]
    return TokenContexts(teacher, contrasts)


def _rollout_lines(
    trainer: Any, batch: GenerationBatch, sample: int, contexts: TokenContexts, advantage: Tensor | None
) -> list[str]:
    """Prompt, completion, verdict, prompts of the teacher, and tokens by R_t of a local sample."""
    decode = trainer._tokenizer.decode
    prompt = batch.prompts[sample]
    ids = batch.completion_ids[sample]
    messages = [prompt] if isinstance(prompt, str) else [f"{one['role']}: {one['content']}" for one in prompt]
    prompts = [decode(ids) for ids, _ in contexts.sequences()]
    parts = {
        "prompt": "\n".join(messages),
        "completion": decode(ids),
        "verdict": f"reward {batch.rewards[batch.first + sample]:g}, feedback: {batch.feedback[sample]}",
        "teacher's prompt": prompts[0] if prompts else "none",
        "contrast prompt": prompts[1] if len(prompts) > 1 else "none",
    }
    lines = [line for name, text in parts.items() for line in (f"--- {name}", _printable(text[:SHOWN_CHARACTERS]))]
    if advantage is None:
        return lines
    tokens = [_coloured(_printable(decode([one])), value) for one, value in zip(ids, advantage.tolist(), strict=False)]
    return [*lines, "--- R_t of the tokens: blue is reinforced, red is punished", "".join(tokens), "---"]


def _coloured(text: str, value: float) -> str:
    """A token in the colour of its R_t; with the number where there is no colour."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return f"{text}[{value:+.1f}]"
    return f"\x1b[{34 if value > 0 else 31}m{text}\x1b[0m"


def _printable(text: str) -> str:
    """The text with control and formatting characters written as `⟨U+001B⟩`."""
    return "".join(one if one.isprintable() or one == "\n" else f"⟨U+{ord(one):04X}⟩" for one in text)
