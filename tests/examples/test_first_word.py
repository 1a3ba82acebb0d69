"""`examples/smollm/first_word.py` on a tiny random model."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import gmean

from tables import tables_of
from tiny import save_model

SMALL = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8}


@pytest.fixture
def first_word(smollm):
    return smollm("first_word")


@pytest.mark.parametrize(("text", "constraint", "reward", "feedback"), tables_of(__file__)["verdicts"])
def test_verdict_names_the_broken_rule(first_word, text, constraint, reward, feedback):
    verdict = first_word.verify(text, "There", "dog", constraint)
    assert verdict.reward == reward
    assert feedback in verdict.feedback
    assert verdict.metrics["noun"] == float("dog" in text.lower())


def run(first_word, monkeypatch, tmp_path, *options):
    monkeypatch.setattr(first_word, "OPTIONS", first_word.OPTIONS | SMALL)
    model = save_model(tmp_path / "model")
    line = ["--model", model, "--steps", "2", "--output_dir", str(tmp_path / "run"), *options]
    monkeypatch.setattr(sys, "argv", ["first_word.py", *line])
    first_word.main()


def test_demonstration_writes_a_page_with_both_arms(first_word, monkeypatch, tmp_path, capsys):
    run(first_word, monkeypatch, tmp_path)
    page = (tmp_path / "run" / "first_word.html").read_text("utf-8")
    assert page.count("<polyline") == 2
    assert page.count("<tr") == 6  # the head and five prompts
    assert page.count('<span style="background:rgba(') > 10  # tokens before training, colored by R_t
    assert page.count("<th>") == 5  # the prompt, and before and after training for both arms
    assert "guide, λ = 1.5       step   2" in capsys.readouterr().out


def test_perplexity_is_the_inverse_of_the_geometric_mean_of_probabilities(first_word):
    probabilities = np.random.default_rng(0).dirichlet(np.ones(9), size=3)
    expected = 1.0 / gmean(probabilities[[0, 1, 2], [5, 6, 8]])
    assert first_word.perplexity(torch.tensor(probabilities).log(), [[5, 6], [8]]) == pytest.approx(expected)


def test_rows_of_a_study_name_the_options_that_are_set(first_word, monkeypatch, tmp_path):
    table = tmp_path / "rows.csv"
    options = ("--set", "learning_rate=2e-5", "use_successful_as_teacher=true")
    run(first_word, monkeypatch, tmp_path, "--csv", str(table), "--arms", "SDPO", *options)
    assert set(pd.read_csv(table)["arm"]) == {"SDPO learning_rate=2e-05 use_successful_as_teacher=True"}


def test_study_is_shown_by_means_over_seeds_and_paired_differences(first_word):
    values = {("SDPO", 0): (0.1, 0.1, 0.1), ("SDPO", 20): (0.1, 0.3, 0.5), ("GRPO", 20): (0.2, 0.5, 0.8)}
    rows = [(arm, step, seed, p) for (arm, step), seed_values in values.items() for seed, p in enumerate(seed_values)]
    frame = pd.DataFrame(rows, columns=["arm", "step", "seed", "probability"]).reindex(columns=first_word.COLUMNS)
    frame = frame.assign(accuracy=0.0, transfer=0.0, length=5.0, kl=0.0)
    *_, base, sdpo, grpo = first_word.study_table(frame, 20).splitlines()
    assert base.startswith("| base | 3 | 0.100 |")
    assert sdpo.startswith("| SDPO | 3 | 0.300 ± 0.497 |")  # 4.303 × 0.2 / √3
    assert grpo.startswith("| GRPO | 3 | 0.500 ± 0.745 |")
    assert grpo.endswith("| 0.200 ± 0.248 | 0.000 |")


def test_predictions_name_every_arm_with_a_teacher(first_word, monkeypatch, tmp_path, capsys):
    run(first_word, monkeypatch, tmp_path, "--predict")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" |")[0] for line in lines[2:5]] == ["| policy", "| SDPO", "| CREDIT, λ = 0.1"]
    assert "λ_hold" in lines[-1]


@pytest.mark.parametrize("is_in_support", [True, False])
def test_predicted_probability_is_that_of_the_target(first_word, is_in_support):
    """Guide, λ = 1: f² / g over the teacher's 20 likeliest tokens and the rest."""
    distributions = np.random.default_rng(0).dirichlet(np.ones(30), size=5)  # the policy, the teacher, three contrasts
    policy, teacher = distributions[:2]
    support, outside = np.split(np.argsort(-teacher), [20])
    target = teacher[support] ** 2 / gmean(distributions[2:, support])
    target_of_rest = teacher[outside].sum() ** 2 / gmean(distributions[2:, outside].sum(-1))
    total = target.sum() + target_of_rest
    word = support[3] if is_in_support else outside[3]
    expected = target[3] / total if is_in_support else target_of_rest / total * policy[word] / policy[outside].sum()
    logps = torch.tensor(distributions).log()
    context_logps = first_word.CreditLogps(logps[:1], logps[1:2], logps[2:, None])
    assert first_word.target_probability(context_logps, int(word), "CREDIT form=guide λ=1") == pytest.approx(expected)
    tempered = teacher**0.9 / (teacher**0.9).sum()
    expected = tempered[word] if is_in_support else tempered[outside].sum() * policy[word] / policy[outside].sum()
    assert first_word.target_probability(context_logps, int(word), "temper-only λ=0.1") == pytest.approx(expected)
