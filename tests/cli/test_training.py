"""Training script of `trl credit`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from credit_trl import CreditTrainer
from credit_trl.cli.training import CreditScriptArguments, evaluate_during_training, load_data
from tiny import length_verdicts


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 5),
        ({"steps_per_generation": 4}, 20),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, 10),
        ({"num_iterations": 2}, 10),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 8, "num_iterations": 1}, 1),
    ],
)
def test_avg_at_k_steps_counts_generation_batches(make_model, make_config, tokenizer, dataset, options, expected):
    config = make_config(**options)
    trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
    script = CreditScriptArguments(task="quickstart", avg_at_k=1, avg_at_k_steps=5)
    assert evaluate_during_training(trainer, script).eval_steps == expected


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]


def load(wants_eval=False, **options):
    script = CreditScriptArguments(reward_funcs=["math.sqrt"], **options)
    return load_data(script, SimpleNamespace(datasets=[]), wants_eval)


@pytest.mark.parametrize("name", [None, "json"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_own_json_lines_are_read_by_path(tmp_path, name, suffix):
    path = tmp_path / f"questions{suffix}"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    train, evaluation, _ = load(True, dataset_name=name, dataset_path=str(path), eval_dataset_path=str(path))
    assert train.to_list() == evaluation.to_list() == ROWS


def test_evaluations_are_at_least_one_batch_apart():
    with pytest.raises(ValueError, match="`--avg_at_k_steps` must be at least 1"):
        CreditScriptArguments(avg_at_k_steps=0)


def test_limits_of_rows_below_one_name_their_option():
    with pytest.raises(ValueError, match="`--max_train_rows` must be at least 1, got 0; leave `--max_train_rows` out"):
        CreditScriptArguments(max_train_rows=0)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("q.jsonl", None, "`--dataset_path .*q.jsonl`: no such file"),
        ("q.txt", "x", "`--dataset_path .*q.txt`: expected one of .jsonl"),
        ("q.jsonl", '{"prompt": ', "`--dataset_path .*q.jsonl` cannot be read: "),
        (
            "q.jsonl",
            '{"prompt": "1+1="}\n{"prompt": "1+2="},',
            r"line 2 is no JSON object \(Extra data",
        ),
        ("q.jsonl", '{"prompt": "é"}', "q.jsonl` is not text in UTF-8"),
        ("q.jsonl", "", "`--dataset_path .*q.jsonl` cannot be read: it is empty"),
    ],
)
def test_unreadable_data_files_are_named_in_one_line(tmp_path, file, text, message):
    if text is not None:
        (tmp_path / file).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as raised:
        load(dataset_path=str(tmp_path / file))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "mixture"), [("foo/bar", []), (None, ["foo/bar"])])
def test_dataset_beside_a_task_is_refused(name, mixture):
    script = CreditScriptArguments(task="quickstart", dataset_name=name)
    with pytest.raises(ValueError, match=r"`--task quickstart` builds its own data, which excludes .*foo/bar"):
        load_data(script, SimpleNamespace(datasets=mixture), wants_eval=False)


def test_evaluation_without_its_data_names_the_option(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(ROWS[0]))
    with pytest.raises(ValueError, match=r"dataset_test_split test.*the data has train"):
        load(True, dataset_path=str(path))
