"""Every option of TRL's `GRPOConfig` at a value other than its default: GRPO's weights bit for bit at weight 0, and at
weights 1 and 0.5 training, an error that names the fix, or a place in the documented list of options without effect.

The options are read from the installed TRL, so a new one joins by itself. Its value follows from its type; one whose
type says too little fails `test_every_option_has_a_value_or_a_reason` until `trl_options.toml` has it.
"""

import enum
import gc
import re
import tomllib
import types
import warnings
from dataclasses import MISSING, fields
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from credit_trl import CreditConfig, CreditTrainer
from test_trainer_parity import mixed_rewards, mixed_verdicts
from tiny import build_model

ROOT = Path(__file__).parents[1]
GRID = tomllib.loads((Path(__file__).parent / "trl_options.toml").read_text("utf-8"))
BASE, VALUES, NOT_RUN, BESIDE, BY_CHANCE = (
    GRID[name] for name in ("base", "values", "not_run", "beside", "by_chance")
)
DETERMINISM = ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")
DETERMINISM += ("ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC")
FIX = re.compile(r"\b(set|lower|increase|use|install|train|give|remove|write)\b", re.IGNORECASE)


@cache
def options() -> dict[str, Any]:
    """Option of the installed `GRPOConfig` -> its value in the grid; `MISSING` where none can be derived."""
    hints = get_type_hints(GRPOConfig)
    values = {}
    for field in fields(GRPOConfig):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        choices = field.metadata.get("choices")
        values[field.name] = VALUES.get(field.name, derive(hints[field.name], BASE.get(field.name, default), choices))
    return values


def derive(declared: Any, current: Any, choices: Any = None) -> Any:
    """A value of a type other than the current one, or `MISSING`."""
    if get_origin(declared) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(declared) if kind is not type(None)]
    else:
        kinds = [declared]
    literals = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    members = [m.value for kind in kinds if isinstance(kind, enum.EnumMeta) for m in kind]
    for value in [*(choices or ()), *literals, *members]:
        if value != getattr(current, "value", current):
            return value
    if bool in kinds:
        return not current
    if float in kinds:
        return current / 2 if current else 0.1
    if int in kinds:
        return 2 * current if isinstance(current, int) and current > 0 else 2
    return MISSING


class Trained(enum.Enum):
    """TRL's trainer, or ours with a weight of the distillation."""

    TRL = "GRPOTrainer"
    ZERO = 0.0
    ONE = 1.0
    HALF = 0.5


@pytest.fixture(scope="module")
def train(tokenizer, tmp_path_factory):
    """Weights after the steps of a trainer with options, or the error that refused them; each run is made once."""
    sums = [(a, b) for a in range(3) for b in (1, 2)]
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in sums]
    )
    gc.freeze()  # each run collects garbage, and most of the time would pass over the modules
    done: dict[tuple[Trained, str], dict[str, torch.Tensor] | Exception] = {}

    def run(which, trl_options):
        key = (which, repr(sorted(trl_options.items())))
        if key not in done:
            try:
                done[key] = weights(which, trl_options)
            except Exception as error:
                done[key] = error
        return done[key]

    def weights(which, trl_options):
        trl_options = {**BASE, "output_dir": str(tmp_path_factory.mktemp("run")), **trl_options}
        model = build_model(tokenizer)
        if which is Trained.TRL:
            trainer = GRPOTrainer(
                model, mixed_rewards, GRPOConfig(**trl_options), rows, rows, processing_class=tokenizer
            )
        else:
            config = CreditConfig(**trl_options, distillation_weight=which.value)
            trainer = CreditTrainer(model, mixed_verdicts, config, rows, rows, processing_class=tokenizer)
        trainer.train()
        assert trainer.state.global_step == trainer.state.max_steps
        return {name: parameter.detach().clone() for name, parameter in trainer.model.state_dict().items()}

    yield run
    gc.unfreeze()


@pytest.fixture(autouse=True)
def global_state():
    """Restore what some options change in torch, in transformers and in the environment."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in DETERMINISM:
            patch.setenv(name, "")
        yield
    torch.use_deterministic_algorithms(deterministic)


def equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)


def without_effect() -> list[str]:
    """Patterns of the documented options that a distillation loss ignores."""
    page = (ROOT / "docs" / "options.md").read_text("utf-8")
    section = page.partition("## TRL options without effect")[2].partition("\n## ")[0]
    listed = re.search(r"These have no effect: (.*?)\.\s", section, re.DOTALL)
    return re.findall(r"`([\w*]+)`", listed[1])


def test_every_option_has_a_value_or_a_reason():
    assert [name for name, value in options().items() if value is MISSING and name not in NOT_RUN] == []
    assert sorted({*VALUES, *NOT_RUN, *BESIDE, *BY_CHANCE} - options().keys()) == []


def test_documented_options_without_effect_exist():
    for pattern in without_effect():
        assert any(fnmatch(name, pattern) for name in options()), pattern


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in options() if name not in NOT_RUN])
def test_every_option_at_each_weight(train, make_model, name):
    start = make_model().state_dict()
    beside = BESIDE.get(name, {})
    trl_options = {**beside, name: options()[name]}
    theirs, ours = train(Trained.TRL, trl_options), train(Trained.ZERO, trl_options)
    if isinstance(theirs, Exception):  # TRL refuses it
        assert type(ours) is type(theirs), ours
    elif isinstance(ours, Exception):
        assert_names_the_fix(ours, name)
    else:
        assert equal(ours, theirs)
    for weight in (Trained.ONE, Trained.HALF):
        distilled = train(weight, trl_options)
        if isinstance(distilled, Exception):
            if not isinstance(theirs, Exception):
                assert_names_the_fix(distilled, *trl_options)
            continue
        assert all(torch.isfinite(value).all() for value in distilled.values())
        assert isinstance(theirs, Exception) or equal(theirs, start) or not equal(distilled, start)
    distilled = train(Trained.ONE, trl_options)
    if isinstance(distilled, Exception) or isinstance(ours, Exception) or name in BY_CHANCE:
        return
    acts_on_grpo = not equal(ours, train(Trained.ZERO, beside))
    acts_on_distillation = not equal(distilled, train(Trained.ONE, beside))
    is_documented = any(fnmatch(name, pattern) for pattern in without_effect())
    assert not (acts_on_grpo and not acts_on_distillation and not is_documented), f"{name} is ignored: document it"
    assert not (is_documented and acts_on_distillation), f"{name} has an effect: remove it from the list"


def assert_names_the_fix(error: Exception, *names: str) -> None:
    assert isinstance(error, ValueError), repr(error)
    assert any(f"`{name}" in str(error) for name in names), error
    assert FIX.search(str(error)), error
