"""User errors print the cause and the fix, return an exit code and no traceback."""

import json
import re
import sys
from argparse import Namespace

import httpx
import pytest
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from credit_trl import cli
from credit_trl.cli import credit, errors, training
from credit_trl.cli.options_file import load_yaml
from credit_trl.run_directory import run_lock
from tables import says_what_to_do, tables_of

TABLES = tables_of(__file__)

ON_CPU = ["--use_cpu", "true", "--bf16", "false", "--max_steps", "1", "--report_to", "none"]
SMALL = ["--per_device_train_batch_size", "4", "--num_generations", "2", "--max_completion_length", "4"]
RUN = ["--model_name_or_path", "quickstart", "--output_dir", "run", *ON_CPU, *SMALL]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "solution": str(n + 1)} for n in range(8)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "latin.yaml").write_bytes("task: café\n".encode("latin-1"))
    (tmp_path / "deep.yaml").write_text("task: " + "[" * 5000)
    for name, text in TABLES["files"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def assert_refused(command, line: list[str], parts: list[str], capsys) -> None:
    """A command ends with an exit code, and an error with these parts and without a traceback."""
    try:
        code = command(line)
    except SystemExit as ended:  # by a parser
        code = ended.code
    printed = capsys.readouterr().err
    assert code in (1, 2)
    *progress, error = printed.rstrip("\n").split("\n")
    assert [part for part in parts if part not in error] == [], printed
    assert re.match(r"trl( credit[\w-]*)?: error: ", error), printed
    assert says_what_to_do(error), error
    assert not any("error" in text or "Traceback" in text for text in progress), printed


@pytest.mark.parametrize("row", TABLES["lines"], ids=lambda row: row[0])
def test_user_error_has_an_exit_code_and_no_traceback(folder, capsys, row):
    line, *parts = row
    assert_refused(cli.main, line.split(), parts, capsys)


@pytest.mark.parametrize("row", TABLES["training"], ids=lambda row: row[0])
@pytest.mark.usefixtures("unharmed")
def test_training_process_reports_user_errors_alike(folder, capsys, row):
    line, *parts = row
    assert_refused(training.run, [*line.split(), *RUN, "--save_strategy", "no"], parts, capsys)


def test_training_process_needs_a_model(folder, capsys):
    line = ["--task", "quickstart", "--output_dir", "run", *ON_CPU, *SMALL]
    assert_refused(training.run, line, ["No model", "--model_name_or_path"], capsys)


def test_run_that_cannot_go_on_prints_one_line(folder, capsys):
    disable_progress_bar()  # of the weights
    with run_lock(folder / "run"):
        assert training.run(["--task", "quickstart", *RUN]) == 2
    assert re.fullmatch(r"trl credit: error: run is used by another trainer: .*\n", capsys.readouterr().err)


def test_resume_with_changed_options_names_the_option_that_allows_it(folder, capsys):
    arguments = ["--task", "quickstart", *RUN]
    assert training.run(arguments) == 0
    changed = [
        *arguments,
        "--max_steps",
        "2",
        "--contrastive_coef",
        "0.2",
        "--resume_from_checkpoint",
        "run/checkpoint-1",
    ]
    assert training.run(changed) == 2
    assert "contrastive_coef" in capsys.readouterr().err
    assert training.run([*changed, "--resume_changes", "allow"]) == 0


def test_bug_in_a_verifier_keeps_its_traceback_on_demand(folder, monkeypatch):
    monkeypatch.setenv("CREDIT_TRL_TRACEBACK", "1")
    with pytest.raises(TypeError, match="NoneType"):
        training.run(["--dataset_name", "./data", "--reward_funcs", "own_module.buggy", *RUN, "--save_strategy", "no"])


def test_run_ended_by_a_call_of_exit_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(credit, "run_processes", lambda launched: 0)
    assert credit.launch(Namespace()) == 1
    error = capsys.readouterr().err.strip()
    assert "`os._exit`" in error
    assert says_what_to_do(error)
    monkeypatch.setattr(training, "run_training", lambda argv: 0)
    monkeypatch.setattr(credit, "run_processes", training.run)
    assert credit.launch(Namespace()) == 0


def test_failed_upload_names_the_saved_model(folder, capsys, monkeypatch):
    disable_progress_bar()
    monkeypatch.setattr("transformers.Trainer.init_hf_repo", lambda self: None)
    monkeypatch.setattr("trl.GRPOTrainer.push_to_hub", lambda self, **options: 1 / 0)
    assert training.run(["--task", "quickstart", *RUN, "--save_strategy", "no", "--push_to_hub", "true"]) == 2
    printed = capsys.readouterr().err.strip()
    assert re.search(r"error: The model is saved in run, and its upload failed .*`hf upload NAME run`\.$", printed)
    assert (folder / "run" / "model.safetensors").is_file()


def test_hub_without_a_network_is_one_line(folder, capsys, monkeypatch):
    def fails(*args, **options):
        raise httpx.ConnectError("no route to host\nmore")

    monkeypatch.setattr("transformers.Trainer.init_hf_repo", fails)
    assert training.run(["--task", "quickstart", *RUN, "--push_to_hub", "true"]) == 2
    assert "the hub or another service is not reached (no route to host). Check the network" in capsys.readouterr().err


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


def test_an_error_begins_on_its_own_line_under_a_progress_bar(capsys):
    bar = tqdm(total=3, file=sys.stderr)
    bar.update()
    assert errors.report_user_error("trl credit", ValueError("the value is wrong")) == 1
    assert "trl credit: error: the value is wrong" in capsys.readouterr().err.split("\n")
