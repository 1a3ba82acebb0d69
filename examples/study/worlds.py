"""Worlds of the study: task, base, branch and training settings of each.

`python worlds.py weak 309 runs/weak-309` pretrains the base of a seed into a new directory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from branch import BranchPoint
from embedded_base.architecture import build_tokenizer
from embedded_base.curriculum import TEMPLATES, template_texts
from embedded_base.curriculum import WORLDS as EMBEDDED
from embedded_base.pretrain import make_base_of
from planted.base import CURRICULA, fidelity, make_planted_base
from planted.task import FILLER, SKIPPED, STEP
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from credit_trl.tasks import Task, load_task
from credit_trl.tasks.quickstart import SHORTCUT_THOUGHT

# Options of `CreditConfig` of every world and arm: 16 prompts of 4 rollouts a step.
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 64,
    "num_generations": 4,
    "max_completion_length": 32,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "temperature": 1.0,
    "distillation_topk": 20,
    "distillation_tail": "bucket",
    "use_successful_as_teacher": False,  # z is the feedback alone, for which δ and s are measured
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
    **TEMPLATES,  # the wording that the bases were pretrained to read
}


@dataclass(frozen=True)
class World:
    """A task, its bases and the branch that is measured on them.

    Args:
        name: name of the world and of its table.
        task_name: name for `load_task`.
        point: branch between the planted text and that of the prompt.
        fidelity: share of probes whose feedback a model and its tokenizer read right.
        make_base: pretrains the base of a seed into a directory; raises `RuntimeError` if it fails its gate.
        options: options of `CreditConfig` besides `COMMON`.
        eval_steps: optimizer steps between evaluations.
    """

    name: str
    task_name: str
    point: BranchPoint
    fidelity: Callable[[PreTrainedModel, PreTrainedTokenizerFast], float]
    make_base: Callable[..., None]
    options: dict[str, Any] = field(default_factory=dict)
    eval_steps: int = 30

    @property
    def task(self) -> Task:
        return load_task(self.task_name)


def _embedded(name: str, **options: Any) -> World:
    point = BranchPoint("Thought:", SHORTCUT_THOUGHT, "cue")
    is_right = partial(EMBEDDED[name].lookup_accuracy, seed=1)
    return World(name, "quickstart", point, is_right, partial(_make_embedded_base, name), options)


def _make_embedded_base(name: str, seed: int, directory: Path) -> None:
    make_base_of(EMBEDDED[name], build_tokenizer(template_texts()), seed, directory)


def _planted(name: str, task: str, point: BranchPoint, eval_steps: int = 30, **options: Any) -> World:
    make = partial(make_planted_base, name)
    return World(name, f"planted.task:{task}", point, partial(fidelity, CURRICULA[name]), make, options, eval_steps)


_THOUGHT = BranchPoint("Thought:", SKIPPED, "specific")
_SHORT = {"learning_rate": 1e-3, "teacher_update_rate": 0.02, "max_steps": 60}
_DRIFT = {"learning_rate": 7e-4, "teacher_update_rate": 0.05, "max_steps": 60}
WORLDS = {
    world.name: world
    for world in (
        _embedded("plain", **_SHORT),
        _embedded("shortcut", **_SHORT),
        _embedded("weak", **_DRIFT | {"max_steps": 90}),
        _planted("tables", "TABLES", _THOUGHT, **_DRIFT, max_completion_length=18),
        _planted("skip", "SKIP", _THOUGHT, **_DRIFT | {"max_steps": 90}, max_completion_length=18),
        _planted("useful", "USEFUL", BranchPoint("Thought:", STEP, "specific"), **_DRIFT, max_completion_length=20),
        _planted(
            "filler",
            "FILLED",
            BranchPoint("Action Input:", FILLER, "specific"),
            eval_steps=25,
            **_DRIFT | {"max_steps": 75, "learning_rate": 3e-4},
            max_completion_length=44,
        ),
    )
}


def pretrain(world: World, seed: int, directory: Path) -> None:
    """Pretrain the base of a seed, or of the seed plus 100, 200, … where a base fails its gate.

    Raises:
        RuntimeError: five bases failed.
    """
    for attempt in range(5):
        try:
            world.make_base(seed + 100 * attempt, directory)
        except RuntimeError as error:
            print(f"{world.name}, seed {seed + 100 * attempt}: {error}", flush=True)
        else:
            return
    raise RuntimeError(f"Five bases of world {world.name!r} failed their gate, the first with seed {seed}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=sorted(WORLDS))
    parser.add_argument("seed", type=int)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    pretrain(WORLDS[args.world], args.seed, args.directory)
