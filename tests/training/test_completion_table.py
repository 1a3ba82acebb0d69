"""Table of completions: columns of the credit, read back from parquet, TensorBoard and trackio."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import TrainerCallback

from credit_trl import CreditTrainer, Verdict
from credit_trl.training.completions import _cell, _text

TRL_COLUMNS = ["step", "prompt", "completion", "verifier", "advantage"]
OWN = ["feedback", "teacher_prompt", "with_demonstration", "with_contrast", "delta_v_mean", "s_mean", "advantage_mean"]


@pytest.fixture
def run(make_model, make_config, tokenizer, dataset, tmp_path):
    """Train with a table of completions; returns the trainer, the sampled ids of each call, and the tables by step."""

    def train(reward=lambda ids: 0.0, resume=None, callback=None, eval_dataset=None, **options):
        seen = []

        def verifier(completions, completion_ids, answer, **kwargs):
            seen.append(completion_ids)
            feedback = [
                f"It is {a}. ![x](http://host/x.png) <img src=x>" if i % 4 else None for i, a in enumerate(answer)
            ]
            return [Verdict(reward(ids), text) for ids, text in zip(completion_ids, feedback, strict=True)]

        config = make_config(log_completions=True, num_completions_to_print=0, **options)
        trainer = CreditTrainer(make_model(), verifier, config, dataset, eval_dataset, processing_class=tokenizer)
        if callback is not None:
            trainer.add_callback(callback(trainer))
        trainer.train(resume)
        tables = [pd.read_parquet(path) for path in sorted((tmp_path / "run" / "completions").glob("*.parquet"))]
        return trainer, seen, tables

    return train


def mean_logp(trainer, prompt: str, completion: list[int]) -> float:
    """Mean log-probability of a completion's tokens after a prompt."""
    ids = trainer.processing_class(prompt, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = trainer.model(torch.tensor([ids + completion])).logits[0, len(ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).mean().item()


def test_table_has_the_credit_of_each_completion(run):
    trainer, (completions,), (table,) = run(learning_rate=0.0, max_steps=1, temperature=1.0)
    assert sorted(table.columns) == sorted([*TRL_COLUMNS, *OWN])
    has_teacher = table["feedback"] != ""
    assert has_teacher.tolist() == [False, True, True, True] * 2
    assert (table["teacher_prompt"] != "").tolist() == has_teacher.tolist()
    assert (table.loc[~has_teacher, ["delta_v_mean", "s_mean", "advantage_mean"]] == 0.0).all(axis=None)
    for row, ids in zip(table.itertuples(), completions, strict=True):
        if row.feedback:
            assert row.feedback in row.teacher_prompt
            system, question = row.prompt.splitlines()
            assert (system, question[:6]) == ("system: Add.", "user: ")
            messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": question[6:]}]
            render = trainer.processing_class.apply_chat_template
            prompt = render(messages, tokenize=False, add_generation_prompt=True)
            assert row.completion == trainer.processing_class.decode(ids, skip_special_tokens=True)
            expected = mean_logp(trainer, row.teacher_prompt, ids) - mean_logp(trainer, prompt, ids)
            assert row.delta_v_mean == pytest.approx(expected, abs=2e-4)
    tokens = torch.tensor([len(ids) for ids in completions]) * torch.tensor(has_teacher.tolist())
    logged = trainer.state.log_history[0]
    for name in ("delta_v_mean", "s_mean", "advantage_mean"):
        mean = (torch.tensor(table[name].tolist()) * tokens).sum() / tokens.sum()
        assert mean.item() == pytest.approx(logged[f"credit/{name}"], abs=2e-4)


def test_table_marks_demonstrations_and_contrasts(run):
    _, _, (table,) = run(reward=lambda ids: float(sum(ids) % 2), max_steps=1)
    successes = table.groupby("prompt")["verifier"].transform("sum") - table["verifier"]
    assert table["with_demonstration"].tolist() == (successes > 0).tolist()
    assert table["with_contrast"].tolist() == (table["teacher_prompt"] != "").tolist()
    _, _, tables = run(max_steps=1, contrastive_coef=0.0)
    assert not tables[-1]["with_contrast"].any()
    assert (tables[-1]["s_mean"] == 0.0).all()


def test_table_inside_a_generation_batch_has_updated_rows(run):
    split = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
    _, _, tables = run(max_steps=4, **split)
    assert [len(table) for table in tables] == [4, 8, 4, 8]
    with_teacher = [table[table["teacher_prompt"] != ""] for table in tables]
    assert all((table["delta_v_mean"] != 0.0).all() for table in with_teacher)


def test_table_has_the_rows_that_dynamic_sampling_keeps(run):
    """A group whose rewards are equal and that has no feedback is replaced; TRL adds the replaced rows too."""
    trainer, seen, tables = run(
        reward=lambda ids: float(sum(ids) % 7 == 0),
        max_steps=3,
        dynamic_sampling_rounds=3,
        include_environment_feedback=False,
        learning_rate=0.0,
    )
    assert len(seen) > 3  # more rollouts than generation batches
    assert [len(table) for table in tables] == [8] * 3
    for table, log in zip(tables, trainer.state.log_history, strict=False):
        assert (table.groupby("prompt").size() == 4).all()
        with_teacher = table[table["teacher_prompt"] != ""]
        if len(with_teacher) and "credit/delta_v_mean" in log:
            for row in with_teacher.itertuples():
                assert row.prompt.splitlines()[1].removeprefix("user: ") in row.teacher_prompt


def test_table_of_weighted_tokens_has_every_row_and_no_means(run):
    _, _, (table,) = run(max_steps=1, credit_use="modulate", contrastive_coef=0.0)
    assert sorted(table.columns) == sorted([*TRL_COLUMNS, *OWN[:4]])
    assert len(table) == 8


def test_table_of_a_resumed_generation_batch_has_new_rows_only(run, tmp_path):
    split = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 4, "save_strategy": "steps"}
    run(save_steps=1, **split)
    shutil.rmtree(tmp_path / "run" / "completions")
    _, _, tables = run(resume=str(tmp_path / "run" / "checkpoint-1"), **split)
    assert [len(table) for table in tables] == [0, 4, 8]  # the first batch's rows were those of the first run


def test_evaluation_batch_larger_than_the_table(run, dataset, tmp_path):
    trainer, _, _ = run(max_steps=1, per_device_eval_batch_size=16)
    trainer.evaluate(dataset)
    trainer.evaluate(dataset)
    *_, table = (pd.read_parquet(path) for path in sorted((tmp_path / "run" / "completions").glob("*.parquet")))
    assert len(table) == 8
    assert (table.loc[table["teacher_prompt"] != "", "delta_v_mean"] != 0.0).all()


def test_table_of_grpo_has_feedback_and_no_credit(run):
    _, _, (table,) = run(max_steps=1, distillation_weight=0.0)
    assert sorted(table.columns) == sorted([*TRL_COLUMNS, "feedback"])
    assert len(table) == 8


def test_evaluation_table_has_the_credit(run, dataset):
    trainer, _, _ = run(max_steps=1, learning_rate=0.0)
    trainer.evaluate(dataset)
    table = pd.read_parquet(f"{trainer.args.output_dir}/completions/completions_00001.parquet")
    assert len(table) == 8
    assert (table.loc[table["teacher_prompt"] != "", "delta_v_mean"] != 0.0).all()


@pytest.mark.parametrize("failing", [1, 2])
def test_table_has_no_value_of_a_verifier_that_failed(make_model, make_config, tokenizer, dataset, failing):
    calls = []

    def verifier(completions, log_extra, **kwargs):
        calls.append(len(completions))
        log_extra("call", [len(calls)] * len(completions))
        if len(calls) == failing:
            raise ConnectionError("the judge is unavailable")
        return [1.0] * len(completions)

    config = make_config(
        log_completions=True, num_completions_to_print=0, on_verifier_error="skip", gradient_accumulation_steps=2
    )
    rows = dataset.select(range(4))
    trainer = CreditTrainer(make_model(), verifier, config, dataset, rows, processing_class=tokenizer)
    trainer.evaluate()
    assert calls == [8, 8]
    table = pd.read_parquet(next(Path(config.output_dir, "completions").glob("*.parquet")))
    first, second = [None] * 8, [float(3 - failing)] * 8
    assert table["call"].replace(math.nan, None).tolist() == (first + second if failing == 1 else second + first)


def test_tables_of_training_and_evaluation_share_no_rows(run, dataset):
    """The evaluation after the first step lies inside a generation batch; the second is smaller than the first."""
    split = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "per_device_eval_batch_size": 4}
    held_out = dataset.select([10])
    tables = {"train": [], "eval": []}

    class Record(TrainerCallback):
        def __init__(self, trainer):
            self.trainer = trainer

        def on_log(self, args, state, control, logs, **kwargs):
            is_evaluation = "eval_reward" in logs
            tables["eval" if is_evaluation else "train"].append(self.trainer._logs["prompt"])
            if is_evaluation:
                self.trainer.eval_dataset = held_out

    options = {"eval_dataset": dataset.select([10, 11]), "eval_strategy": "steps", "eval_steps": 1}
    run(max_steps=4, callback=Record, **options, **split)
    question = f"user: {held_out['prompt'][0][-1]['content']}"
    assert [len(table) for table in tables["eval"]] == [8, 4, 4, 4]
    assert all(prompt.endswith(question) for table in tables["eval"][1:] for prompt in table)
    assert [len(table) for table in tables["train"][:4]] == [4, 8, 4, 8]


