"""`trl credit --check` and `trainer.check()`: parts of the report, nothing left behind."""

import re

import pytest
import torch
from datasets import Dataset

from credit_trl import Verdict
from credit_trl.cli import training
from credit_trl.tasks.quickstart import load_model

PARTS = ("prompt", "completion", "verdict", "teacher's prompt", "contrast prompt", "R_t of the tokens")
LINE = (
    "--task quickstart --model_name_or_path quickstart --use_cpu true --bf16 false --report_to none --check "
    "--per_device_train_batch_size 8 --num_generations 4 --max_completion_length 6 --max_reprompt_len 200 "
    "--teacher_model_kind base --output_dir runs/first --max_steps 40 --save_steps 10"
).split()


def test_check_prints_each_part_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert training.run(LINE) == 0
    printed = capsys.readouterr().out
    places = [printed.index(f"--- {part}") for part in PARTS]
    assert places == sorted(places)
    assert "feedback: Correct option:" in printed
    assert re.search(r"\[[+-]\d+\.\d\]", printed)  # R_t without a terminal's colours
    # Eight completions of 6 tokens behind 200 tokens, read by the teacher with and without contrast.
    assert re.search(rf"tokens, teacher +{2 * 8 * 206:,}\n", printed)
    for stage in ("rollout", "verdict", "contexts", "scores", "update"):
        assert re.search(rf"{stage} +\d+\.\d+ s", printed)
    estimate = r"the run of 40 steps: 0:.* first batch, 0:.* lengths\nits checkpoints: 4 with 0\.\d+ GB"
    assert re.search(estimate, printed)
    # What the step holds: weights and their gradients, the copy of the teacher, and Adam's two averages, in fp32.
    model, _ = load_model()
    size = sum(weight.nbytes for weight in model.parameters()) / 2**30
    sizes = re.findall(r"(weights|gradients|optimizer's state|teacher's weights) +([\d.]+) GiB  float32", printed)
    assert {name: float(gib) for name, gib in sizes} == pytest.approx(
        {"weights": size, "gradients": size, "optimizer's state": 2 * size, "teacher's weights": size}, abs=1e-3
    )
    assert float(re.search(r"a checkpoint +([\d.]+) GB", printed)[1]) > 3 * size  # weights and Adam's averages
    assert float(re.search(r"peak memory +([\d.]+) GiB", printed)[1]) > 5 * size
    assert not list(tmp_path.iterdir())


def test_check_changes_neither_weights_nor_options_nor_the_next_run(make_trainer, dataset, tmp_path, monkeypatch):
    entropy = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "distillation_weight": 0.5}

    def trained(checks):
        options = {"max_steps": 2, "lr_scheduler_type": "polynomial", "eval_on_start": True, **entropy}
        trainer = make_trainer(output_dir=str(tmp_path / str(checks)), eval_rows=dataset, **options)
        evaluations = []
        monkeypatch.setattr(trainer, "evaluate", lambda **options: evaluations.append(options) or {})
        initial = [weight.clone() for weight in trainer.model.parameters()]
        options = dict(vars(trainer.args))
        if checks:
            trainer.check()
            assert all(map(torch.equal, initial, trainer.model.parameters()))
            assert vars(trainer.args) == options
            assert not evaluations
        trainer.train()
        assert len(evaluations) == 1
        return list(trainer.model.parameters())

    assert all(map(torch.equal, trained(checks=False), trained(checks=True)))


def test_check_shows_success_without_z_with_z_and_with_a_foreign_z(make_trainer, tokenizer, monkeypatch, capsys):
    """The policy copies the number that its feedback names, and answers 9 without any."""

    def verdicts(completions, answer, **columns):
        texts = [completion[-1]["content"] for completion in completions]
        return [Verdict(float(text == right), f"It is {right}.") for text, right in zip(texts, answer, strict=True)]

    rows = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"{i}?"}] for i in range(4)], "answer": list("1234")}
    )
    options = {"use_successful_as_teacher": False, "max_reprompt_len": 400}
    trainer = make_trainer(verdicts, rows, **options)
    generate = trainer._generate_single_turn

    def copied(prompt_ids, *arguments, **options):
        generated = list(generate(prompt_ids, *arguments, **options))
        named = [re.search(r"It is (\d)", tokenizer.decode(ids)) for ids in prompt_ids]
        generated[0] = [
            tokenizer(found[1] if found else "9")["input_ids"] + [tokenizer.eos_token_id] for found in named
        ]
        return tuple(generated)

    monkeypatch.setattr(trainer, "_generate_single_turn", copied)
    trainer.check()
    report = capsys.readouterr().out
    assert re.search(r"success without z +0% of 8 answers", report)
    assert re.search(r"success with z +100% of 8 answers", report)
    assert re.search(r"success with another prompt's z +0% of 8 answers", report)
