"""The scripts of `examples/` run from their command line on a tiny model and local rows."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tiny import SHARED_DATA, save_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = (
    "sciknoweval",
    "toolalpaca",
    "livecodebench",
    "custom_verifier",
    "lora_single_gpu",
    "multi_turn_tools",
    "credit_dpo",
)

# Options that make every script small
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 8,
    "max_steps": 2,
    "disable_tqdm": True,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch, tmp_path, tiny_model):
    """Run a script like `python examples/NAME.py --option value …` and return its output directory."""

    def call(name: str, **options) -> Path:
        output = tmp_path / "run"
        given = {"model_name_or_path": tiny_model, "output_dir": output, **SMALL, **options}
        line = [text for option, value in given.items() for text in (f"--{option}", str(value))]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *line])
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return output

    return call


def science_rows(path: Path, count: int = 4) -> Path:
    """Synthetic rows in SDPO's published format."""
    rows = [
        {
            "idx": i,
            "kind": "mcq",
            "dataset": "sciknoweval",
            "answer": "AB"[i % 2],
            "prompt": f"Which is larger?\n\nA: {2 * i + 1}\nB: {2 * i + i % 2 * 2}\nPlease reason step by step.",
            "system": "Answer with <answer>letter</answer>.",
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tool_rows(path: Path, count: int = 4) -> Path:
    """Synthetic records in SDPO's training format."""
    rows = [
        {
            "prompt": f"Tools: getWeather(city). Question: how is the weather in city {i}?",
            "answer": json.dumps([{"Action": "getWeather", "Action_Input": json.dumps({"city": str(i)})}]),
            "idx": i,
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_has_at_most_80_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text("utf-8").splitlines()) <= 80


def test_sciknoweval_trains_evaluates_and_saves(run, tmp_path, capsys):
    rows = science_rows(tmp_path / "physics-train.jsonl")
    test = science_rows(tmp_path / "physics-test.jsonl", 2)
    output = run(
        "sciknoweval",
        task="sciknoweval:physics",
        dataset_path=rows,
        eval_dataset_path=test,
        gradient_accumulation_steps=1,
        max_steps=1,
        avg_at_k=1,
        avg_at_k_steps=1,
        avg_at_k_temperature=0.25,
        avg_at_k_top_p=0.5,
    )
    settings = json.loads((output / "evaluations" / "step-000001" / "settings.json").read_text("utf-8"))
    assert (settings["temperature"], settings["top_p"]) == (0.25, 0.5)
    assert (output / "final" / "model.safetensors").is_file()
    summary = json.loads((output / "summary.json").read_text("utf-8"))
    assert {"best_during_training", "final"} <= summary.keys()
    steps = re.findall(r"^step +(\d+): avg@1", capsys.readouterr().out, flags=re.MULTILINE)
    assert steps == ["0", "1"]  # before the first and after the last step
    assert json.loads((output / "run.json").read_text("utf-8"))["task"] == "sciknoweval:physics"


def test_toolalpaca_trains_maps_and_evaluates(run, tmp_path, capsys):
    output = run(
        "toolalpaca",
        dataset_path=tool_rows(tmp_path / "train.jsonl"),
        eval_dataset_path=tool_rows(tmp_path / "test.jsonl", 2),
        gradient_accumulation_steps=1,
        max_steps=1,
        avg_at_k=2,
        avg_at_k_temperature=0.25,
        avg_at_k_top_p=0.5,
    )
    settings = json.loads((output / "test" / "settings.json").read_text("utf-8"))
    assert (settings["temperature"], settings["top_p"]) == (0.25, 0.5)
    assert (output / "final" / "model.safetensors").is_file()
    assert list((output / "credit_maps").glob("*.html"))
    assert "avg@2" in capsys.readouterr().out


def test_livecodebench_runs_programs_in_the_sandbox(run):
    from credit_trl.sandbox import SandboxError, open_sandbox

    try:
        open_sandbox().close()
    except SandboxError as error:
        pytest.skip(f"no sandbox is available on this machine: {error}")
    output = run(
        "livecodebench",
        task="livecodebench:examples",
        generation_batch_size=4,
        gradient_accumulation_steps=1,
        max_steps=1,
        max_train_rows=2,
        max_eval_rows=1,
        avg_at_k=1,
        avg_at_k_steps=1,
    )
    logs = [json.loads(line) for line in (output / "log.jsonl").read_text("utf-8").splitlines()]
    first = next(line for line in logs if "reward" in line)
    assert first["reward"] == 0.0  # random tokens are no program
    assert first["credit/frac_with_feedback"] == 1.0  # the feedback reports it


def first_log(output: Path) -> dict:
    return json.loads((output / "log.jsonl").read_text("utf-8").splitlines()[0])


def test_custom_verifier_runs_with_its_defaults(run):
    output = run("custom_verifier", model_name_or_path="quickstart", max_steps=1)
    assert (output / "final" / "model.safetensors").is_file()
    assert first_log(output)["credit/frac_with_feedback"] == 1.0


def test_feedback_of_custom_verifier_names_the_error():
    grade = runpy.run_path(str(EXAMPLES / "custom_verifier.py"))["grade"]
    assert grade("It is 42.", "42").reward == 1.0
    assert "3 digits, the sum has 2" in grade("421", "42").feedback
    assert "place 2 should be 2" in grade("47", "42").feedback
    assert "no number" in grade("I do not know", "42").feedback


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contrastive_coeff": 0.1}, r"arguments are not used by the \w+: \['--contrastive_coeff', '0.1'\]"),
        ({"config": "typo.yaml"}, r"Unknown arguments from config file: \['--contrastive_coeff', '0.1'\]"),
        ({"contrastive_coef": 2}, r"`contrastive_coef` must be in \[0, 1\], got 2.0"),
        (
            {"dataset_name": "./rows"},
            r"the column `answer`, which `train_dataset` does not have.*rename_column\('solution', 'a",
        ),
    ],
)
def test_invalid_option_raises_a_clear_error(run, tmp_path, options, message):
    (tmp_path / "typo.yaml").write_text("contrastive_coeff: 0.1\n", encoding="utf-8")
    (tmp_path / "rows").mkdir()
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "solution": "2"}
    (tmp_path / "rows" / "train.jsonl").write_text(8 * (json.dumps(row) + "\n"), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        run("custom_verifier", **{"model_name_or_path": "quickstart", **options})


def test_lora_trains_and_saves_adapters_only(run, tmp_path, capsys):
    output = run(
        "lora_single_gpu",
        dataset_path=science_rows(tmp_path / "chemistry-train.jsonl"),
        task="sciknoweval:chemistry",
        dtype="float32",
        lora_r=4,
        gradient_accumulation_steps=1,
        warmup_steps=0,
        learning_rate=1e-2,
    )
    printed = capsys.readouterr().out
    trained, total = (int(n.replace(",", "")) for n in printed.split(" parameters are trained")[0].split()[-3::2])
    assert 0 < trained < total
    saved = {path.name for path in (output / "adapter").iterdir()}
    assert "adapter_model.safetensors" in saved
    assert "model.safetensors" not in saved


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory) -> str:
    """A tiny model whose chat template supports tools."""
    from trl.chat_template_utils import qwen3_chat_template

    return save_model(tmp_path_factory.mktemp("tool_model"), qwen3_chat_template)


