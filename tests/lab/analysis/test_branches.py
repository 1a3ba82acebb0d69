"""Branches of token maps and the λ_c that they give."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.lab.analysis import branches
from credit_trl.lab.analysis.branches import (
    critical_lambdas,
    find_branches,
    format_branches,
    summarize_branches,
)
from credit_trl.lab.analysis.tokenmap import ScoredTokens, TokenMap, TokenScores
from credit_trl.lab.analysis.tokentext import TokenText
from lab.drawn import FORMULA, drawn_rollout

A, B, OTHER, FOREIGN, RARE = range(5)


def branch_map(
    delta: torch.Tensor, s: torch.Tensor, *, sampled: int = A, contrasts: int = 2, other: float = -12.0
) -> TokenMap:
    """Map with one branch a token: z raises A by δ, and under contrast prompts FOREIGN takes the place of B.

    Args:
        delta, s: (T,), δ, and s as the mean over the contrast prompts.
        sampled: the sampled token of every position; the others are alternatives.
        contrasts: number of contrast prompts.
        other: logit of OTHER; those of A and B lie in [0, 2], those of FOREIGN and RARE are -12.
    """
    student = torch.full((len(delta), 5), -12.0, dtype=torch.float64)
    student[:, OTHER] = other
    student[:, [A, B]] = 2 * torch.rand(len(delta), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    teacher = student.clone()
    teacher[:, A] += delta
    contrast = teacher.expand(contrasts, -1, -1).clone()
    contrast[..., FOREIGN] = contrast[..., B]
    contrast[..., B] -= s + torch.linspace(-0.5, 0.5, contrasts)[:, None]
    ids = torch.arange(5).expand(len(delta), -1)

    def scores(columns: torch.Tensor) -> dict:
        logps = {
            "student_logps": student.log_softmax(-1)[:, columns],
            "teacher_logps": teacher.log_softmax(-1)[:, columns],
            "contrast_logps": contrast.log_softmax(-1)[..., columns],
        }
        rest = dict.fromkeys(("advantage", "policy_mean"), torch.zeros_like(logps["student_logps"]))
        return logps | rest | {"ids": ids[:, columns], "formula": FORMULA}

    own = {n: x[..., 0] if isinstance(x, torch.Tensor) else x for n, x in scores(torch.tensor([sampled])).items()}
    alternatives = ScoredTokens(**scores(torch.tensor([i for i in range(5) if i != sampled])))
    texts = [TokenText(str(t)) for t in range(len(delta))]
    names = [["x"] * 4] * len(delta)
    scored, classes = TokenScores(**own, alternatives=alternatives), ["word"] * len(delta)
    return TokenMap(drawn_rollout(len(delta), contrasts), "base", texts, classes, scored, names)


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("sampled", [A, B, RARE])
def test_delta_and_s_are_those_of_the_construction(sampled):
    delta, s = values(0.5, 2.0, 4.0, -1.0), values(3.0, 7.5, 11.4, 3.0)
    found = find_branches(branch_map(delta, s, sampled=sampled))
    assert found["positions"].tolist() == [0, 1, 2, 3]
    assert found["generic_ids"].tolist() == [A] * 4
    assert found["specific_ids"].tolist() == [B] * 4
    torch.testing.assert_close(found["delta"], delta)
    torch.testing.assert_close(found["s"], s)


def test_positions_without_both_tokens_are_no_branches(monkeypatch):
    found = find_branches(branch_map(values(1.0, 1.0, 1.0), values(0.3, 6.0, 0.0)))
    assert found["positions"].tolist() == [1]
    assert find_branches(branch_map(values(1.0), values(6.0), contrasts=0))["s"].tolist() == []
    monkeypatch.setattr(branches, "MIN_PROBABILITY", 0.9)
    assert find_branches(branch_map(values(1.0), values(6.0)))["s"].tolist() == []


def test_critical_lambdas_are_quartiles_over_rising_branches():
    one = branch_map(values(3.0, 4.0, 5.0, -2.0), values(6.0, 6.0, 6.0, 6.0))
    everything, *classes = summarize_branches([one, replace(one, classes=["cue", "cue", "word", "word"])])
    assert [everything[name] for name in ("name", "count", "rising")] == ["all", 8, 6]
    assert [(c["name"], c["count"], c["rising"]) for c in classes] == [("word", 6, 4), ("cue", 2, 2)]
    cue = classes[1]
    assert (cue["delta"][1], cue["s"][1]) == (pytest.approx(3.5), pytest.approx(6.0))
    rates = torch.tensor([3 / 9, 4 / 10], dtype=torch.float64)
    levels = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    assert cue["lambda_subtract"] == pytest.approx(rates.quantile(levels).tolist())
    assert cue["lambda_guide"][0] == pytest.approx(3 / 6 + 0.25 * (4 / 6 - 3 / 6))


@given(
    st.lists(
        st.tuples(st.floats(-3.0, 7.0), st.floats(0.5, 12.0)).filter(lambda one: abs(one[0]) > 0.05),
        min_size=1,
        max_size=6,
    )
)
def test_generic_tokens_lose_together_above_the_critical_lambda(tokens):
    deltas, spreads = (values(*column)[None] for column in zip(*tokens, strict=True))
    subtract, guide = critical_lambdas(deltas, spreads, torch.ones_like(deltas, dtype=torch.bool))
    if deltas.max() <= 0:
        assert subtract.isnan()
        assert guide.isnan()
        return

    def odds(coef: float) -> float:
        return (deltas * (1 - coef) / coef - spreads).exp().sum().item()

    assert guide.item() == pytest.approx((deltas / spreads).max().item())
    assert odds(0.999 * subtract.item()) > 1
    assert subtract.item() == 1.0 or odds(min(1.0, 1.001 * subtract.item())) < 1 + 1e-6


def test_other_generic_tokens_of_a_position_raise_its_lambda():
    alone, with_other = (find_branches(branch_map(values(3.0), values(6.0), other=other)) for other in (-12.0, 1.0))
    assert alone["lambda_subtract"].item() == pytest.approx(3 / 9)
    assert with_other["delta"].item() in (pytest.approx(3.0), pytest.approx(0.0))
    low = 3 * (1 / with_other["lambda_subtract"].item() - 1) - 6  # log-odds of A there; OTHER has δ = 0, so odds e^-6
    assert math.exp(low) + math.exp(-6) == pytest.approx(1.0, rel=1e-6)


def test_sampled_token_among_the_alternatives_counts_once():
    apart = branch_map(values(3.0, 1.0), values(6.0, 3.0))
    own = apart.scores
    alternatives = {
        f.name: torch.cat([getattr(own, f.name).unsqueeze(-1), getattr(own.alternatives, f.name)], dim=-1)
        for f in fields(ScoredTokens)
        if isinstance(getattr(own, f.name), torch.Tensor)
    }
    both = replace(apart, scores=replace(own, alternatives=replace(own.alternatives, **alternatives)))
    found, expected = find_branches(both), find_branches(apart)
    for name, own in found.items():
        torch.testing.assert_close(own, expected[name])
    torch.testing.assert_close(found["lambda_subtract"], values(1 / 3, 1 / 4), atol=1e-4, rtol=0)


def test_table_shows_classes_and_missing_values():
    text = format_branches(summarize_branches([branch_map(values(-2.0), values(6.0))]))
    assert re.search(r"\| word \| 1 \| 0 \| -2\.00 \[-2\.00, -2\.00\] \| 6\.00 .* \| – \| – \|", text)
    assert "No branch" in format_branches([])
