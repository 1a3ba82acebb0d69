"""What a sweep runs: a YAML file, checked before anything starts.

    model: Qwen/Qwen3-0.6B
    task: sciknoweval:chemistry
    config: {max_steps: 100, learning_rate: 1.0e-6}      # CreditConfig, common to all arms
    evaluation: {k: 16, eval_steps: 5}                   # EvaluationCallback
    grid:                                                # one product, or a list of products
      - method: [GRPO, SDPO]
      - {method: [CREDIT], contrastive_coef: [0.05, 0.1, 0.2, 0.5]}
      - {method: [CREDIT], contrastive_count: [2, 4]}
      - {method: [hint-contrast, foreign-hint]}
    seeds: [1, 2, 3, 4, 5]

Combinations that are the same training are one arm, under the name that comes first: SDPO knows no λ and no C, GRPO no
teacher at all, CREDIT with λ = 0 is SDPO, and an option at its default, or as in `config`, changes nothing.
"""

from __future__ import annotations

import itertools
import operator
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

# What each method means in CreditConfig's terms; the last two are controls.
METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {"distillation_weight": 0.0},
    "SDPO": {"contrastive_coef": 0.0},
    "CREDIT": {},
    "hint-contrast": {"contrastive_swap": "hint"},
    "foreign-hint": {"teacher_hint": "foreign"},
}
LARGEST = 100_000  # values in a file
LAUNCHERS = ("process", "inline", "accelerate")

# Options that a method does not read, by the beginning of their names.
_UNREAD = {"GRPO": ("contrastive_", "distillation_", "teacher_"), "SDPO": ("contrastive_",)}
_SYMBOLS = {
    "contrastive_coef": "λ",
    "contrastive_count": "C",
    "contrastive_form": "form",
    "contrastive_source": "source",
    "contrastive_gate": "gate",
    "contrastive_plausibility": "plausibility",
    "contrastive_baseline": "baseline",
    "distillation_tail": "tail",
    "teacher_context": "context",
}
_SLUGS = {"λ": "lambda"}
# Set by the sweep for every job, so a spec that sets them asks for something that it would not get.
_OWN = ("output_dir", "seed", "resume_from_checkpoint", "overwrite_output_dir")


@dataclass(frozen=True)
class Arm:
    """One configuration, trained once a seed.

    Args:
        name: shown in tables, such as `CREDIT λ=0.2`.
        method: a key of `METHODS`.
        options: what it adds to the common `CreditConfig` fields.
    """

    name: str
    method: str
    options: Mapping[str, Any]

    @property
    def slug(self) -> str:
        """The name as a folder's."""
        text = self.name
        for symbol, word in _SLUGS.items():
            text = text.replace(symbol, word)
        return re.sub(r"[^a-z0-9.+]+", "-", text.lower()).strip("-")


@dataclass(frozen=True)
class SweepSpec:
    """A sweep, as its YAML file says it.

    Args:
        model: hub name, directory, or `quickstart`; with `{seed}` in it, one model a seed.
        task: for `load_task`.
        grid: one mapping of options to values, or several; a product each. `method` is one of the options, any other
            is a field of `CreditConfig`.
        seeds: of the runs.
        config: fields of `CreditConfig` that all arms share.
        evaluation: arguments of `EvaluationCallback`.
        data: `train_split`, `path` and `max_train_rows` of the training rows.
        launcher: `"process"` runs each job in a process of its own, `"inline"` in this one (fast for tiny models),
            `"accelerate"` through `accelerate launch`.
        accelerate_args: for `accelerate launch`.
        keep_checkpoints: leave the checkpoints of finished jobs on disk.

    Raises:
        ValueError: a field that is not of its kind, an unknown method, launcher or option, no seeds, or an option that
            the sweep sets itself.
    """

    model: str
    task: str
    grid: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    seeds: Sequence[int]
    config: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    launcher: str = "process"
    accelerate_args: Sequence[str] = ()
    keep_checkpoints: bool = False

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.launcher not in LAUNCHERS:
            raise ValueError(f"`launcher` is one of {', '.join(LAUNCHERS)}, got {self.launcher!r}.")
        if not self.seeds or not all(isinstance(seed, int) for seed in self.seeds):
            raise ValueError(f"`seeds` is a list of whole numbers, at least one; got {self.seeds!r}.")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"`seeds` repeats itself: {list(self.seeds)}.")
        for name in _OWN:
            if name in self.config:
                raise ValueError(f"`config.{name}` is set by the sweep for every job; leave it out.")
        unknown = set(self.data) - {"train_split", "path", "max_train_rows"}
        if unknown:
            raise ValueError(f"`data` has train_split, path and max_train_rows, not {', '.join(sorted(unknown))}.")
        self.arms()

    def _check_kinds(self) -> None:
        for name in ("model", "task"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"`{name}` is a name, got {reprlib.repr(getattr(self, name))}.")
        for name in ("config", "evaluation", "data"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"`{name}` maps options to values, got {getattr(self, name)!r}.")
        if not isinstance(self.grid, Mapping | list | tuple):
            raise ValueError(
                f"`grid` is one mapping of options to lists of values, or a list; got {reprlib.repr(self.grid)}."
            )
        if not isinstance(self.seeds, list | tuple):
            raise ValueError(f"`seeds` is a list of whole numbers, at least one; got {self.seeds!r}.")
        try:
            self.model.format(seed=0)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"`model` may hold {{seed}} and no other braces, got {self.model!r}.") from error

    def arms(self) -> list[Arm]:
        """The arms of all grids, each once, in order.

        Raises:
            ValueError: an unknown method, a grid that is no mapping of options to lists, or two arms whose names make
                the same directory.
        """
        grids = [self.grid] if isinstance(self.grid, Mapping) else list(self.grid)
        arms: dict[str, Arm] = {}
        for grid in grids:
            for point in _product(grid):
                arm = make_arm(point, self.config)
                if any(_is_same_training(arm, other, self.config) for other in arms.values()):
                    continue
                same = arms.setdefault(arm.slug, arm)
                if same != arm:
                    raise ValueError(
                        f"Two arms would share the directory {arm.slug!r}: {dict(same.options)} and "
                        f"{dict(arm.options)}. Leave one out of the grid."
                    )
        if not arms:
            raise ValueError("`grid` holds no arm.")
        return list(arms.values())