def test_multi_turn_tools_gives_feedback_without_a_payment(run, tool_model):
    output = run("multi_turn_tools", model_name_or_path=tool_model, max_steps=1, gradient_accumulation_steps=1)
    log = first_log(output)
    assert log["credit/frac_with_feedback"] == 1.0
    assert log["tools/call_frequency"] == 0.0  # random tokens call no tool; the next test calls them


def test_multi_turn_tools_gives_feedback_for_wrong_turns():
    shop = runpy.run_path(str(EXAMPLES / "multi_turn_tools.py"))["Shop"]()
    shop.reset(items=["apple", "pear"], pieces=[2, 1], prompt=[])
    turns = [lambda: shop.price("apple"), lambda: shop.price("apple"), lambda: shop.price("pear")]
    turns += [lambda: shop.price("pear"), lambda: shop.pay(9), lambda: shop.pay(10)]
    for shop.current_turn, turn in enumerate(turns):
        turn()
    verdict = shop.get_reward()
    assert (verdict.reward, verdict.feedback) == (1.0, None)
    assert verdict.turn_feedback == {1: "Ask for: pear.", 3: "Pay now.", 4: "Pay 10, not 9."}


def test_credit_dpo_at_lambda_0_prints_the_margin_of_trl(monkeypatch, tmp_path, capsys):
    options = {"output_dir": tmp_path, "use_cpu": True, "bf16": False, "max_steps": 2, "disable_tqdm": True}
    line = [text for option, value in options.items() for text in (f"--{option}", str(value))]
    monkeypatch.setattr(sys, "argv", ["credit_dpo.py", *line])
    runpy.run_path(str(EXAMPLES / "credit_dpo.py"), run_name="__main__")
    printed = capsys.readouterr().out
    (logged,) = re.findall(r"own margin on the test pairs: (-?[\d.]+)", printed)
    margins = {float(c): float(m) for c, m in re.findall(r"λ ([\d.]+): .*mean margin (-?[\d.]+)", printed)}
    assert margins.keys() == {0.0, 0.5, 1.0}
    assert margins[0.0] == pytest.approx(float(logged), abs=2e-4)
    assert len(set(margins.values())) == 3


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the real data in ../shared/data (see its README)")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "sciknoweval",
            {"task": "sciknoweval:biology", "dataset_path": "sciknoweval/biology-train.jsonl", "avg_at_k_steps": 1}
            | {"eval_dataset_path": "sciknoweval/biology-test.jsonl", "max_eval_rows": 2, "avg_at_k": 1},
        ),
        (
            "toolalpaca",
            {"dataset_path": "toolalpaca/real-78.jsonl", "eval_dataset_path": "toolalpaca/test-first-10.jsonl"}
            | {"max_eval_rows": 2, "avg_at_k": 1},
        ),
    ],
)
def test_script_trains_on_real_rows(run, name, options):
    options = {key: SHARED_DATA / value if key.endswith("_path") else value for key, value in options.items()}
    output = run(name, gradient_accumulation_steps=1, max_steps=1, **options)
    assert (output / "final" / "model.safetensors").is_file()
