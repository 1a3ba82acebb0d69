"""User errors print the cause and the fix, return an exit code and no traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from credit_trl import cli
from credit_trl.cli import errors, training
from credit_trl.cli.options_file import load_yaml
from credit_trl.training.run_directory import run_lock

ON_CPU = ["--use_cpu", "true", "--bf16", "false", "--max_steps", "1", "--report_to", "none"]
SMALL = ["--per_device_train_batch_size", "4", "--num_generations", "2", "--max_completion_length", "4"]
OWN_MODULE = """
from datasets import Dataset
from credit_trl import Verdict

def exact(completions, answer, **columns):
    return [Verdict(float(c[-1]["content"] == a), f"It is {a}.") for c, a in zip(completions, answer)]

def wrong_feedback(completions, **columns):
    return [Verdict(0.0, {"expected": "a"}) for _ in completions]

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
    typos = "task: quickstart\nmodel_name_or_path: quickstart\ncontrastive_coeff: 0.1\nlambda: 0.1\n"
    (tmp_path / "typo.yaml").write_text(typos)
    (tmp_path / "latin.yaml").write_bytes("task: café\n".encode("latin-1"))
    (tmp_path / "no_yaml.yaml").write_text("task: [quickstart\n")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    (tmp_path / "windows.yaml").write_text(r'output_dir: "C:\Users\me\runs"')
    (tmp_path / "deep.yaml").write_text("task: " + "[" * 5000)
    (tmp_path / "torn.jsonl").write_text('{"prompt": ')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.json").write_text('{"config": {"max_completion_length": 8}, "model": "quickstart"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


CASES = yaml.safe_load(Path(__file__).with_name("errors.yaml").read_text("utf-8"))


@pytest.mark.parametrize(("line", "message"), CASES["commands"])
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


@pytest.mark.parametrize(("line", "message"), CASES["training"])
def test_training_process_reports_user_errors_alike(folder, capsys, line, message):
    own = ["--model_name_or_path", "quickstart", "--output_dir", "run", "--save_strategy", "no"]
    assert training.run([*line.split(), *own, *ON_CPU, *SMALL]) == 2
    assert message in capsys.readouterr().err


def test_run_that_cannot_go_on_prints_one_line(folder, capsys):
    with run_lock(folder / "run"):
        own = ["--task", "quickstart", "--model_name_or_path", "quickstart", "--output_dir", "run"]
        assert training.run([*own, *ON_CPU, *SMALL]) == 2
    assert re.fullmatch(r"trl credit: error: run is used by another trainer: .*\n", capsys.readouterr().err)


def test_resume_with_changed_options_names_the_option_that_allows_it(folder, capsys):
    own = ["--task", "quickstart", "--model_name_or_path", "quickstart", "--output_dir", "run", *ON_CPU, *SMALL]
    assert training.run(own) == 0
    changed = [*own, "--max_steps", "2", "--contrastive_coef", "0.2", "--resume_from_checkpoint", "run/checkpoint-1"]
    assert training.run(changed) == 2
    assert "contrastive_coef" in capsys.readouterr().err
    assert training.run([*changed, "--resume_changes", "allow"]) == 0


def test_bug_in_a_verifier_keeps_its_traceback(folder):
    own = ["--model_name_or_path", "quickstart", "--output_dir", "run", "--save_strategy", "no"]
    with pytest.raises(TypeError, match="NoneType"):
        training.run(["--dataset_name", "./data", "--reward_funcs", "own_module.buggy", *own, *ON_CPU, *SMALL])


def test_errors_spell_control_characters_out(capsys):
    assert errors.report_user_error("trl credit", ValueError("a\x1b[2J\nb\r\u202e"), 3) == 3
    assert capsys.readouterr().err == "trl credit: error: a⟨U+001B⟩[2J\nb⟨U+000D⟩⟨U+202E⟩\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 40 + "]" * 40, "levels deep"),
        ("a: [" + "1," * 30_000 + "]", "keys and values"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdef", "bcdefg", strict=False)),
            "aliases",
        ),
        ("base: &m {" + ",".join(f"k{i}: 1" for i in range(500)) + "}\nx: [" + "{<<: *m}," * 100 + "]", "aliases"),
        ("a: &a [*a]", "aliases"),
    ],
)
def test_yaml_beyond_the_limits_is_refused_before_it_is_built(text, message):
    with pytest.raises(ValueError, match=message):
        load_yaml(text)


def test_yaml_within_the_limits_equals_safe_load():
    text = "a: &x {b: 1, c: [1, 2.5, null]}\nd: {<<: *x, e: 'text'}\nf: *x\n"
    expected = {"b": 1, "c": [1, 2.5, None]}
    assert load_yaml(text) == {"a": expected, "d": {**expected, "e": "text"}, "f": expected}
    assert load_yaml("") is None
