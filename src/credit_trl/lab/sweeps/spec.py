"""Sweep specification: a YAML file that is checked before anything starts.

    model: Qwen/Qwen3-0.6B
    task: sciknoweval:chemistry
    config: {max_steps: 100, learning_rate: 1.0e-6}      # CreditConfig, common to all arms
    evaluation: {k: 16, eval_steps: 5}                   # EvaluationCallback
    grid:                                                # one product, or a list of products
      - method: [GRPO, SDPO]
      - {method: [CREDIT], contrastive_coef: [0.05, 0.1, 0.2, 0.5]}
      - {method: [CREDIT], contrastive_count: [2, 4]}
      - {method: [hint-contrast, temper-only, foreign-hint]}
    seeds: [1, 2, 3, 4, 5]

Combinations that train the same are one arm with the first one's name: SDPO ignores λ and C, GRPO ignores the teacher,
CREDIT with λ = 0 is SDPO, and an option at its default or at its value in `config` changes nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from credit_trl.tasks.printable import printable, printable_lines

# Options of CreditConfig that select a method. "hint-contrast", "temper-only" and "foreign-hint" are controls.
METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {"distillation_weight": 0.0},
    "SDPO": {"contrastive_coef": 0.0},
    "CREDIT": {},
    "hint-contrast": {"contrastive_swap": "hint"},
    "temper-only": {"contrastive_swap": "self"},
    "foreign-hint": {"teacher_hint": "foreign"},
    "modulate": {"credit_use": "modulate", "credit_weight": "delta_v"},
    "modulate-s": {"credit_use": "modulate", "credit_weight": "s", "contrastive_source": "wrong_feedback"},
    "route": {"credit_use": "route", "contrastive_coef": 0.0},
}
LAUNCHERS = ("process", "inline", "accelerate")
# Labels of options in the names of arms.
OPTION_LABELS = {
    "contrastive_coef": "λ",
    "contrastive_count": "C",
    "contrastive_form": "form",
    "contrastive_source": "source",
    "contrastive_gate": "gate",
    "contrastive_plausibility": "plausibility",  # an option of version 0.1, found in its run directories
    "contrastive_baseline": "baseline",
    "distillation_tail": "tail",
    "teacher_context": "context",
}

MAX_ARMS = 1_000  # combinations of a sweep, before those that train the same are merged
MAX_JOBS = 10_000  # combinations times seeds
# Of one file. PyYAML reads this many bytes in less than a second.
_MAX_BYTES, _MAX_VALUES, _MAX_DEPTH = 32_768, 100_000, 8
_IGNORED_PREFIXES = {
    "GRPO": ("contrastive_", "distillation_", "teacher_"),
    "SDPO": ("contrastive_",),
    "route": ("contrastive_",),
}
_JOB_OPTIONS = ("output_dir", "seed", "resume_from_checkpoint", "overwrite_output_dir")  # set by the sweep
_DATA_OPTIONS = {"train_split": "str", "path": "str | None", "max_train_rows": "int | None"}  # and their types
# Annotation of an option -> its type and the words for it; values of other annotations are not checked.
_KINDS: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "float": (int | float, "a number"),
    "int": (int, "an integer"),
    "str": (str, "a string"),
    "Mapping[str, Any]": (Mapping, "a mapping of options to values"),
}


@dataclass(frozen=True)
class Arm:
    """One configuration, trained once per seed.

    Args:
        name: name in tables, such as `CREDIT λ=0.2`.
        method: a key of `METHODS`.
        options: `CreditConfig` fields in addition to the sweep's common ones.
    """

    name: str
    method: str
    options: Mapping[str, Any]

    @property
    def slug(self) -> str:
        """The name as a directory name, of at most 255 characters as file systems allow."""
        slug = re.sub(r"[^a-z0-9.+]+", "-", self.name.replace("λ", "lambda").lower()).strip("-")
        return slug if len(slug) <= 255 else f"{slug[:200]}-{hashlib.sha256(slug.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class SweepSpec:
    """A sweep.

    Args:
        model: hub name, directory, or `quickstart`; `{seed}` in it selects one model per seed.
        task: name for `load_task`.
        grid: one mapping of options to values, or several; each is a product. Options are `method` and fields of
            `CreditConfig`.
        seeds: training seeds.
        config: `CreditConfig` fields of all arms.
        evaluation: arguments of `EvaluationCallback`.
        data: `train_split`, `path` and `max_train_rows` of the training rows.
        launcher: `"process"` runs each job in a new process, `"inline"` in this process (fast for tiny models),
            `"accelerate"` through `accelerate launch`.
        accelerate_args: arguments of `accelerate launch`.
        keep_checkpoints: keep the checkpoints of finished jobs.

    Raises:
        ValueError: a field of the wrong type, an unknown method, launcher or option, no seeds, or an option that the
            sweep sets itself.
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
        self._check_types()
        if self.launcher not in LAUNCHERS:
            raise ValueError(f"`launcher` must be one of {', '.join(LAUNCHERS)}, got {self.launcher!r}.")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"`seeds` repeats a seed: {list(self.seeds)}.")
        _check_not_set_by_sweep(self.config, "config")
        self._check_data()
        if (jobs := len(self.arms()) * len(self.seeds)) > MAX_JOBS:
            raise ValueError(f"The sweep has {jobs:,} jobs; at most {MAX_JOBS:,} are allowed. Divide it.")

    def _check_types(self) -> None:
        """Raise for fields of the wrong type; `reprlib` shortens the value in the message."""
        for one in fields(self):
            if one.name != "grid":  # see `_values`
                check_type(one.name, getattr(self, one.name), str(one.type))
        arguments, seeds = self.accelerate_args, self.seeds
        if not isinstance(arguments, list | tuple) or not all(isinstance(one, str | int | float) for one in arguments):
            raise ValueError(f"`accelerate_args` must be a list of arguments, got {reprlib.repr(arguments)}.")
        if not isinstance(seeds, list | tuple) or not seeds or not all(map(_is_seed, seeds)):
            raise ValueError(
                f"`seeds` must be a list of at least one integer from 0 to 2^32 − 1, got {reprlib.repr(seeds)}."
            )
        if {"{", "}"} & set(self.model.replace("{seed}", "")):
            raise ValueError(f"`model` may contain {{seed}} and no other braces, got {reprlib.repr(self.model)}.")

    def _check_data(self) -> None:
        """Raise for an unknown option of `data`, or one of the wrong type."""
        if unknown := sorted(self.data.keys() - _DATA_OPTIONS):
            raise ValueError(f"`data` has the options {', '.join(_DATA_OPTIONS)}, not {', '.join(unknown)}.")
        for name, value in self.data.items():
            check_type(f"data.{name}", value, _DATA_OPTIONS[name])
        if (rows := self.data.get("max_train_rows")) is not None and rows < 1:
            raise ValueError(f"`data.max_train_rows` must be at least 1, got {rows}.")

    def arms(self) -> list[Arm]:
        """The arms of all grids in order, each once."""
        from credit_trl.config import CreditConfig

        grids = self.grid if isinstance(self.grid, list | tuple) else [self.grid]
        values = [_values(grid) for grid in grids]
        if (count := sum(math.prod(map(len, own)) for own in values)) > MAX_ARMS:
            raise ValueError(f"`grid` has {count:,} combinations; a sweep has at most {MAX_ARMS:,}.")
        # Options of an arm that sets none. Arms that differ from them in the same way train the same.
        usual = {known.name: known.default for known in fields(CreditConfig)} | dict(self.config)
        arms: dict[str, Arm] = {}
        trained: list[dict[str, Any]] = []
        for grid, own_values in zip(grids, values, strict=True):
            for chosen in itertools.product(*own_values):
                arm = make_arm(dict(zip(grid, chosen, strict=True)), self.config)
                own = {name: value for name, value in arm.options.items() if value != usual.get(name)}
                if own in trained:
                    continue
                trained.append(own)
                same = arms.setdefault(arm.slug, arm)
                if same != arm:
                    raise ValueError(
                        f"Two arms share the directory {arm.slug!r}: {dict(same.options)} and {dict(arm.options)}. "
                        "Remove one from the grid."
                    )
        if not arms:
            raise ValueError("`grid` has no arm. Give at least one option with a value.")
        return list(arms.values())


