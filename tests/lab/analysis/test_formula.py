"""R_t of the analysis against the loss and against a formula written in probabilities."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from credit_trl.lab.analysis.formula import PAPER, CreditFormula
from credit_trl.lab.analysis.passes import CreditLogps
from credit_trl.lab.analysis.responses import analysis_config, rollout_contexts
from credit_trl.lab.analysis.tokenmap import map_response
from credit_trl.loss.scores import SupportConfig
from credit_trl.objective import ContrastRule
from dense_reference import dense_logps, make_case, ours

SUPPORTS = [
    (support, tail)
    for support in ("teacher_topk", "student_topk", "full", "sampled")
    for tail in ("bucket", "renormalize")
]
RULES = [ContrastRule(*given) for given in itertools.product(("subtract", "guide"), (0.0, 0.25))]
BASELINES = ("mean_log", "log_mean")


def by_hand(formula: CreditFormula, p: np.ndarray, f: np.ndarray, g: np.ndarray, v: int, coef: float):
    """R of token v at one position and the λ that entered, from probabilities: p, f (V,), g (C, V)."""
    size = len(p)
    tokens = {
        "teacher_topk": list(np.argsort(-f)[: formula.support.topk]),
        "student_topk": list(np.argsort(-p)[: formula.support.topk]),
        "full": list(range(size)),
        "sampled": [v],
    }[formula.support.kind]
    within = formula.support.tail == "renormalize" and "topk" in formula.support.kind

    def of_token(q: np.ndarray) -> float:
        return q[v] / q[sorted({*tokens, v})].sum() if within else q[v]

    def buckets(q: np.ndarray) -> np.ndarray:
        own = q[tokens] / q[tokens].sum() if within else q[tokens]
        return own if within or len(tokens) == size else np.append(own, 1.0 - own.sum())

    def average(values: np.ndarray) -> np.ndarray:
        return values.mean(0) if formula.baseline == "log_mean" else np.exp(np.log(values).mean(0))

    generic = average(np.array([buckets(one) for one in g]))
    if formula.support.kind == "sampled":  # of the contrasts one token is kept: the rest is what its average leaves
        generic = np.append(generic[:1], 1.0 - generic[0])
    distance = np.abs(buckets(f) / buckets(f).sum() - generic / generic.sum()).sum() / 2
    if formula.rule.gate > 0 and distance <= formula.rule.gate:
        coef = 0.0
    teacher, other = math.log(of_token(f)), math.log(average(np.array([of_token(one) for one in g])))
    target = teacher + coef * (teacher - other) if formula.rule.form == "guide" else teacher - coef * other
    return target - math.log(of_token(p)), coef


@settings(max_examples=60, deadline=None)
@example(seed=0, support=("sampled", "bucket"), rule=RULES[1], baseline="mean_log", contrasts=2, topk=1, coef=1.0)
@given(
    seed=st.integers(0, 10**6),
    support=st.sampled_from(SUPPORTS),
    rule=st.sampled_from(RULES),
    baseline=st.sampled_from(BASELINES),
    contrasts=st.integers(1, 3),
    topk=st.integers(1, 9),
    coef=st.floats(0.01, 1.0),
)
def test_advantages_equal_the_formula_in_probabilities(seed, support, rule, baseline, contrasts, topk, coef):
    size = 8
    logps = torch.randn(2 + contrasts, 3, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    student, teacher, *others = torch.log_softmax(1.5 * logps, dim=-1)
    formula = CreditFormula(rule, baseline, support=SupportConfig(support[0], min(topk, size), support[1]))
    ids = torch.arange(size).expand(3, size)
    got, entered = formula.advantages(CreditLogps(student, teacher, torch.stack(others)), ids, coef)
    hand = formula
    if "topk" in support[0] and topk >= size:  # a support of all tokens is the whole vocabulary
        hand = CreditFormula(rule, baseline)
    for t, v in itertools.product(range(3), range(size)):
        p, f, *g = (np.exp(x[t].numpy()) for x in (student, teacher, *others))
        expected, expected_coef = by_hand(hand, p, f, np.array(g), v, coef)
        assert got[t, v].item() == pytest.approx(expected, abs=1e-6), (t, v)
        assert entered[t, v].item() == pytest.approx(expected_coef)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize(
    ("support", "tail", "rule"),
    [(*support, rule) for support in SUPPORTS for rule in RULES],
)
def test_advantages_equal_those_of_the_loss(support, tail, rule, baseline):
    case = make_case(n=60, contrasts=3, dtype=torch.float64, seed=3)
    case.coef[:] = 0.4
    terms = ours(case, support, tail, 1.0, topk=5, rule=rule, baseline=baseline)
    student = dense_logps(case.hidden.detach(), case.weight.detach(), case.bias, case)
    reference = (case.reference_weight, case.reference_bias, case)
    contrasts = torch.stack([dense_logps(hidden, *reference) for hidden in case.contrasts])
    formula = CreditFormula(rule, baseline, support=SupportConfig(support, 5, tail))
    logps = CreditLogps(student, dense_logps(case.teacher, *reference), contrasts)
    got, entered = formula.advantages(logps, case.token_ids[:, None], 0.4)
    torch.testing.assert_close(got[:, 0], terms.advantages, atol=1e-9, rtol=0)
    torch.testing.assert_close(entered[:, 0], terms.contrastive_coef)
    if rule.gate and support != "sampled":
        assert 0 < (terms.contrastive_coef == 0).sum() < 60, "the gate is open or closed everywhere"


def test_advantages_without_contrast_equal_the_reward():
    student, teacher, other = torch.log_softmax(torch.randn(3, 4, 9), dim=-1)
    ids = torch.arange(9).expand(4, 9)
    for support in ("teacher_topk", "full", "sampled"):
        formula = CreditFormula(ContrastRule("guide", 0.1), support=SupportConfig(support, 3))
        for contrasts, coef in ((other[None], 0.0), (other[None][:0], 0.5)):
            got, entered = formula.advantages(CreditLogps(student, teacher, contrasts), ids, coef)
            torch.testing.assert_close(got, teacher - student)
            assert not entered.any()


def plain_logps(model, context: list[int], y: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*context, *y]])).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize(
    "options",
    [
        {"contrastive_form": "guide", "contrastive_coef": 2.0},
        {"contrastive_gate": 0.05, "contrastive_coef": 0.5},
        {"contrastive_baseline": "log_mean", "contrastive_gate": 0.1, "contrastive_coef": 0.5},
        {"distillation_support": "student_topk", "distillation_topk": 3, "contrastive_gate": 0.1},
        {"distillation_tail": "renormalize", "distillation_topk": 5, "contrastive_form": "guide"},
        {"distillation_support": "full", "contrastive_gate": 0.1},
    ],
    ids=lambda options: " ".join(f"{key[key.index('_') + 1 :]}={value}" for key, value in options.items()),
)
def test_map_uses_the_formula_of_the_configuration(checkpoint, respond, options):
    config = analysis_config(contrastive_count=2, **options)
    response = respond("Paris is the capital.")
    token_map = map_response(checkpoint, response, config, alternatives=4)
    contexts, y = rollout_contexts(response, config, checkpoint), response.token_ids
    reference = checkpoint.teacher.model
    p = plain_logps(checkpoint.student.student, contexts.student, y).exp().numpy()
    f = plain_logps(reference, contexts.teacher, y).exp().numpy()
    g = np.array([plain_logps(reference, context, y).exp().numpy() for context in contexts.contrasts])
    scores, formula, coef = token_map.scores, CreditFormula.of(config), config.contrastive_coef
    assert scores.formula == formula
    for t, v in enumerate(y):
        expected, entered = by_hand(formula, p[t], f[t], g[:, t], v, coef)
        assert scores.advantage[t].item() == pytest.approx(expected, abs=1e-7)
        assert scores.entered_coef[t].item() == pytest.approx(entered)
        for a, other in enumerate(scores.alternatives.ids[t].tolist()):
            expected, entered = by_hand(formula, p[t], f[t], g[:, t], other, coef)
            assert scores.alternatives.advantage[t, a].item() == pytest.approx(expected, abs=1e-7)
            assert scores.alternatives.entered_coef[t, a].item() == pytest.approx(entered)
    paper = map_response(checkpoint, response, analysis_config(contrastive_count=2, contrastive_coef=min(coef, 1.0)))
    assert not torch.allclose(paper.scores.advantage, scores.advantage), "the values equal those of Eq. 8"


def test_contrasts_that_follow_from_the_prompt_are_those_of_the_run(checkpoint, respond):
    """Checkpoints of several runs score one response, whose contrast prompts are those of the last run."""
    response, decode = respond("Paris is the capital."), checkpoint.tokenizer.decode
    options = {"contrastive_source": "batch", "contrastive_swap": "self"}
    itself = rollout_contexts(response, analysis_config(**options), checkpoint)
    assert itself.contrasts == [itself.teacher]
    none = analysis_config(contrastive_source="none", contrastive_count=1)
    [without] = rollout_contexts(response, none, checkpoint).contrasts
    assert "The answer is Paris." in decode(without)
    assert "capital" not in decode(without)
    given = rollout_contexts(response, analysis_config(contrastive_count=2), checkpoint).contrasts
    assert ["Add 1 and 1." in decode(given[0]), "Add 2 and 2." in decode(given[1])] == [True, True]


def test_formula_round_trips_through_json():
    for support, tail in SUPPORTS:
        formula = CreditFormula(ContrastRule("guide", 0.1), "log_mean", "no question", SupportConfig(support, 7, tail))
        assert CreditFormula.from_json(json.loads(json.dumps(formula.to_json()))) == formula


def test_formula_of_version_0_1_0_is_read():
    rule = {"form": "guide", "gate": 0.1, "plausibility": 0.0}
    support = {"support": "full", "topk": 7, "tail": "bucket"}
    record = {"rule": rule, "baseline": "log_mean", "contrasted": "hint", **support}
    expected = CreditFormula(ContrastRule("guide", 0.1), "log_mean", "hint", SupportConfig("full", 7, "bucket"))
    assert CreditFormula.from_json(record) == expected


# --------------------------------------------------------------------------------------------------------- meanings


@pytest.mark.parametrize(
    ("options", "quantity", "words"),
    [
        ({}, "advantage", "CREDIT's advantage: ΔV_t − λ Ĝ"),
        ({"contrastive_form": "guide"}, "advantage", "ΔV_t + λ S_t"),
        ({"contrastive_gate": 0.05}, "advantage", "where f and Ĝ differ by a total variation above 0.05, else ΔV_t"),
        ({"distillation_tail": "renormalize"}, "advantage", "conditional on the teacher's 20 most likely tokens"),
        ({"contrastive_baseline": "log_mean"}, "generic", "log of the mean probability under contrast prompts"),
        ({"contrastive_source": "none", "contrastive_count": 1}, "generic", "without the question"),
        (
            {"contrastive_source": "batch", "contrastive_swap": "hint"},
            "generic",
            "with the feedback of other problems",
        ),
        ({"contrastive_source": "batch", "contrastive_swap": "self"}, "generic", "in the teacher's own context"),
        ({"contrastive_source": "wrong_feedback"}, "generic", "with the feedback of failed rollouts"),
    ],
)
def test_meanings_describe_the_formula(options, quantity, words):
    formula = CreditFormula.of(analysis_config(**options))
    assert words in formula.meanings()[quantity]
    if options:
        assert words not in PAPER.meanings()[quantity]
