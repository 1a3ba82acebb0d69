"""`CreditMapCallback`: token maps of a run while it runs."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from credit_trl.contexts.build import build_contexts
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.privileged import gather_privileged_contexts
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.contexts.turns import place_turns
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.passes import Reading, conditionals
from credit_trl.lab.analysis.responses import Response, ResponseContexts
from credit_trl.lab.analysis.token_classes import Classify
from credit_trl.lab.analysis.tokenmap import TokenMap, map_response
from credit_trl.lab.analysis.tokenmap_html import write_html
from credit_trl.lab.analysis.tokenmap_parquet import read_parquet, write_parquet
from credit_trl.lab.analysis.tokenmap_summary import format_summary, summarize
from credit_trl.teacher.models import Teacher

DIRECTORY = "credit_maps"


class CreditMapCallback(TrainerCallback):
    """Write token maps every few steps into `credit_maps/` of the run's directory.

    At the first step and every `every` steps, before the optimizer moves, it takes rollouts of the current generation
    batch with the feedback and the other questions that the loss used, and writes `step-000050.html` and
    `step-000050.parquet`. The rollouts of the first step are kept: each later page shows them under the first and the
    current weights, side by side. `summary.md`, at the end, sums over all of the run's maps.

    Args:
        every: steps between two pages.
        rollouts: how many of a generation batch, over all processes; those that have a teacher.
        alternatives: tokens to list beside the realised one at each position.
        classify: token classes for the summary; by default `token_classes.default_classes`.
        trainer: a `CreditTrainer`; it can also come later, through `attach`.

    Raises:
        ValueError: `every` or `rollouts` below 1.
        RuntimeError: training begins and no trainer was attached.
        ValueError: training begins with `contrastive_coef="auto"` and a loss that adapts nothing.
    """

    def __init__(
        self,
        every: int = 50,
        *,
        rollouts: int = 4,
        alternatives: int = 5,
        classify: Classify | None = None,
        trainer: Any = None,
    ) -> None:
        if every < 1 or rollouts < 1:
            raise ValueError(f"`every` and `rollouts` must be at least 1, got {every} and {rollouts}.")
        self.every, self.rollouts, self.alternatives, self.classify = every, rollouts, alternatives, classify
        self.trainer = trainer
        self._due = False
        self._evaluation_rollouts: Any = None
        self._pinned: list[Response] = []
        self._pinned_step: int | None = None

    def attach(self, trainer: Any) -> None:
        """Tell the callback whose rollouts to draw."""
        self.trainer = trainer

    # ------------------------------------------------------------------------------------------------------- events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.trainer is None:
            raise RuntimeError(
                "CreditMapCallback does not know its trainer: `trainer.add_callback(CreditMapCallback(every=50, "
                "trainer=trainer))`, or `callback.attach(trainer)`."
            )
        if args.contrastive_coef == "auto" and self.trainer.adaptive_coef is None:
            raise ValueError(
                "`distillation_weight=0` adapts no λ, and a token map needs one: set `contrastive_coef` to a number."
            )
        self.directory = Path(args.output_dir) / DIRECTORY
        if state.is_world_process_zero:
            self._drop_after(state.global_step)
        if state.global_step > 0:
            self._read_pinned()

    def _drop_after(self, step: int) -> None:
        """Remove pages of steps that come again, or that another run left here: the summary sums over all pages."""
        for page in (*self.directory.glob("step-*.html"), *self.directory.glob("step-*.parquet")):
            if int(page.stem.removeprefix("step-")) > step:
                page.unlink()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._evaluation_rollouts = self.trainer._rollouts  # not to be taken for a generation batch of the run

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step + 1
        self._due = self._due or step == 1 or step % self.every == 0
        if self._due and self.trainer._rollouts is not self._evaluation_rollouts:
            self._due = False
            self._write(step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        pages = sorted(self.directory.glob("step-*.parquet")) if self.trainer.accelerator.is_main_process else []
        if pages:
            summary = summarize([m for page in pages for m in read_parquet(page)], top=20, min_count=2)
            (self.directory / "summary.md").write_text(format_summary(summary), encoding="utf-8")

    # -------------------------------------------------------------------------------------------------------- a page

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)

    def _write(self, step: int) -> None:
        """Score the pinned and the current rollouts, on all processes, and write the page on the first."""
        trainer = self.trainer
        student = Teacher(trainer.model, trainer.accelerator)
        checkpoint = Checkpoint(
            f"step-{step}",
            self._tokenizer,
            student,
            getattr(trainer, "teacher", student),
            contrastive_coef=None if trainer.adaptive_coef is None else trainer.adaptive_coef.value,
        )
        share = math.ceil(self.rollouts / trainer.accelerator.num_processes)
        chosen = _choose(self._responses(step), share, trainer.num_generations)
        first = self._pinned_step is None
        if first:
            self._pin(step, chosen)
        # Where weights are sharded every process must score as many responses as the others.
        maps = self._maps(checkpoint, chosen, share)
        if not first:
            maps += self._maps(checkpoint, self._pinned[:share], share)
        _reshard(trainer.model)
        maps = gather_object(maps)
        if trainer.accelerator.is_main_process:
            self.directory.mkdir(parents=True, exist_ok=True)
            if maps:
                write_parquet(maps, self._page(step, "parquet"))
                shown = [*self._first_maps(step, maps), *maps]
                write_html(shown, self._page(step, "html"), title=f"Token credit, step {step}")

    def _maps(self, checkpoint: Checkpoint, responses: Sequence[Response], count: int) -> list[TokenMap]:
        maps = [
            map_response(
                checkpoint,
                response,
                self.trainer.args,
                alternatives=self.alternatives,
                classify=self.classify,
            )
            for response in responses
        ]
        for _ in range(count - len(responses)):
            readings = [Reading(checkpoint.student, []), Reading(checkpoint.teacher, [])]
            list(conditionals(readings, []))
        return maps

    def _responses(self, step: int) -> list[Response]:
        """This process's rollouts of the current generation batch, with the contexts that their loss was made with."""
        trainer, rollouts = self.trainer, self.trainer._rollouts
        config = copy.copy(trainer.args)
        config.contrastive_coef = config.contrastive_coef or 1.0  # SDPO draws none, but its S_t is worth seeing
        batch = (trainer._step - 1) // (config.steps_per_generation * trainer.num_iterations)
        tokenizer = self._tokenizer

        def decode(ids: list[list[int]]) -> list[str]:
            return tokenizer.batch_decode(ids, skip_special_tokens=True)

        privileged = gather_privileged_contexts(rollouts, config, decode)
        builder = ContextBuilder(tokenizer, config, trainer.eos_token_ids)
        built = build_contexts(rollouts, privileged, config, builder, trainer._renderer, trainer.train_dataset, batch)
        built = place_turns(built, rollouts, builder, trainer._renderer)
        return [self._response(step, i, contexts) for i, contexts in enumerate(built) if contexts.ids is not None]

    def _response(self, step: int, sample: int, built: TokenContexts) -> Response:
        rollouts, tokenizer = self.trainer._rollouts, self._tokenizer
        number, prompt = rollouts.first + sample, rollouts.prompts[sample]
        teacher, *contrasts = built.ids
        if isinstance(prompt, str):
            student = tokenizer(prompt)["input_ids"]
        else:
            student = tokenizer(self.trainer._renderer(sample)(prompt), add_special_tokens=False)["input_ids"]
        return Response(
            f"step {step}, rollout {number}",
            prompt,
            tuple(rollouts.completion_ids[sample]),
            built.privileged,
            tuple(tokenizer.batch_decode(contrasts)),
            rollouts.rewards[number],
            ResponseContexts(student, teacher, contrasts, built.columns),
        )

    # ------------------------------------------------------------------------------------------------------- pinned

    @property
    def _pin_file(self) -> Path:
        return self.directory / f"pinned-{self.trainer.accelerator.process_index}.json"

    def _pin(self, step: int, responses: list[Response]) -> None:
        self._pinned_step, self._pinned = step, responses
        self.directory.mkdir(parents=True, exist_ok=True)
        records = [response.to_json() for response in responses]
        self._pin_file.write_text(json.dumps({"step": step, "responses": records}), encoding="utf-8")

    def _read_pinned(self) -> None:
        """What this process pinned before the run was resumed, which may have been fewer processes, or more."""
        kept = json.loads(self._pin_file.read_text("utf-8")) if self._pin_file.exists() else {}
        self._pinned = [Response.from_json(record) for record in kept.get("responses", ())]
        self._pinned_step = next((step for step in gather_object([kept.get("step")]) if step is not None), None)

    def _first_maps(self, step: int, maps: Sequence[TokenMap]) -> list[TokenMap]:
        """The pinned rollouts' maps under the first weights, as they were written then."""
        page = self._page(self._pinned_step, "parquet")
        if self._pinned_step == step or not page.exists():
            return []
        again = {token_map.response.identifier for token_map in maps}
        return [token_map for token_map in read_parquet(page) if token_map.response.identifier in again]

    def _page(self, step: int, suffix: str) -> Path:
        return self.directory / f"step-{step:06d}.{suffix}"


def _reshard(model: nn.Module) -> None:
    """FSDP2 keeps the last group gathered after a forward pass; the optimizer would step past that copy."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _choose(responses: Sequence[Response], count: int, group_size: int) -> list[Response]:
    """Rollouts that can be drawn, one of each group before a second of any."""
    order = sorted(range(len(responses)), key=lambda i: (i % group_size, i // group_size))
    return [responses[i] for i in order if responses[i].token_ids][:count]
