"""Worlds whose outcome is predicted before training: their tasks, branches and bases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from branch import BranchPoint
from embedded_base import make_base
from embedded_base.curriculum import WORLDS
from planted.base import CURRICULA, fidelity, make_planted_base
from planted.task import FILLER, SKIPPED, STEP, TRAINED, TWO_HOP_CUES, two_hop_cue
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from credit_trl.tasks.quickstart import GROUPS, SHORTCUT_THOUGHT
from credit_trl.tasks.registry import Task, load_task


@dataclass(frozen=True)
class PredictedWorld:
    """A world with one planted branch.

    Args:
        name: name of the world.
        task_name: name for `load_task`.
        point: the branch.
        fidelity: share of probes whose feedback a model and its tokenizer read right.
        make_base: pretrains the base of a seed into a directory.
        cues: cues of each group of the test split, each of one group only.
    """

    name: str
    task_name: str
    point: BranchPoint
    fidelity: Callable[[PreTrainedModel, PreTrainedTokenizerFast], float]
    make_base: Callable[..., None]
    cues: Mapping[str, Sequence[str]]

    @property
    def task(self) -> Task:
        return load_task(self.task_name)

    @cached_property
    def cue_of(self) -> dict[str, str]:
        """Cue of each prompt of the test split."""
        return {row["id"]: row["cue"] for row in self.task.build("test")}


def _planted(name: str, task: str, point: BranchPoint, cues: Mapping[str, Sequence[str]]) -> PredictedWorld:
    return PredictedWorld(
        name, task, point, partial(fidelity, CURRICULA[name]), partial(make_planted_base, name), cues
    )


_TWO_HOPS = {group: [two_hop_cue(cue, group) for cue in cues] for group, cues in TWO_HOP_CUES.items()}
_TABLES = {group: [f"{cue}-{group}" for cue in TRAINED] for group in GROUPS}
PREDICTED = {
    world.name: world
    for world in (
        PredictedWorld(
            "weak",
            "quickstart",
            BranchPoint("Thought:", SHORTCUT_THOUGHT, "cue"),
            partial(WORLDS["weak"].lookup_accuracy, seed=1),
            partial(make_base, "weak"),
            GROUPS,
        ),
        _planted("tables", "planted.task:TABLES", BranchPoint("Thought:", SKIPPED, "specific"), _TABLES),
        _planted("skip", "planted.task:SKIP", BranchPoint("Thought:", SKIPPED, "specific"), _TWO_HOPS),
        _planted("filler", "planted.task:FILLED", BranchPoint("Action Input:", FILLER, "specific"), GROUPS),
        _planted("useful", "planted.task:USEFUL", BranchPoint("Thought:", STEP, "specific"), _TWO_HOPS),
    )
}
