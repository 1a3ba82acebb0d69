"""Mistakes of users: each is one clear error or one warning that names the value and the fix.

All but those of `AFTER_A_ROLLOUT` are found before anything is generated.
"""

from __future__ import annotations

import re
import warnings

import huggingface_hub
import pytest
from datasets import Dataset

from credit_trl import CreditTrainer, Verdict, cli
from credit_trl.training.metrics import CreditWarning
from tiny import build_model, length_verdicts


def questions(**columns) -> Dataset:
    rows = {"prompt": [[{"role": "user", "content": f"{i}+1="}] for i in range(12)], "answer": ["1"] * 12}
    return Dataset.from_dict({**rows, **{name: [value] * 12 for name, value in columns.items()}})


# Arguments -> a part of the error with the value, and one with the fix. Options stand in tests/test_config.py.
TRAINERS = {
    "columns without a question": (
        lambda: {"train_dataset": questions().remove_columns("prompt")},
        "its columns are answer",
        "dataset.rename_column(..., 'prompt')",
    ),
    "messages without a role": (
        lambda: {"train_dataset": questions(prompt=[{"content": "x"}])},
        "[None]",
        "role 'user'",
    ),
    "images": (lambda: {"train_dataset": questions(image="x")}, "images", "`distillation_weight=0`"),
    "images in messages": (
        lambda: {"train_dataset": questions(prompt=[{"role": "user", "content": [{"type": "image", "text": None}]}])},
        "images",
        "`distillation_weight=0`",
    ),
    "contrasts of a stream": (
        lambda: {"train_dataset": questions().to_iterable_dataset(), "options": {"contrastive_source": "dataset"}},
        "contrastive_source='dataset'",
        "contrastive_source='batch'",
    ),
    "evaluation without a question": (
        lambda: {"eval_dataset": {"harder": questions().remove_columns("prompt")}},
        "`eval_dataset['harder']`",
        "rename_column",
    ),
    "column of another argument": (
        lambda: {"train_dataset": questions(completions="x")},
        "`completions`",
        "rename_column",
    ),
    "evaluation without the answer": (
        lambda: {"eval_dataset": questions().remove_columns("answer")},
        "`eval_dataset`",
        "Add the column",
    ),
    "reward of a column that is missing": (
        lambda: {"reward_funcs": lambda completions, solution, **kwargs: [1.0]},
        "`solution`",
        "Add the column",
    ),
    "no reward": (lambda: {"reward_funcs": None}, "No reward source", "reward_funcs"),
    "misspelt source": (lambda: {"options": {"contrastive_source": "bacth"}}, "'bacth'", "'module:function'"),
    "support above the vocabulary": (
        lambda: {"options": {"distillation_topk": 10**6}},
        "got 1000000",
        "vocabulary size",
    ),
}


@pytest.fixture
def build(make_config, tokenizer, monkeypatch):
    """A function that builds a trainer with a mistake; a rollout fails the test."""

    def generate(self, prompts):
        pytest.fail("a completion was generated")

    monkeypatch.setattr(CreditTrainer, "_generate", generate)

    def make(options=(), model=None, reward_funcs=length_verdicts, **arguments):
        config = make_config(**dict(options))
        arguments = {"processing_class": tokenizer, "train_dataset": questions(), **arguments}
        return CreditTrainer(model or build_model(tokenizer), reward_funcs, config, **arguments)

    return make


@pytest.mark.parametrize("mistake", TRAINERS)
def test_mistake_in_data_model_or_reward_is_refused(build, mistake):
    arguments, value, fix = TRAINERS[mistake]
    with pytest.raises((ValueError, TypeError)) as error:
        build(**arguments())
    assert re.search("|".join(map(re.escape, value.split("|"))), str(error.value))
    assert fix in str(error.value)