def test_conversations_are_shown_as_text():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    parts = [{"type": "image", "image": object()}, {"type": "text", "text": "What?"}]
    assert _text([{"role": "assistant", "content": "four"}]) == "four"
    assert _text([{"role": "user", "content": parts}]) == "user: [image] What?"
    assert _text([call, {"role": "tool", "content": "4"}]) == 'assistant: [{"name": "add"}]\ntool: 4'
    assert _text("plain") == "plain"


def test_cells_of_the_tensorboard_table_hold_no_markup():
    cell = _cell("<img src=x> & **b**\n\n# head\r<script>")
    assert cell == "<td>&lt;img src=x&gt; &amp; **b**<br><br># head<br>&lt;script&gt;</td>"


def test_tensorboard_files_hold_table_and_curves(run, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'credit-trl[dashboards]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util import tensor_util

    trainer, _, tables = run(report_to="tensorboard")
    (folder,) = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    for name in ("reward", "credit/s_mean", "credit/delta_v_mean", "credit/seconds_rollout"):
        values = [event.value for event in events.Scalars(f"train/{name}")]
        assert values == pytest.approx([log[name] for log in trainer.state.log_history[:2]])
    for tag in events.Tags()["scalars"]:
        assert all(math.isfinite(event.value) for event in events.Scalars(tag)), tag
    written = next(event for event in events.Tensors("completions/text_summary") if event.step == 1)
    shown = text_array_to_html(tensor_util.make_ndarray(written.tensor_proto), enable_markdown=True)
    assert shown.count("<tr>") == 2 + len(tables[0])  # the plugin's own row, and the names
    for name in OWN:
        assert f"<th>{name}</th>" in shown
    assert "It is 1" in shown
    assert "nan" not in shown.lower()
    assert {f"<{tag}" for tag in re.findall(r"<(\w+)", shown)} == {
        f"<{tag}" for tag in "table thead tbody tr th td br".split()
    }
    assert "![x](http://host/x.png)" in shown  # text, not an image


# trackio reads its folder on import, so the run has a process of its own.
TRACKIO_RUN = """
import json
from datasets import Dataset
from credit_trl import CreditConfig, CreditTrainer
from tiny import build_model, build_tokenizer, length_verdicts
rows = [{"prompt": [{"role": "user", "content": f"{a}+1="}], "answer": str(a + 1)} for a in range(4)]
config = CreditConfig(
    "run", report_to="trackio", project="credit", run_name="one", log_completions=True, num_completions_to_print=0,
    use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=8, num_generations=4,
    max_completion_length=6, max_steps=2, logging_steps=1, save_strategy="no", disable_tqdm=True,
)
tokenizer = build_tokenizer()
model = build_model(tokenizer)
trainer = CreditTrainer(model, length_verdicts, config, Dataset.from_list(rows), processing_class=tokenizer)
trainer.train()
from trackio.sqlite_storage import SQLiteStorage
stored = SQLiteStorage.get_logs("credit", "one")
print(json.dumps({"stored": stored, "logged": trainer.state.log_history}, default=str))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="needs trackio: pip install 'credit-trl[dashboards]'")
def test_trackio_store_holds_table_and_curves(tmp_path):
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TRACKIO_RUN]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr[-2000:]
    read = json.loads(ran.stdout.splitlines()[-1])
    for name in ("reward", "credit/s_mean", "credit/delta_v_mean", "credit/seconds_rollout"):
        values = [row[f"train/{name}"] for row in read["stored"] if f"train/{name}" in row]
        assert values == pytest.approx([log[name] for log in read["logged"][:2]])
    tables = [row["completions"]["_value"] for row in read["stored"] if "completions" in row]
    assert [len(table) for table in tables] == [8, 8, 8]  # two steps, and the summary after the last
    for row in tables[0]:
        assert set(OWN) <= row.keys()
        assert row["feedback"] in row["teacher_prompt"]
        assert row["delta_v_mean"] != 0.0
    assert list(undefined(read["stored"])) == []


def undefined(value):
    """Every None, NaN and infinity in a JSON value; trackio stores numbers that JSON lacks as text."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from undefined(item)
    elif value in (None, "NaN", "Infinity", "-Infinity") or (isinstance(value, float) and not math.isfinite(value)):
        yield value
