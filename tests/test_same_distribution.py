"""Each difference of log-probabilities of a sampled token has one temperature, support and vocabulary."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, CreditLogps
from credit_trl.training.check_run import StepMeter
from dense import LENGTHS, logps, scoring_model, step_problem

OPTIONS = {
    "temperature": {"temperature": 0.7},
    "bucket": {"distillation_topk": 5},
    "renormalised": {"distillation_topk": 5, "distillation_tail": "renormalize", "temperature": 1.4},
    "whole vocabulary": {"distillation_topk": None},
    "sampled": {"distillation_support": "sampled", "temperature": 0.7},
}


def distributions(problem, teacher, sample):
    """Log-probabilities (t, V) of policy, teacher and contrasts for one sample: the plainest passes."""
    temperature = problem.step.config.temperature
    completion = problem.batch.completion_ids[sample]
    contexts = problem.contexts[sample]
    prompt = problem.tensors["prompt_ids"][sample][problem.tensors["prompt_mask"][sample].bool()].tolist()
    with torch.no_grad():
        policy = logps(problem.policy, prompt, completion, temperature)
        with problem.step.teacher.active():
            scores = [logps(teacher, ids, completion, temperature) for ids in (contexts.teacher, *contexts.contrasts)]
    return CreditLogps(policy, scores[0], torch.stack(scores[1:]))


def conditional(config, scores: CreditLogps, values, tokens):
    """Log-probabilities of the tokens, given the teacher's K most likely and the token if it is renormalised."""
    at_token = values.gather(-1, tokens)
    if config.distillation_tail == "bucket":
        return at_token.squeeze(-1)
    support = scores.teacher.topk(config.distillation_topk, dim=-1).indices
    is_chosen = torch.zeros_like(values, dtype=torch.bool).scatter(-1, torch.cat([support, tokens], dim=-1), True)
    return (at_token - values.masked_fill(~is_chosen, -torch.inf).logsumexp(-1, keepdim=True)).squeeze(-1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_differences_are_those_of_one_distribution(tokenizer, make_config, options):
    """R_t and ΔV of the loss, of the check and of token maps, and ΔV of a token weight."""
    credits = []
    config = make_config(num_generations=2, contrastive_coef=0.3, contrastive_count=2, **options)
    weighs = config.distillation_tail == "bucket"
    token_weight = (lambda credit: credits.append(credit) or {}) if weighs else None
    problem = step_problem(tokenizer, config, token_weight=token_weight)
    meter = StepMeter(SimpleNamespace(args=config, credit_step=problem.step))
    teacher = scoring_model(problem)
    for sample, length in enumerate(LENGTHS):
        if problem.contexts[sample].teacher is None:
            continue
        scores = distributions(problem, teacher, sample)
        tokens = torch.tensor(problem.batch.completion_ids[sample])[:, None]
        f = conditional(config, scores, scores.teacher, tokens)
        policy = conditional(config, scores, scores.student, tokens)
        generic = sum(conditional(config, scores, contrast, tokens) for contrast in scores.contrasts) / 2
        advantages = f - 0.3 * generic - policy
        terms = problem.step.loss(problem.policy, problem.rows([sample])).terms
        mapped = CreditFormula.from_config(config).advantages(scores, tokens).squeeze(-1)
        checked = meter._advantages(problem.rows([sample]))[:length]
        for computed in (terms.advantages, mapped, checked):
            assert_close(computed, advantages, rtol=1e-9, atol=1e-10)
        assert_close(terms.teacher_token_logps - terms.token_logps, f - policy, rtol=1e-9, atol=1e-10)
        if weighs:
            assert_close(credits[0].delta_v[sample][:length], f - policy, rtol=1e-9, atol=1e-10)
