"""Dynamic sampling: groups without a signal are replaced by rollouts of other prompts.

Prompts are drawn from `(seed, step, round, group)`, so that a resumed run and a run with another number of processes
draw the same. Every process generates the same number of groups in a round; those that it does not need are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from credit_trl.contexts.privileged import gather_privileged_contexts
from credit_trl.loss.uses import silent_groups
from credit_trl.rollout.batch import GenerationBatch, loss_mask
from credit_trl.training.checks import check_no_images

_NO_IMAGES = "`dynamic_sampling_rounds` replaces samples without their images. Set `dynamic_sampling_rounds=0`."


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of this process: TRL's generation batch, this package's, and the names of the environments."""

    output: dict[str, Any]
    batch: GenerationBatch
    environments: Sequence[Any] = ()


@dataclass(frozen=True)
class Redraws:
    """Where replacements come from.

    Args:
        rows: the training dataset.
        step: index of the generation batch.
        pad_token_id: pads token ids of different lengths.
    """

    rows: Any
    seed: int
    step: int
    rounds: int
    pad_token_id: int

    def row(self, attempt: int, group: int) -> dict[str, Any]:
        """The row that replaces a group of the global batch in a round."""
        rng = np.random.default_rng([self.seed, self.step, attempt, group])
        return self.rows[int(rng.integers(len(self.rows)))]


def redraw(trainer: Any, rollouts: Rollouts) -> Rollouts:
    """`replace_silent_groups` for a `CreditTrainer`. Every process must call it.

    Logs the counts; other metrics stay those of the first rollouts: the rewards of redrawn groups are selected.
    """
    args, decode = trainer.args, trainer._decode
    check_no_images([*rollouts.batch.rows, rollouts.output], _NO_IMAGES)

    def silent(drawn: Rollouts) -> list[int]:
        teaches = [args.teacher_prompt == "student"] * len(drawn.batch.prompts)
        if args.distillation_weight > 0.0 and not all(teaches):
            teaches = list(map(bool, gather_privileged_contexts(drawn.batch, args, decode)))
        return silent_groups(drawn.batch, teaches, args)

    redraws = Redraws(
        trainer.train_dataset,
        args.seed,
        trainer.batch_index,
        args.dynamic_sampling_rounds,
        trainer._tokenizer.pad_token_id,
    )
    metrics = trainer._metrics["train"]
    kept = {name: list(values) for name, values in metrics.items()}
    rollouts, counts = replace_silent_groups(rollouts, trainer._rollouts, silent, redraws, trainer.accelerator)
    metrics.clear()
    metrics.update(kept)
    if rollouts.environments:
        trainer._batch_environments = rollouts.environments
    trainer._log_values(counts)
    return rollouts


def replace_silent_groups(
    rollouts: Rollouts,
    generate: Callable[[list[dict[str, Any]]], Rollouts],
    find_silent: Callable[[Rollouts], list[int]],
    redraws: Redraws,
    accelerator: Accelerator,
) -> tuple[Rollouts, dict[str, float]]:
    """Replace groups until each has a signal or the rounds are used up. Every process must call it.

    Args:
        rollouts: local rollouts, whole groups.
        generate: generates and grades rollouts of rows, one row a rollout.

    Returns:
        The rollouts, and `credit/redrawn_groups` and `credit/silent_groups`, numbers of groups of all processes.
    """
    size = rollouts.batch.group_size
    count, first = len(rollouts.batch.prompts) // size, rollouts.batch.first // size
    redrawn, attempt = 0, 0
    while True:
        silent: list[list[int]] = gather_object([find_silent(rollouts)])
        most = max(map(len, silent))
        if not most or attempt == redraws.rounds:
            break
        own = silent[accelerator.process_index]
        spare = [group for group in range(count) if group not in own]
        rows = [redraws.row(attempt, first + group) for group in (own + spare)[:most]]
        drawn = generate([dict(row) for row in rows for _ in range(size)])
        rollouts = _merge(rollouts, drawn, silent, redraws.pad_token_id)
        redrawn += sum(map(len, silent))
        attempt += 1
    rollouts.output["num_items_in_batch"] = accelerator.gather(loss_mask(rollouts.output).sum()).sum()
    counts = {"credit/redrawn_groups": float(redrawn), "credit/silent_groups": float(sum(map(len, silent)))}
    return rollouts, counts


def _merge(rollouts: Rollouts, drawn: Rollouts, silent: list[list[int]], pad_token_id: int) -> Rollouts:
    """The rollouts with the silent groups of each process replaced by its first drawn ones; all drew as many."""
    batch, size = rollouts.batch, rollouts.batch.group_size
    rank, most = batch.first // len(batch.prompts), len(drawn.batch.prompts) // size
    source = {  # local position -> position among the drawn
        group * size + i: k * size + i for k, group in enumerate(silent[rank]) for i in range(size)
    }
    rewards = list(batch.rewards)
    for process, groups in enumerate(silent):
        for k, group in enumerate(groups):
            start, new = process * len(batch.prompts) + group * size, (process * most + k) * size
            rewards[start : start + size] = drawn.batch.rewards[new : new + size]
    lists = tuple("rows prompts completion_ids verdict_feedback turn_feedback turn_starts corrected".split())
    replaced = {name: _pick(getattr(batch, name), getattr(drawn.batch, name), source) for name in lists}
    output = {
        name: _pick_rows(name, values, drawn.output[name], source, pad_token_id)
        for name, values in rollouts.output.items()
        if isinstance(values, Tensor) and values.ndim > 0
    }
    environments = _pick(rollouts.environments, drawn.environments, source)
    return Rollouts(rollouts.output | output, replace(batch, rewards=rewards, **replaced), environments)


def _pick(old: Sequence[Any], new: Sequence[Any], source: dict[int, int]) -> list[Any]:
    return [new[source[i]] if i in source and len(new) else one for i, one in enumerate(old)]


def _pick_rows(name: str, old: Tensor, new: Tensor, source: dict[int, int], pad_token_id: int) -> Tensor:
    """Rows of a tensor replaced, both padded to the longer one: prompts on the left, the others on the right."""
    if old.ndim > 1:
        width = max(old.shape[1], new.shape[1])
        value = pad_token_id if name.endswith("_ids") else 0
        sides = [(width - x.shape[1], 0) if name.startswith("prompt") else (0, width - x.shape[1]) for x in (old, new)]
        old, new = (torch.nn.functional.pad(x, s, value=value) for x, s in zip((old, new), sides, strict=True))
    merged = old.clone()
    for to, position in source.items():
        merged[to] = new[position]
    return merged