def read_spec(path: str | Path) -> SweepSpec:
    """Read and check a sweep's YAML file.

    Raises:
        ValueError: not YAML, or not a sweep; the message names file and field.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    _check_size(content, path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a mapping of a sweep's fields.")
    known = {one.name for one in fields(SweepSpec)}
    required = ("model", "task", "grid", "seeds")
    if unknown := sorted(set(content) - known):
        raise ValueError(f"{path}: unknown field {', '.join(unknown)}; a sweep has {', '.join(sorted(known))}.")
    if missing := [name for name in required if name not in content]:
        raise ValueError(f"{path}: {', '.join(missing)} missing.")
    try:
        return SweepSpec(**content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_size(content: Any, path: Path) -> None:
    """Refuse a file whose anchors expand to more than any sweep holds."""
    waiting, count = [content], 0
    while waiting:
        value, count = waiting.pop(), count + 1
        if count > LARGEST:
            raise ValueError(f"{path} expands to more than {LARGEST:,} values; a sweep is far smaller.")
        waiting += [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def make_arm(point: Mapping[str, Any], common: Mapping[str, Any]) -> Arm:
    """The arm of one point of a grid, without what its method does not read.

    Args:
        point: `method` and fields of `CreditConfig`.
        common: the fields that all arms share.

    Raises:
        ValueError: an unknown method, or an option that the method itself decides.
    """
    point = dict(point)
    method = point.pop("method", "CREDIT")
    if method not in METHODS:
        raise ValueError(f"Unknown method {method!r}: choose among {', '.join(METHODS)}.")
    coefficient = point.get("contrastive_coef", common.get("contrastive_coef"))
    if method == "CREDIT" and coefficient == 0.0:
        method = "SDPO"
    kept = {k: v for k, v in point.items() if not k.startswith(_UNREAD.get(method, ()))}
    decided = METHODS[method].keys() & kept.keys()
    if decided:
        raise ValueError(f"Method {method} decides {', '.join(sorted(decided))} itself; leave it out of its grid.")
    shown = [f"{_SYMBOLS.get(name, name)}={_short(value)}" for name, value in kept.items()]
    return Arm(" ".join([method, *shown]), method, {**METHODS[method], **kept})


def _is_same_training(one: Arm, other: Arm, common: Mapping[str, Any]) -> bool:
    """Whether all options have the same values, by the arm, the common ones or default."""
    from credit_trl.config import CreditConfig

    defaults = {known.name: known.default for known in fields(CreditConfig)}
    named = one.options.keys() | other.options.keys()
    values = ([arm.options.get(name, common.get(name, defaults.get(name))) for name in named] for arm in (one, other))
    return operator.eq(*values)


def _product(grid: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if not isinstance(grid, Mapping):
        raise ValueError(f"A grid maps options to lists of values, got {reprlib.repr(grid)}.")
    values = [value if isinstance(value, list | tuple) else [value] for value in grid.values()]
    for chosen in itertools.product(*values):
        yield dict(zip(grid, chosen, strict=True))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
