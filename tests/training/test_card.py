"""The model card of a run, and its warnings in the log."""

import subprocess
from pathlib import Path

import pytest

from credit_trl.run_directory import append_lines, read_lines, write_json
from credit_trl.training.card import card_facts, current_commit, method_of_run
from credit_trl.training.metrics import CreditWarning


def test_model_card_says_method_teacher_data_and_score(make_trainer):
    trainer = make_trainer(max_steps=1, contrastive_coef=0.2)
    trainer.run_log.facts["task"] = "sums"
    trainer.train()
    folder = Path(trainer.args.output_dir)
    rows = [{"step": 0, "score": 0.25}, {"step": 1, "score": 0.75, "low": 0.5, "high": 1.0}]
    append_lines(folder / "evaluations.jsonl", (row | {"task": "sums", "k": 4} for row in rows))
    for _ in range(2):  # a later checkpoint writes it again
        trainer.create_model_card()
    text = (folder / "README.md").read_text("utf-8")
    assert "Model Card for run" in text
    assert text.count("## This run") == 1
    facts = dict(line[2:].split(": ", 1) for line in text.split("## This run")[1].strip().splitlines())
    assert facts["method"] == "CREDIT λ = 0.2"
    assert facts["λ"] == "0.2"
    assert facts["teacher"] == "the model before training (`base`)"
    assert facts["data"].startswith("sums")
    assert facts["score"] == ("avg@4 75.0 % (95 % interval 50.0 to 100.0) on sums at step 1; 25.0 % before training")
    assert facts["code"] == f"commit {current_commit()}"


def test_card_of_hostile_values_has_one_line_each(tmp_path):
    run = {"model": "a\n# Title\x1b[2J", "task": "<script>", "config": {"contrastive_coef": "0\n1"}}
    write_json(tmp_path / "run.json", run)
    facts = card_facts(tmp_path, None)
    assert facts["base model"] == "a # Title⟨U+001B⟩[2J"
    assert facts["data"] == "&lt;script>"
    assert not any("\n" in value for value in facts.values())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([], "CREDIT λ = 0.3"),
        ([{"seed": 2}], "CREDIT λ = 0.3"),
        ([{"contrastive_coef": 0.3}], "CREDIT λ = 0.1, then CREDIT λ = 0.3 from step 5"),
        (
            [{"contrastive_coef": 0.0}, {"contrastive_coef": 0.3}],
            "CREDIT λ = 0.1, then SDPO from step 5, then CREDIT λ = 0.3 from step 10",
        ),
    ],
)
def test_resumed_run_is_named_by_all_its_methods(changes, name):
    options = {"contrastive_coef": 0.3, "distillation_weight": 1.0}
    start = 0.1 if any("contrastive_coef" in change for change in changes) else 0.3
    segments = [{"step": 0, "options": options | {"contrastive_coef": start}}]
    for number, change in enumerate(changes, 1):
        segments.append({"step": 5 * number, "options": change})
    assert method_of_run(options, segments) == name


def test_commit_is_that_of_the_folder(tmp_path):
    assert current_commit(tmp_path / "missing") is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "Start"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert head.startswith(current_commit(tmp_path))


def test_warnings_of_a_run_are_in_its_log(make_trainer):
    """Those before the first update, too."""
    trainer = make_trainer(lambda completions, **kwargs: [0.0] * len(completions), max_steps=2)
    with pytest.warns(CreditWarning, match="No sample of this generation batch has a teacher") as caught:
        trainer.train()
    rows = [row for row in read_lines(Path(trainer.args.output_dir) / "log.jsonl") if "warning" in row]
    messages = [str(warning.message) for warning in caught if warning.category is CreditWarning]
    assert [row["message"] for row in rows] == messages
    assert "no_teacher" in [row["warning"] for row in rows]
    assert all(row["step"] == 0 and row["time"].endswith("+00:00") for row in rows)
