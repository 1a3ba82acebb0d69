"""Seconds of the stages with a fake clock, and the columns of the table of completions."""

import re

import pytest

from credit_trl.training.reporting import StageClock


def test_rollouts_are_printed_as_blocks(make_trainer, capsys):
    trainer = make_trainer(log_completions=True, num_completions_to_print=2, max_steps=1)
    trainer.train()
    printed = capsys.readouterr().out
    blocks = re.findall(r"^--- step 1  length_verdicts .*?^---$", printed, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        parts = re.findall(r"^--- (\w+)$", block, re.MULTILINE)
        assert parts == ["prompt", "completion", "feedback", "teacher_prompt"]
        assert "\nuser: " in block
        assert "\nThe answer is " in block
    assert "┃" not in printed


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
    for steps, rollout, finished, unfinished, update in ((4, 12, 20, 6, 14), (2, 6, 16, 0, 4)):
        clock.steps = steps
        with clock.stage("rollout"):
            now[0] += rollout
        means = {"credit/seconds_rollout": rollout / steps, "credit/seconds_update": update / steps}
        assert clock.report(finished, unfinished) == means  # 6 s of the second report were in the first
    assert clock.report(1, 0) == {}


def test_evaluation_time_is_not_counted(now, make_trainer, dataset, monkeypatch):
    """Each generation takes ten seconds; each step is followed by an evaluation of three generations."""
    sizes = {"per_device_eval_batch_size": 4, "num_generations_eval": 1}
    trainer = make_trainer(eval_rows=dataset, eval_strategy="steps", eval_steps=1, **sizes)
    generate = trainer._generate_single_turn

    def slowly(*args, **kwargs):
        now[0] += 10
        return generate(*args, **kwargs)

    monkeypatch.setattr(trainer, "_generate_single_turn", slowly)
    trainer.train()
    assert now[0] == 10 * (1 + 3 + 1 + 3)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["credit/seconds_rollout"] for entry in logs] == [10, 10]
