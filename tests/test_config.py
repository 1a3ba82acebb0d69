"""The configuration refuses what could not train, where it is written, with the fix in the message."""

import dataclasses
import json
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml
from trl import GRPOConfig, TrlParser
from trl.experimental.sdpo import SDPOConfig

from credit_trl import CreditConfig
from credit_trl.config import fit_batch
from credit_trl.mistakes import OTHER_NAMES
from tables import tables_of

TABLES = tables_of(__file__)
ROOT = Path(__file__).parents[1]

OWN = {f.name for f in dataclasses.fields(CreditConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)}


@pytest.mark.parametrize("options", TABLES["trains"])
def test_what_can_train_is_accepted(make_config, options):
    make_config(**options)


def fidelity_table() -> list[list[str]]:
    """Rows of the table of hyperparameters: option, default, and the columns of the benchmarks."""
    text = (ROOT / "docs" / "fidelity.md").read_text("utf-8").partition("## Hyperparameters")[2].partition("\n## ")[0]
    lines = [line.split("|")[2:-1] for line in text.splitlines() if "|" in line]
    return [[cell.strip().strip("`") for cell in line] for line in lines[2:]]


@pytest.mark.parametrize("benchmark", ["livecodebench", "sciknoweval", "toolalpaca"])
def test_paper_equals_the_recipes_and_the_fidelity_page(tmp_path, benchmark):
    config = CreditConfig.paper(benchmark, str(tmp_path))
    plain = {name: field.default for name, field in CreditConfig.__dataclass_fields__.items()}
    plain |= {"teacher_model_kind": "base", "teacher_update_rate": 0.01}  # None in the class
    table = fidelity_table()
    assert len(table) >= 20
    for option, default, code, question_value in table:
        expected = code if benchmark == "livecodebench" else question_value
        assert str(getattr(config, option)) == str(type(getattr(config, option))(expected)), option
        assert str(plain[option]) == default, option
    updates = config.steps_per_generation // config.gradient_accumulation_steps
    assert updates == (4 if benchmark == "livecodebench" else 1)
    for name in (f"{benchmark}_qwen3_8b", f"{benchmark}_olmo3_7b"):
        recipe = yaml.safe_load((ROOT / "examples" / "recipes" / f"{name}.yaml").read_text("utf-8"))
        for option, *_ in table:
            assert recipe.get(option, plain[option]) == getattr(config, option), (name, option)
        rollouts = 8 * recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
        assert recipe["generation_batch_size"] // rollouts == updates


def test_places_that_the_fidelity_page_names_exist():
    text = (ROOT / "docs" / "fidelity.md").read_text("utf-8").partition("## Algorithm 1")[2]
    cells = [line.split("|")[2] for line in text.splitlines() if "|" in line]
    places = [place for cell in cells for place in re.findall(r"`([\w.]+)`", cell)]
    assert len(places) >= 20
    known_places = {f.name for f in dataclasses.fields(CreditConfig)} | {
        "GRPOTrainer",
        "toolalpaca",
        "accelerate_config",
    }
    for place in set(places) - known_places:
        resolve_name(f"credit_trl.{place}")


def test_paper_takes_overrides_and_processes(tmp_path, monkeypatch):
    options = {"learning_rate": 1e-5, "per_device_train_batch_size": 4}
    config = CreditConfig.paper("livecodebench", str(tmp_path), **options)
    assert (config.learning_rate, config.steps_per_generation, config.gradient_accumulation_steps) == (1e-5, 64, 16)
    assert CreditConfig.paper("toolalpaca", str(tmp_path), gradient_accumulation_steps=2).warmup_steps == 10
    monkeypatch.setattr("credit_trl.config._processes", lambda: 8)
    assert CreditConfig.paper("sciknoweval", str(tmp_path)).gradient_accumulation_steps == 16  # as the recipe
    with pytest.raises(ValueError, match="`benchmark` must be one of livecodebench, sciknoweval, toolalpaca; got 'gs"):
        CreditConfig.paper("gsm8k", str(tmp_path))


