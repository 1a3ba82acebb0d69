"""`CreditMapCallback`: token maps during training."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.gather import build_contexts
from credit_trl.contexts.prompts import images_of, with_images
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import Rollout, data_url, with_contrasts
from credit_trl.lab.analysis.tokenmap import TokenMap, map_response, read_maps, write_maps
from credit_trl.lab.analysis.vocabulary_logps import RolloutContexts, vocabulary_logps
from credit_trl.rollout.batch import content_key
from credit_trl.run_directory import MAPS_FOLDER
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.sharding import reshard
from credit_trl.training.optional import OptionalEvents


class CreditMapCallback(OptionalEvents, TrainerCallback):
    """Write token maps to `credit_maps/` in the output directory every few steps; the run's report shows them.

    Every `CreditTrainer` with a teacher has one, see `lab.report.run_callbacks`.

    At the first step, every `every` steps and the last, before the optimizer step, it scores rollouts of the current
    generation batch with the feedback and contrast prompts of their loss, and writes `step-000050.json`. The rollouts
    of the first step are scored again each time, so that they can be compared. A run that resumes inside a generation
    batch, whose rollouts no checkpoint stores, writes the next file with the next batch.

    Args:
        trainer: a `CreditTrainer` with a teacher.
        every: steps between two files.
        rollouts: number of rollouts with a teacher, over all processes.
    """

    def __init__(self, trainer: Any, *, every: int = 50, rollouts: int = 4) -> None:
        self.trainer = trainer
        self.every = every
        self.rollouts = rollouts
        self._unmapped: Any = None  # the last generation batch of an evaluation or an earlier call of `train`

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.directory = Path(args.output_dir) / MAPS_FOLDER
        self._due = False
        self._unmapped = self.trainer._generation_batch
        self._pinned = self._read_pinned() if state.global_step > 0 else None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._unmapped = self.trainer._generation_batch

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step + 1
        self._due = self._due or step in (1, state.max_steps) or step % self.every == 0
        if self._due and self.trainer._generation_batch is not self._unmapped:
            self._due = False
            self._write(step)
        elif self._due and self._unmapped is None and step == state.max_steps:
            self.warn("the last step has no token map, as the run resumed inside its generation batch")

    def _write(self, step: int) -> None:
        """Score the current and the pinned rollouts on all processes; the main process writes the file."""
        trainer = self.trainer
        student = Teacher(trainer.model, trainer.accelerator)
        checkpoint = Checkpoint(f"step-{step}", trainer._tokenizer, student, trainer.teacher)
        share = math.ceil(self.rollouts / trainer.accelerator.num_processes)
        chosen = _choose(self.attempt(partial(self._current_rollouts, step)) or [], share)
        # Sharded weights need equally many passes on every process.
        maps = self._maps(checkpoint, chosen, share)
        if self._pinned is None:
            self._pinned = chosen
        else:
            maps += self._maps(checkpoint, self._pinned[:share], share)
        reshard(trainer.model)  # the update would not reach the group that FSDP2 keeps gathered
        maps = gather_object(maps)
        if maps and trainer.accelerator.is_main_process:
            self.attempt(partial(write_maps, maps, self.directory / f"step-{step:06d}.json"))

    def _maps(self, checkpoint: Checkpoint, rollouts: Sequence[Rollout], count: int) -> list[TokenMap]:
        """Maps of the rollouts, and idle passes for those that are missing to `count`."""
        attempts = [
            self.attempt(partial(map_response, checkpoint, rollout, self.trainer.args)) for rollout in rollouts
        ]
        nothing = TokenContexts(None)
        idle = [(checkpoint.student, nothing), (checkpoint.teacher, nothing)]
        for _ in range(count - len(rollouts)):
            list(vocabulary_logps(idle, []))
        return [token_map for token_map in attempts if token_map is not None]

    def _current_rollouts(self, step: int) -> list[Rollout]:
        """Local rollouts of the current generation batch that have a teacher, with the contexts of their loss."""
        trainer = self.trainer
        batch = trainer._generation_batch
        config = with_contrasts(trainer.args)
        of_run = trainer.context_builder
        ends, marks = trainer.eos_token_ids, of_run.marks
        builder = ContextBuilder(of_run.tokenizer, config, ends, of_run.render, of_run.reader, marks)
        rollouts = []
        for sample, contexts in enumerate(build_contexts(batch, builder)):
            if contexts.teacher is not None:
                rollouts.append(self._rollout(step, sample, contexts, builder))
        return rollouts

    def _rollout(self, step: int, sample: int, contexts: TokenContexts, builder: ContextBuilder) -> Rollout:
        batch = self.trainer._generation_batch
        tokenizer = self.trainer._tokenizer
        number = batch.first + sample
        prompt = batch.prompts[sample]
        tools = batch.tools[sample] if batch.tools else None
        student = builder.encode(prompt, PrivilegedContext(), tools)
        context_images = contexts.images if any(contexts.images) else []
        sources = [builder.reader.sources(prompt_images) if prompt_images else [] for prompt_images in context_images]
        return Rollout(
            identifier=f"step {step}, rollout {number}",
            prompt=with_images(prompt, list(map(content_key, images_of(prompt)))),
            token_ids=tuple(batch.completion_ids[sample]),
            privileged=contexts.privileged,
            contrasts=tuple(tokenizer.batch_decode(contexts.contrasts)),
            reward=batch.rewards[number],
            contexts=RolloutContexts(
                student, contexts.teacher, contexts.contrasts, contexts.insert_at, context_images
            ),
            images=tuple(tuple(map(data_url, images)) for images in sources or [[]]),
        )

    def _read_pinned(self) -> list[Rollout] | None:
        """This process's share of the rollouts of the first file; the number of processes may have changed."""
        accelerator = self.trainer.accelerator
        paths = sorted(self.directory.glob("step-*.json")) if accelerator.is_main_process else []
        responses = [
            token_map.response for path in paths[:1] for token_map in self.attempt(partial(read_maps, path)) or ()
        ]
        # Images are not stored as the model reads them.
        pinned = gather_object([response for response in responses if not any(response.images)])
        return pinned[accelerator.process_index :: accelerator.num_processes] if pinned else None


def _choose(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """Rollouts that are not empty, the lowest reward of each group before a second of any group.

    A wrong answer has the tokens that a step lowers.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda rollout: rollout.reward):
        if rollout.token_ids:
            groups.setdefault(rollout.group, []).append(rollout)
    rounds = chain.from_iterable(zip_longest(*groups.values()))
    return [rollout for rollout in rounds if rollout is not None][:count]
