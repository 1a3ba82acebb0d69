"""User errors print the cause and the fix, return an exit code and no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from credit_trl import cli
from credit_trl.cli import errors

ROOT = Path(__file__).parents[2]
ON_CPU = ["--use_cpu", "true", "--bf16", "false", "--max_steps", "1", "--report_to", "none"]
SMALL = ["--per_device_train_batch_size", "4", "--num_generations", "2", "--max_completion_length", "4"]
OWN_MODULE = """
from datasets import Dataset
from credit_trl import Verdict

def exact(completions, answer, **columns):
    return [Verdict(float(c[-1]["content"] == a), f"It is {a}.") for c, a in zip(completions, answer)]

def wrong_feedback(completions, **columns):
    return [Verdict(0.0, {"expected": "a"}) for _ in completions]

def one_for_all(completions, **columns):
    return [1.0]

def buggy(completions, **columns):
    return [len(None)]

class Unasked:
    def build(self, split, path=None):
        return Dataset.from_list([{"question": "1 + 1?", "answer": "2"}] * 8)
    def verify(self, response, answer, *, truncated=False):
        return Verdict(1.0)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with data, a module and a few invalid files."""
    (tmp_path / "data").mkdir()
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "solution": str(n + 1)} for n in range(8)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own_module.py").write_text(OWN_MODULE)
    (tmp_path / "typo.yaml").write_text("task: quickstart\nmodel_name_or_path: quickstart\ncontrastive_coeff: 0.1\n")
    (tmp_path / "latin.yaml").write_bytes("task: café\n".encode("latin-1"))
    (tmp_path / "no_yaml.yaml").write_text("task: [quickstart\n")
    (tmp_path / "windows.yaml").write_text(r'output_dir: "C:\Users\me\runs"')
    (tmp_path / "grid.yaml").write_text("contrastive_coef: [0.1, 0.2]\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a child process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "credit_trl", *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in result.stderr, result.stderr[-3000:]
    return [line for line in result.stderr.splitlines() if "error: " in line][-1]


@pytest.mark.slow  # the fast tests run it in this process
def test_typo_in_the_yaml_suggests_the_nearest_option(folder):
    result = run("credit", "--config", "typo.yaml")  # without a second error about the missing GPU
    assert result.returncode == 2
    assert last_line(result).startswith("trl credit: error: unknown argument --contrastive_coeff")
    assert "Did you mean --contrastive_coef?" in last_line(result)
    assert result.stderr.count("error: ") == 1


@pytest.mark.slow  # the fast tests run it in this process
def test_missing_column_is_named_with_the_fix(folder):
    line = ["--model_name_or_path", "quickstart", "--dataset_name", "./data", "--reward_funcs", "own_module.exact"]
    result = run("credit", *line, *ON_CPU, *SMALL)
    assert result.returncode == 2
    message = "Reward function `exact` needs the column `answer`, which `train_dataset` does not have"
    assert message in last_line(result)
    assert "its columns are prompt, solution" in last_line(result)
    assert "dataset.rename_column('solution', 'answer')" in last_line(result)
    assert not (folder / "trainer_output").exists() or not any((folder / "trainer_output").iterdir())


@pytest.mark.slow  # the fast tests run both in this process
@pytest.mark.parametrize(
    ("command", "line"),
    [("credit", ["--task", "nowhere", "--model_name_or_path", "no/such"]), ("credit-quickstart", [])],
)
def test_coefficient_out_of_range_fails_before_loading(folder, command, line):
    result = run(command, *line, "--contrastive_coef", "2")
    assert result.returncode != 0
    assert last_line(result).startswith(f"trl {command}: error: `contrastive_coef` must be in [0, 1], got 2.0.")
    assert not re.search(r"bf16|no/such|nowhere|Loading weights", result.stderr)
    assert not list(folder.glob("runs*"))


# Run in this process, which loads TRL once.
LINES = [
    ("credit --config typo.yaml", "unknown argument --contrastive_coeff (on the command line or"),
    ("credit --config typo.yaml", "Did you mean --contrastive_coef?"),
    ("credit --config no_yaml.yaml", "no_yaml.yaml"),
    ("credit --config windows.yaml", "A path with backslashes needs single quotes, or none."),
    ("credit --config nowhere.yaml", "nowhere.yaml"),
    ("credit --config", "give its path"),
    ("credit --config grid.yaml", "`contrastive_coef` must be a number, got [0.1, 0.2]"),
    ("credit --task nowhere --model_name_or_path no/such --contrastive_coef 2", "must be in [0, 1], got 2.0"),
    ("credit --task quickstart", "set `use_cpu=True` and `bf16=False`"),
    ("credit --learning_rate much", "invalid float value: 'much'"),
    ("credit --contrastive_form divide", "invalid choice: 'divide'"),
    ("credit --sandbox docker", "neither one of auto, bubblewrap"),
    ("credit --use_cpu true --bf16 false --generation_batch_size 64 --num_processes few", "invalid whole number"),
    ("credit --use_cpu true --bf16 false --num_processes -1", "--num_processes: must be at least 1, got -1"),
    ("credit --config latin.yaml", "latin.yaml is not a text file in UTF-8"),
    ("credit-quickstart --contrastive_coef 2", "error: `contrastive_coef` must be in [0, 1], got 2.0"),
    ("credit-quickstart --step 5", "unknown argument --step. Did you mean --steps?"),
    ("credit-quickstart --steps 0", "`steps` must be at least 1"),
    ("credit-quickstart --world nowhere", "Known worlds: plain, shortcut, style, weak."),
    ("credit-quickstart --output_dir typo.yaml", "typo.yaml"),
    ("credit-eval --model no/such --task quickstart", "couldn't find them"),
    ("credit-eval --model quickstart --task quickstar", "Known tasks"),
    ("credit-eval --model quickstart --task own_module:Unasked", "no column `prompt`; its columns are question"),
    ("credit-eval --model quickstart --task quickstart --k 0", "k"),
    ("credit-eval --model quickstart --task quickstart --split nowhere", "Unknown split"),
    ("credit-eval --model quickstart --task quickstart --max_prompts 0", "max_prompts"),
    ("credit-eval --model quickstart --task quickstart --max_prompts 1 --temperature -1", "temperature"),
    ("credit-eval --model quickstart --task quickstart --max_prompts 1 --top_p 2", "top_p"),
    ("credit-eval --model quickstart --task quickstart --batch_size 0", "`batch_size` must be at least 1"),
    ('credit-eval --model quickstart --task quickstart --engine_options {"dtype":1}', "takes `chat_template_kwargs`"),
    ('credit-eval --model quickstart --task quickstart --engine_options {"batch_size":0}', "`batch_size` must be"),
    (
        'credit-eval --model quickstart --task quickstart --engine_options {"chat_template_kwargs":3}',
        "`chat_template_kwargs` must be an object such as {'enable_thinking': False}, got 3",
    ),
    ("credit-compat --model quickstart --task quickstart --chat_template_kwargs [1]", "a JSON object such as"),
    ("credit-map --model quickstart", "--task or --responses"),
    ("credit-map --model quickstart --task quickstart --contrastive_coef 2", "must be in [0, 1]"),
    ("credit-map --model quickstart --task quickstart --max_prompts 0", "--max_prompts: must be at least 1"),
    ("credit-map --model quickstart --task quickstart --samples 0", "--samples: must be at least 1"),
    ("credit-map --model quickstart --task quickstart --alternatives -1", "--alternatives: must be at least 0"),
    ("credit-map --model quickstart --task quickstart --pictures -1", "--pictures: must be at least 0, got -1"),
    ("credit-map --model quickstart --task quickstart --top ten", "--top: invalid whole number value: 'ten'"),
    ("credit-map --model quickstart --task own_module:Unasked", "no column `prompt`"),
    ("credit-map --model quickstart --responses typo.yaml", "rows are read from .json"),
    ("credit-map --maps typo.yaml", "typo.yaml"),
    ("credit-map --maps nowhere.parquet", "--maps nowhere.parquet: no such file."),
    ("credit-map --model quickstart --task quickstart --config no_yaml.yaml", "expected"),
    ("credit-compat --model quickstart --task quickstart", "no multiple choice"),
    ("credit-compat --model quickstart --task quickstart --letters AAB", "give two or more letters, each once"),
    ("credit-compat --model quickstart --task quickstart --feedback {x}", "`--feedback` lacks {letter}: '{x}'"),
    ("credit-compat --model quickstart --task own_module:Unasked", "no column `prompt`"),
    ("credit-compat --model quickstart --task nowhere", "Known tasks"),
    ("credit-plan", "holds one prompt"),
    ("credit-plan --generation_batch_size 64", "--model_name_or_path"),
    ("credit-plan --config typo.yaml", "Did you mean --contrastive_coef?"),
    ("credit-plan --config no_yaml.yaml", "no_yaml.yaml"),
    ("credit-plan --config", "give its path"),
    ("credit-plan --model_name_or_path Qwen/Qwen3-8B --contrastive_coef 2", "must be in [0, 1]"),
    ("credit-plan --model_name_or_path Qwen/Qwen3-8B --gpu_memory 0", "--gpu_memory 0: give"),
    ("credit-plan --rows -3", "--rows: must be at least 1, got -3"),
    (
        "credit-plan --model_name_or_path Qwen/Qwen3-8B --generation_batch_size 64 --mean_prompt 4096",
        "--mean_prompt 4096 exceeds `--max_prompt 2048`",
    ),
    ("credit-sweep nowhere.yaml", "nowhere.yaml"),
    ("credit-sweep no_yaml.yaml", "is not YAML"),
    ("credit-sweep typo.yaml", "unknown field contrastive_coeff"),
    ("credit-compare nowhere", "holds no run"),
    ("credit-compare nowhere --target 45", "--target 45: scores are in [0, 1]"),
    ("credit-compare damaged", "is not JSON"),
]


@pytest.mark.parametrize(("line", "message"), LINES, ids=[f"{line}: {message}" for line, message in LINES])
def test_user_error_has_an_exit_code_and_no_traceback(folder, capsys, line, message):
    command, *arguments = line.split()
    try:
        code = cli.main([command, *arguments])
    except SystemExit as ended:  # by a parser
        code = ended.code
    printed = capsys.readouterr().err
    assert code in (1, 2)
    assert message in printed
    assert "Traceback" not in printed


SPEC = {"model": "quickstart", "task": "quickstart", "grid": {"method": ["CREDIT"]}, "seeds": [1]}
RUNS = {"use_cpu": True, "bf16": False, "per_device_train_batch_size": 16}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": {**RUNS, "contrastive_coef": 2}}, "must be in [0, 1]"),
        ({"config": {**RUNS, "contrastive_coeff": 0.1}}, "contrastive_coeff"),
        ({"config": {**RUNS, "use_successful_as_teacher": "false"}}, "must be True or False, got 'false'"),
        ({"config": [1]}, "config"),
        ({"seeds": 3}, "`seeds` must be a list"),
        ({"grid": {"method": ["CREDITS"]}}, "Unknown method 'CREDITS'"),
        ({"grid": 3}, "grid"),
        ({"task": "quickstar"}, "Known tasks"),
        ({"model": 3}, "model"),
        ({"evaluation": {"kk": 3}}, "kk"),
        ({"evaluation": {"eval_step": 1}}, "did you mean `eval_steps`?"),
        ({"evaluation": {"k": 0}}, "`k` must be at least 1"),
        ({"evaluation": {"temperature": -1}}, "`temperature` must be at least 0"),
    ],
)
def test_error_in_a_sweep_is_reported_before_a_job_starts(folder, capsys, changed, message):
    (folder / "sweep.yaml").write_text(json.dumps({**SPEC, "config": RUNS, **changed}))  # JSON is YAML
    assert cli.main(["credit-sweep", "sweep.yaml", "--output_dir", "jobs", "--dry_run"]) in (1, 2)
    printed = capsys.readouterr().err
    assert message in printed
    assert not (folder / "jobs").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--task own_module:Unasked", "no column `prompt`"),
        ("--dataset_name ./data --reward_funcs own_module.exact", "Reward function `exact` needs the column `answer`"),
        ("--dataset_name ./data --reward_funcs own_module.exact", "dataset.rename_column('solution', 'answer')"),
        ("--dataset_name ./data --reward_funcs no_module.exact", "no module `no_module`"),
        ("--dataset_name ./data --reward_funcs own_module.nothing", "has no `nothing`"),
        ("--dataset_name ./data --reward_funcs own_module.exact --dataset_train_split tran", "the data has train"),
        ("--dataset_name ./nothing --reward_funcs own_module.exact", "nothing"),
        ("--task quickstart --resume_from_checkpoint nowhere", "nowhere"),
        ("--dataset_name ./data --reward_funcs own_module.wrong_feedback", "got dict"),
        ("--dataset_name ./data --reward_funcs own_module.wrong_feedback", "(own_module.py, line 9)"),
        ("--dataset_name ./data --reward_funcs own_module.one_for_all", "returned 1 elements"),
    ],
)
def test_training_process_reports_user_errors_alike(folder, capsys, line, message):
    from credit_trl.cli import training

    own = ["--model_name_or_path", "quickstart", "--output_dir", "run", "--save_strategy", "no"]
    assert training.run([*line.split(), *own, *ON_CPU, *SMALL]) == 2
    assert message in capsys.readouterr().err


def test_errors_spell_control_characters_out(capsys):
    assert errors.report_user_error("trl credit", ValueError("a\x1b[2J\nb\r\u202e"), 3) == 3
    assert capsys.readouterr().err == "trl credit: error: a⟨U+001B⟩[2J\nb⟨U+000D⟩⟨U+202E⟩\n"


def test_bug_in_a_verifier_keeps_its_traceback(folder):
    from credit_trl.cli import training

    own = ["--model_name_or_path", "quickstart", "--output_dir", "run", "--save_strategy", "no"]
    with pytest.raises(TypeError, match="NoneType"):
        training.run(["--dataset_name", "./data", "--reward_funcs", "own_module.buggy", *own, *ON_CPU, *SMALL])


def test_traceback_of_a_user_error_is_shown_on_request(folder, monkeypatch):
    monkeypatch.setenv(errors.TRACEBACK, "1")
    with pytest.raises(ValueError, match="`steps` must be at least 1"):
        cli.main(["credit-quickstart", "--steps", "0"])
