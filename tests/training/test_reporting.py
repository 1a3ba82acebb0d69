"""One line a log on the console, seconds of the stages with a fake clock, the columns of the table of completions."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from datasets import Dataset

from credit_trl import CreditTrainer
from credit_trl.training.reporting import StageClock, log_line
from tiny import length_verdicts

LOGS = {
    "loss": 0.1,
    "reward": 0.4375,
    "completions/mean_length": 21.25,
    "credit/s_mean": 0.8461,
    "credit/delta_v_mean": -0.1871,
    "credit/generic_mean": -12.02,
    "credit/kl_to_target": 0.0512,
    "credit/seconds_rollout": 3.14,
    "credit/seconds_update": 4.0,
    "credit/teacher_drift": 0.1,
    "epoch": 0.5,
}


def test_training_line_has_metrics_stages_and_time_left():
    assert log_line(LOGS, 7, 100, 88.0) == (
        "step   7/100  reward   0.438  length   21.2  s   0.846  ΔV  -0.187  generic -12.020  kl   0.051"
        "  seconds rollout 3.1 update 4.0  left 0:01:28"
    )


def test_evaluation_line_has_the_same_columns():
    line = log_line({f"eval_{name}": value for name, value in LOGS.items()}, 7, 100)
    assert line.startswith("eval at step   7/100  reward   0.438  length   21.2  s   0.846")
    assert "left" not in line


def test_log_without_known_metrics_shows_all_numbers():
    logs = {"eval_avg@4": 0.25, "eval_avg@4_low": 0.2, "epoch": 1.0, "text": "x"}
    assert log_line(logs, 5, 5) == "eval at step 5/5  avg@4 0.25  avg@4_low 0.2"


def test_kl_of_grpo_is_shown_without_a_teacher():
    assert "kl   0.200" in log_line({"reward": 1.0, "kl": 0.2}, 1, 2)


def test_missing_metrics_have_no_column():
    assert log_line({"reward": 1.0}, 1, 2, math.nan) == "step 1/2  reward   1.000"


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_run_prints_one_line_per_step(make_model, make_config, tokenizer, dataset, capsys, disable_tqdm):
    config = make_config(disable_tqdm=disable_tqdm)
    CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer).train()
    printed = capsys.readouterr().out
    steps = re.findall(
        r"step (\d)/2  reward .*  s .*  ΔV .*  kl .*  seconds .*rollout .*  left [\d:]+$", printed, re.M
    )
    assert steps == ["1", "2"]
    assert "{" not in printed


def test_table_of_completions_has_feedback_teacher_prompt_and_mean_credit(make_model, make_config, tokenizer, dataset):
    config = make_config(log_completions=True, max_steps=1)
    trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
    trainer.train()
    [path] = Path(config.output_dir).glob("completions/*.parquet")
    table = Dataset.from_parquet(str(path))
    assert len(table) == 8
    for row in table:
        assert row["feedback"].startswith("The answer is ")
        assert row["feedback"] in row["teacher_prompt"]
        assert math.isfinite(row["s_mean"])
    assert any(row["s_mean"] != 0.0 for row in table)


@pytest.fixture
def now(monkeypatch):
    time = [0.0]
    monkeypatch.setattr("credit_trl.training.reporting.time.perf_counter", lambda: time[0])
    return time


def test_outer_stage_excludes_time_of_inner_stages(now):
    clock = StageClock()
    with clock.stage("update"):
        now[0] += 1
        with clock.stage("rollout"):
            now[0] += 10
        with clock.stage("scores"):
            now[0] += 100
        now[0] += 1000
    assert dict(clock.seconds) == {"rollout": 10, "scores": 100, "update": 1001}


def test_report_is_mean_per_step_and_resets(now):
    clock = StageClock()
    with clock.stage("rollout"):
        now[0] += 12
    assert clock.report(4) == {"credit/seconds_rollout": 3}
    with clock.stage("rollout"):
        now[0] += 6
    assert clock.report(6) == {"credit/seconds_rollout": 3}
    assert clock.report(6) == {}


def test_steps_of_a_resumed_run_count_from_its_first(now):
    clock = StageClock()
    clock.start(500)
    with clock.stage("rollout"):
        now[0] += 8
    assert clock.report(502) == {"credit/seconds_rollout": 4}


def test_failed_stage_is_timed(now):
    clock = StageClock()

    def fail():
        with clock.stage("update"), clock.stage("verdict"):
            now[0] += 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert dict(clock.seconds) == {"verdict": 2, "update": 0}


def test_evaluation_time_is_not_counted(now, make_model, make_config, tokenizer, dataset, monkeypatch):
    """Each generation takes ten seconds; each step is followed by an evaluation of three generations."""
    config = make_config(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, num_generations_eval=1)
    trainer = CreditTrainer(
        make_model(), length_verdicts, config, dataset, eval_dataset=dataset, processing_class=tokenizer
    )
    generate = trainer._generate_single_turn

    def slowly(*args, **kwargs):
        now[0] += 10
        return generate(*args, **kwargs)

    monkeypatch.setattr(trainer, "_generate_single_turn", slowly)
    trainer.train()
    assert now[0] == 10 * (1 + 3 + 1 + 3)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["credit/seconds_rollout"] for entry in logs] == [10, 10]