def read_spec(path: str | Path) -> SweepSpec:
    """Read and check a sweep's YAML file.

    Raises:
        ValueError: not YAML, or not a sweep; the message names the file and the field.
    """
    path = Path(path)
    with path.open("rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES:,} bytes, which a sweep does not need.")
    try:
        content = yaml.load(raw.decode("utf-8"), _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not YAML: {printable_lines(str(error))}") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply.") from None
    _check_size(content, path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a mapping of a sweep's fields.")
    known = {one.name: one.default is MISSING and one.default_factory is MISSING for one in fields(SweepSpec)}
    if unknown := sorted(content.keys() - known, key=str):
        raise ValueError(
            f"{path}: unknown field {printable(', '.join(map(str, unknown)))}; a sweep has {', '.join(sorted(known))}."
        )
    if missing := [name for name, required in known.items() if required and name not in content]:
        raise ValueError(f"{path}: {', '.join(missing)} missing.")
    try:
        return SweepSpec(**content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _Loader(yaml.SafeLoader):
    """Builds plain values only, without merge keys (`<<`), whose expansion grows exponentially as it is read.

    The time of open brackets grows with the square of their number, so their number is limited as they are read.
    """

    def fetch_flow_collection_start(self, token: type) -> None:
        if self.flow_level == 2 * _MAX_DEPTH:
            raise yaml.YAMLError("nested too deeply")
        super().fetch_flow_collection_start(token)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys (<<) are refused", key.start_mark)


def _check_size(content: Any, path: Path) -> None:
    """Raise for a file that is nested too deeply, or whose anchors expand to too many values."""
    waiting, count = [(content, 1)], 0
    while waiting:
        (value, depth), count = waiting.pop(), count + 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"{path} is nested more than {_MAX_DEPTH} levels deep.")
        if count > _MAX_VALUES:
            raise ValueError(f"{path} expands to more than {_MAX_VALUES:,} values; remove nested anchors.")
        inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        waiting += [(one, depth + 1) for one in inner]


def make_arm(point: Mapping[str, Any], common: Mapping[str, Any]) -> Arm:
    """Make the arm of one point of a grid, without the options that its method ignores."""
    options = dict(point)
    method = options.pop("method", "CREDIT")
    if odd := [name for name in options if not isinstance(name, str)]:
        raise ValueError(f"Options of a grid have names, got {odd[0]!r}.")
    _check_not_set_by_sweep(options, "grid")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"Unknown method {method!r}: choose among {', '.join(METHODS)}.")
    if method == "CREDIT" and options.get("contrastive_coef", common.get("contrastive_coef")) == 0.0:
        method = "SDPO"
    kept = {name: value for name, value in options.items() if not name.startswith(_IGNORED_PREFIXES.get(method, ()))}
    if decided := sorted(METHODS[method].keys() & kept.keys()):
        raise ValueError(f"Method {method} sets {', '.join(decided)} itself; remove it from its grid.")
    shown = [f"{OPTION_LABELS.get(name, name)}={_format(value)}" for name, value in kept.items()]
    return Arm(" ".join([method, *shown]), method, {**METHODS[method], **kept})


def check_type(name: str, value: Any, annotation: str) -> None:
    """Raise a `ValueError` for a value of a YAML file that the annotation of its option, as `int | None`, excludes."""
    kind, *others = annotation.split(" | ")
    if kind not in _KINDS or (value is None and "None" in others):
        return
    wanted, words = _KINDS[kind]
    is_named = not isinstance(value, Mapping) or all(isinstance(option, str) for option in value)
    if not isinstance(value, wanted) or not is_named or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"`{name}` must be {words}, got {reprlib.repr(value)}.")


def _check_not_set_by_sweep(options: Mapping[str, Any], field_name: str) -> None:
    if own := [name for name in _JOB_OPTIONS if name in options]:
        raise ValueError(f"`{field_name}.{own[0]}` is set by the sweep for every job; remove it.")


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _values(grid: Mapping[str, Any]) -> list[Sequence[Any]]:
    """Values of each option of a grid."""
    if not isinstance(grid, Mapping):
        raise ValueError(f"A grid maps options to lists of values, got {reprlib.repr(grid)}.")
    return [value if isinstance(value, list | tuple) else [value] for value in grid.values()]


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