@pytest.mark.parametrize(("options", "prompts"), TABLES["prompts"])
def test_generation_batch_holds_eight_prompts_where_no_size_is_set(tmp_path, options, prompts):
    config = CreditConfig(str(tmp_path), use_cpu=True, **options)
    assert config.generation_batch_size // config.num_generations == prompts
    for rows in (3, 20) if config.distillation_weight > 0.0 else ():
        fit_batch(config, rows)
        assert config.generation_batch_size // config.num_generations == (min(rows, 8) if prompts == 8 else prompts)


@pytest.mark.parametrize(("options", "bf16"), [({}, False), ({"fp16": False}, False), ({"bf16": True}, True)])
def test_bf16_is_off_by_default_without_an_accelerator(tmp_path, options, bf16):
    assert CreditConfig(str(tmp_path), use_cpu=True, **options).bf16 == bf16


@pytest.mark.parametrize(("options", "expected"), TABLES["resolved"])
def test_teacher_is_frozen_and_engine_corrected_token_by_token_unless_chosen(make_config, options, expected):
    config = make_config(use_vllm=True, **options)
    assert {name: getattr(config, name) for name in expected} == expected


def test_names_that_sdpo_has_are_sdpos():
    theirs = {f.name for f in dataclasses.fields(SDPOConfig)}
    assert set(TABLES["shared_with_sdpo"]) <= OWN & theirs


def test_json_options_are_parsed(make_config):
    config = make_config(**TABLES["json"])
    assert config.teacher_model_init_kwargs == {"revision": "main"}
    assert config.chat_template_kwargs == {"enable_thinking": False}


def test_names_of_other_trainers_are_not_ours():
    assert not {f.name for f in dataclasses.fields(CreditConfig)} & OTHER_NAMES.keys()


def test_none_is_a_value_of_optional_numbers_after_parsing(make_config, tmp_path):
    """TRL's parser removes None from the types of the fields, for every later configuration too."""
    values = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 16}
    none = {"distillation_is_clip": None, "distillation_topk": None}
    (tmp_path / "run.yaml").write_text(json.dumps(values | none))
    (parsed,) = TrlParser(CreditConfig).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])
    assert (parsed.distillation_is_clip, parsed.distillation_topk) == (None, None)
    assert make_config(distillation_topk=None).distillation_topk is None


@dataclasses.dataclass
class OwnConfig(CreditConfig):
    """A subclass with an option, as of any dataclass."""

    warmth: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        self.warmth *= 2


@dataclasses.dataclass
class OwnOfOwnConfig(OwnConfig):
    """A subclass of it, which takes the mode of `SDPOConfig` itself."""

    def __post_init__(self, distillation_mode):
        super().__post_init__(distillation_mode)
        self.warmth += 1


class PlainConfig(CreditConfig):
    """A subclass that is no dataclass of its own."""

    def __post_init__(self):
        self.warmth = 5.0
        super().__post_init__()


@pytest.mark.parametrize(("kind", "warmth"), [(OwnConfig, 2.0), (OwnOfOwnConfig, 3.0), (PlainConfig, 5.0)])
def test_a_subclass_has_the_usual_post_init(tmp_path, kind, warmth):
    options = {"use_cpu": True, "bf16": False}
    config = kind(str(tmp_path), **options)
    assert (config.warmth, config.distillation_support, config.distillation_topk) == (warmth, "teacher_topk", 20)
    assert config.generation_batch_size == CreditConfig(str(tmp_path), **options).generation_batch_size
    whole = kind(str(tmp_path), distillation_mode="full_logits", **options)
    assert (whole.warmth, whole.distillation_topk) == (warmth, None)
    sampled = kind(str(tmp_path), distillation_mode="sampled_token", **options)
    assert sampled.distillation_support == "sampled"
    with pytest.raises(ValueError, match="contrastive_coef"):
        kind(str(tmp_path), contrastive_coef=2.0, **options)