# Command lines -> a part of the error with the value, and one with the fix. `q.jsonl` and `rewards.py` exist.
CPU = ["--use_cpu", "true", "--bf16", "false"]
TASK = ["--task", "quickstart", "--model_name_or_path", "quickstart"]
OWN = ["--model_name_or_path", "quickstart", "--reward_funcs", "rewards.right"]
LINES = {
    "misspelt command": (["trian"], "'trian'", "trl --help"),
    "misspelt argument": (["credit", *TASK, "--contrastive_coeff", "1"], "--contrastive_coeff", "Did you mean"),
    "unknown task": (
        ["credit", "--task", "quikstart", "--contrastive_coef", "0", *CPU],
        "'quikstart'",
        "Did you mean 'quickstart'",
    ),
    "option set twice": (["credit", "--config", "twice.yaml"], "`max_steps`", "Remove one"),
    "second configuration that is a list": (
        ["credit", "--config", "a.yaml", "--config", "list.yaml"],
        "list",
        "value",
    ),
}
BUILT = {
    "no grader": (["--model_name_or_path", "quickstart", "--dataset_path", "q.jsonl"], "grades", "--reward_funcs"),
    "file that does not exist": ([*OWN, "--dataset_path", "p.jsonl"], "p.jsonl", "no such file"),
    "damaged file": ([*OWN, "--dataset_path", "damaged.jsonl"], "damaged.jsonl", "cannot be read"),
    "split that does not exist": (
        [*OWN, "--dataset_path", "q.jsonl", "--eval_strategy", "steps", "--eval_steps", "1"],
        "test",
        "the data has train",
    ),
    "misspelt reward": (
        ["--model_name_or_path", "quickstart", "--reward_funcs", "rewards.rigth", "--dataset_path", "q.jsonl"],
        "no `rigth`",
        "Did you mean right?",
    ),
    "reward as a task": (
        ["--model_name_or_path", "quickstart", "--task", "rewards:right"],
        "the function `right` has no function `build`",
        "`--reward_funcs`",
    ),
    "folder that does not exist": (
        ["--model_name_or_path", "./quickstart", "--task", "quickstart"],
        "no model folder `./quickstart`",
        "Give its path",
    ),
    "checkpoint that does not exist": ([*TASK, "--resume_from_checkpoint", "runs/1"], "runs/1", "`latest`"),
    "filter that drops everything": ([*TASK, "--max_prompt_tokens", "1"], "--max_prompt_tokens 1", "Raise it"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with data, a module and configurations."""
    (tmp_path / "q.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 12)
    (tmp_path / "damaged.jsonl").write_text('{"prompt": ')
    (tmp_path / "list.yaml").write_text("- task\n")
    (tmp_path / "twice.yaml").write_text("max_steps: 3\ntask: quickstart\nmax_steps: 5\n")
    (tmp_path / "a.yaml").write_text("task: quickstart\n")
    (tmp_path / "rewards.py").write_text("def right(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("mistake", LINES)
def test_mistaken_command_line_is_one_line(capsys, mistake):
    line, value, fix = LINES[mistake]
    try:
        code = cli.main(line)
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr().err
    assert code not in (0, None)
    [error] = [line for line in printed.splitlines() if "error: " in line]
    assert value in error
    assert fix in error
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("mistake", BUILT)
def test_mistaken_data_of_a_command_are_one_line(capsys, monkeypatch, mistake):
    from credit_trl.cli import training

    monkeypatch.setattr(CreditTrainer, "_generate", lambda self, prompts: pytest.fail("a completion was generated"))
    line, value, fix = BUILT[mistake]
    small = ["--per_device_train_batch_size", "8", "--num_generations", "4", "--output_dir", "run"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code = training.run([*line, *small, "--use_cpu", "true", "--bf16", "false", "--max_steps", "1"])
    printed = capsys.readouterr().err
    assert code == 2
    [error] = [line for line in printed.splitlines() if line.startswith("trl credit: error: ")]
    assert value in error
    assert fix in error


def each(value):
    return lambda completions, **kwargs: [value] * len(completions)


# Reward functions -> a part of the error or warning with the value, and one with the fix. Other malformed results
# stand in tests/rollout/test_verdict.py.
AFTER_A_ROLLOUT = {
    "no return": (lambda **kwargs: None, {}, "None", "`return`"),
    "pairs": (each((1.0, "right")), {}, "tuple for completion 0", "Verdict(reward, feedback)"),
    "never a success": (each(0.5), {"success_reward_threshold": 1.0}, "success_reward_threshold", "lower"),
    "feedback that is ignored": (
        lambda completions, **kwargs: [Verdict(float(i % 2), "no") for i in range(len(completions))],
        {"include_environment_feedback": False},
        "include_environment_feedback=False",
        "Set it to True",
    ),
    "all completions masked": (
        each(Verdict(0.0, "no")),
        {"mask_truncated_completions": True},
        "mask_truncated_completions",
        "max_completion_length",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", AFTER_A_ROLLOUT)
def test_mistaken_reward_function_is_named_in_the_first_step(make_config, tokenizer, mistake):
    reward, options, value, fix = AFTER_A_ROLLOUT[mistake]
    config = make_config(max_steps=1, **options)
    trainer = CreditTrainer(build_model(tokenizer), reward, config, questions(), processing_class=tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.train()
            messages = [str(w.message) for w in caught if w.category is CreditWarning]
        except (ValueError, TypeError) as error:
            messages = [str(error)]
    [message] = [m for m in messages if not m.startswith("The support holds")]
    assert value in message
    assert fix in message
