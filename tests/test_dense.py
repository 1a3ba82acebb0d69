"""`CreditStep` against a naive dense implementation of Algorithm 1 in fp64, and a loop of one's own with it."""

import pytest
import torch
from torch.testing import assert_close

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.rollout.batch import GenerationBatch
from credit_trl.teacher.models import make_teacher
from credit_trl.teacher.passes import policy_states
from credit_trl.training.step import CreditStep, choose_packing
from dense import LENGTHS, gradients, logps, naive_loss, naive_token_losses, padded, scoring_model, step_problem

TOPK = {"bucket": (5, "bucket"), "renormalize": (5, "renormalize"), "K = V": (None, "bucket")}
# α, C, support and other options.
CASES = [
    *((alpha, count, support, {}) for alpha in (0.0, 0.5, 1.0) for count in (1, 2, 4) for support in TOPK),
    *((1.0, 2, support, {"teacher_model_kind": kind}) for kind in ("ema", "live") for support in TOPK),
    *((0.5, 2, support, {"temperature": 0.7}) for support in TOPK),
    *((1.0, 1, support, {"contrastive_form": "guide", "contrastive_coef": 1.5}) for support in TOPK),
    *((alpha, 1, "K = V", {"distillation_tail": "renormalize"}) for alpha in (0.0, 1.0)),
    *((1.0, 1, support, {"contrastive_coef": 0.0}) for support in TOPK),
    (1.0, 2, "bucket", {"distillation_support": "sampled"}),
    (1.0, 2, "renormalize", {"teacher_prompt": "student"}),
]
ROWS, TOKENS = len(LENGTHS), sum(LENGTHS)
# Share of a token in the loss, by the length of its completion and the steps of a generation batch on 3 processes.
SHARES = {
    "grpo": lambda length, _: 1 / length / ROWS,
    "sapo": lambda length, _: 1 / length / ROWS,
    "bnpo": lambda *_: 1 / TOKENS,
    "dr_grpo": lambda *_: 1 / 20 / ROWS,
    "luspo": lambda *_: 1 / ROWS,
    **dict.fromkeys(("dapo", "cispo", "vespo"), lambda _, steps: 3 * steps / TOKENS),
}


@pytest.fixture
def make_problem(tokenizer, make_config):
    def make(alpha=1.0, count=2, support="bucket", lora=False, token_weight=None, **options):
        topk, tail = TOPK[support]
        defaults = {"distillation_alpha": alpha, "distillation_topk": topk, "distillation_tail": tail}
        defaults |= {"contrastive_count": count, "contrastive_coef": 0.3, "loss_type": "grpo", "num_generations": 2}
        return step_problem(tokenizer, make_config(**defaults | options), lora, token_weight=token_weight)

    return make


def same(ours, theirs, model, tolerance=1e-12):
    """Losses and gradients of all trained parameters agree."""
    assert_close(ours.detach(), theirs.detach(), rtol=tolerance, atol=tolerance)
    actual, expected = gradients(ours, model), gradients(theirs, model)
    assert actual.keys() == expected.keys()
    assert any(gradient.abs().max() > 1e-4 for gradient in expected.values())
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_algorithm_1(problem, tolerance=1e-12):
    ours = problem.step.loss(problem.policy, problem.tensors).terms.loss
    same(ours, naive_loss(problem, scoring_model(problem)), problem.policy, tolerance)


@pytest.mark.parametrize(("alpha", "count", "support", "options"), CASES)
def test_loss_and_gradients_are_those_of_algorithm_1(make_problem, alpha, count, support, options):
    problem = make_problem(alpha, count, support, **options)
    assert {len(sample_contexts.contrasts) for sample_contexts in problem.contexts if sample_contexts.teacher} == {
        0 if options.get("contrastive_coef") == 0.0 else count
    }
    assert_algorithm_1(problem)


@pytest.mark.parametrize("support", TOPK)
def test_packed_passes_equal_algorithm_1(make_problem, support):
    """To the rounding of the model's norms, which compute in fp32 and see sums in another order."""
    problem = make_problem(support=support, packed=True)
    assert not problem.step.serves_grpo
    assert choose_packing(None, problem.step.teacher, may_have_images=True) == (False, False)
    assert_algorithm_1(problem, tolerance=1e-6)


@pytest.mark.parametrize("support", TOPK)
@pytest.mark.parametrize("kind", ["ema", "live"])
def test_lora_equals_algorithm_1(make_problem, support, kind):
    problem = make_problem(support=support, lora=True, teacher_model_kind=kind)
    assert_algorithm_1(problem)


def weighted(at_tokens, entropies):
    """A loss of log-probabilities and entropies (B, T) that differs from token to token."""
    weights = torch.linspace(-1, 1, at_tokens.numel(), dtype=at_tokens.dtype).view_as(at_tokens)
    return (weights * at_tokens + weights.square() * entropies).mean()


def dense_weighted(problem):
    """`weighted` of plain passes over each sample."""
    tensors = problem.tensors
    rows = []
    for i, completion in enumerate(problem.batch.completion_ids):
        prompt = tensors["prompt_ids"][i][tensors["prompt_mask"][i].bool()].tolist()
        logp = logps(problem.policy, prompt, completion, problem.step.config.temperature)
        values = torch.stack([logp[range(len(completion)), completion], -(logp.exp() * logp).sum(-1)])
        rows.append(torch.nn.functional.pad(values, (0, tensors["completion_ids"].shape[1] - len(completion))))
    return weighted(*torch.stack(rows, dim=1))


@pytest.mark.parametrize("packed", [False, True])
def test_log_probabilities_and_entropies_are_dense_ones(make_problem, packed):
    problem = make_problem(packed=packed, temperature=0.7)
    tokens = problem.step.policy_tokens(problem.policy, problem.tensors)
    assert tokens.logps.shape == problem.tensors["completion_ids"].shape
    same(weighted(tokens.logps, tokens.entropies), dense_weighted(problem), problem.policy, 1e-6 if packed else 1e-12)


@pytest.mark.parametrize("options", [{}, {"distillation_support": "sampled"}])
@pytest.mark.parametrize("support", TOPK)
def test_one_pass_has_the_gradients_of_both_losses(make_problem, support, options):
    problem = make_problem(support=support, distillation_weight=0.5, temperature=0.7, **options)
    problem.step.serves_grpo = True  # also of padded rows, which have less rounding
    assert not problem.tensors["teacher_mask"].all()
    result = problem.step.loss(problem.policy, problem.tensors)
    ours = 0.3 * result.terms.loss + 0.7 * weighted(result.policy.logps, result.policy.entropies)
    theirs = 0.3 * naive_loss(problem, scoring_model(problem)) + 0.7 * dense_weighted(problem)
    same(ours, theirs, problem.policy, 1e-7)  # the model's norms are in fp32, and two passes round twice
    assert len(result.terms.token_loss) == problem.tensors["teacher_mask"].float() @ torch.tensor(LENGTHS).float()


@pytest.mark.parametrize("ratios", [1, 7], ids=["of samples", "of tokens"])
@pytest.mark.parametrize("loss_type", SHARES)
def test_tokens_have_the_shares_of_grpos_reduction(make_problem, loss_type, ratios):
    problem = make_problem(loss_type=loss_type, max_completion_length=20, steps_per_generation=2)
    problem.step.processes = 3
    ratio = torch.rand(ROWS, ratios, dtype=torch.float64)
    inputs = problem.tensors | {"importance_sampling_ratio": ratio}
    for is_training, steps in ((True, 2), (False, 1)):
        shares = problem.step.loss_shares(problem.policy.train(is_training), inputs, accumulation=5.0)
        expected = torch.zeros_like(shares)
        for row, length in enumerate(LENGTHS):
            expected[row, :length] = ratio[row, :length] * SHARES[loss_type](length, steps) / 5.0
        assert_close(shares, expected, rtol=1e-6, atol=0)
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    assert problem.step.loss_shares(problem.policy, inputs, 1.0).sum() == 0.0


@pytest.mark.parametrize("support", TOPK)
def test_two_updates_of_a_batch_use_its_scores_and_ratios(make_problem, support):
    problem = make_problem(support=support, distillation_is_clip=1.05)
    step, policy, teacher = problem.step, problem.policy, scoring_model(problem)
    problem.tensors["old_per_token_logps"] = step.policy_logps(policy, problem.tensors)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    for _ in range(2):
        ratios, losses = [], []
        for i, length in enumerate(LENGTHS):
            old = problem.tensors["old_per_token_logps"][i, :length]
            new = step.policy_logps(policy, problem.tensors)[i, :length]
            ratios.append((new - old).exp().clamp(max=1.05))
            losses.append((naive_token_losses(problem, teacher, i) * ratios[-1]).mean())
        ours = step.loss(policy, problem.tensors).terms.loss
        actual = gradients(ours, policy)
        expected = gradients(torch.stack(losses).mean(), policy)
        for name, gradient in expected.items():
            assert_close(actual[name], gradient, rtol=1e-11, atol=1e-12)
        optimizer.zero_grad()
        for name, parameter in policy.named_parameters():
            parameter.grad = expected.get(name)
        optimizer.step()
    assert torch.cat(ratios).max() == 1.05
    assert torch.cat(ratios).min() < 1.0


def test_the_average_of_the_teacher_enters_the_next_scores(make_problem):
    problem = make_problem()
    initial = {name: weight.clone() for name, weight in problem.step.teacher.named_weights().items()}
    problem.step.teacher.update(0.25)
    for name, weight in problem.step.teacher.named_weights().items():
        student = dict(problem.policy.named_parameters())[name]
        assert_close(weight, 0.75 * initial[name] + 0.25 * student, rtol=1e-12, atol=1e-14)
    problem.tensors |= problem.step.prepare(problem.batch, problem.tensors)
    assert_algorithm_1(problem)


def test_draws_depend_on_the_index_of_the_batch_alone(make_problem):
    problem, later_problem = make_problem(), make_problem()
    later_problem.step.prepare(later_problem.batch, later_problem.tensors)  # a call more
    contrasts = [
        [sample_contexts.contrasts for sample_contexts in p.step.build_contexts(p.batch)]
        for p in (problem, later_problem)
    ]
    assert contrasts[0] == contrasts[1]


def test_token_weights_multiply_the_losses_of_tokens(make_problem):
    problem = make_problem(token_weight=lambda credit: {"distillation": (-credit.entropy).exp()})
    losses = []
    for i, length in enumerate(LENGTHS):
        weights = problem.tensors["token_weight"][i, :length]
        losses.append((naive_token_losses(problem, scoring_model(problem), i) * weights).mean())
    ours = problem.step.loss(problem.policy, problem.tensors).terms.loss
    same(ours, torch.stack(losses).mean(), problem.policy)
    assert problem.tensors["token_weight"].std() > 0.01
    assert (problem.tensors["token_weight"][:, -1] == 1.0).all()  # padding


@pytest.mark.parametrize("size", [2, len(LENGTHS)])
def test_the_credit_of_a_token_weight_is_that_of_plain_passes(make_problem, monkeypatch, size):
    seen = []
    rows = []

    def counting(model, sequences, **options):
        rows.append(len(sequences.ids))
        return policy_states(model, sequences, **options)

    monkeypatch.setattr("credit_trl.training.step.policy_states", counting)
    options = {"per_device_train_batch_size": size, "generation_batch_size": len(LENGTHS)}
    problem = make_problem(token_weight=lambda credit: seen.append(credit) or {}, **options)
    (credit,) = seen
    assert rows == [size] * (len(LENGTHS) // size)
    step, teacher = problem.step, scoring_model(problem)
    old = step.policy_logps(problem.policy, problem.tensors)
    mask = problem.tensors["completion_mask"].bool() & problem.tensors["teacher_mask"][:, None]
    assert torch.equal(credit.mask, mask)
    with torch.no_grad():
        for i, sample_contexts in enumerate(problem.contexts):
            if sample_contexts.teacher is None:
                continue
            completion = problem.batch.completion_ids[i]
            at = torch.arange(len(completion)), torch.tensor(completion)
            f = teacher(input_ids=torch.tensor([sample_contexts.teacher + completion])).logits[
                0, len(sample_contexts.teacher) - 1 : -1
            ]
            f = f.log_softmax(-1)
            assert_close(credit.delta_v[i][mask[i]], f[at] - old[i, : len(completion)], rtol=1e-11, atol=1e-12)
            assert_close(credit.entropy[i][mask[i]], -(f.exp() * f).sum(-1), rtol=1e-11, atol=1e-12)
    assert credit.rewards.tolist() == problem.batch.rewards


def test_token_weights_of_conditional_scores_are_refused(make_problem):
    with pytest.raises(ValueError, match="distillation_tail"):
        make_problem(support="renormalize", token_weight=lambda credit: {})


def test_a_loop_of_ones_own(make_model, make_config, tokenizer):
    """The whole method without a trainer: rollouts by `generate`, verdicts by a line, one AdamW step a batch."""
    config = make_config(num_generations=2)
    policy = make_model()
    step = CreditStep(config, ContextBuilder(tokenizer, config), make_teacher("ema", policy))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    prompts = [[{"role": "user", "content": f"{i // 2}+1="}] for i in range(4)]
    encoded = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
    start = [parameter.clone() for parameter in policy.parameters()]
    for index in range(2):
        inputs = padded(encoded, "prompt", pads_left=True)
        sampled = policy.generate(
            inputs["prompt_ids"], attention_mask=inputs["prompt_mask"], do_sample=True, max_new_tokens=5
        )
        completions = [row.tolist() for row in sampled[:, inputs["prompt_ids"].shape[1] :]]
        verdicts = [(float(ids[0] % 2), f"The answer is {i // 2 + 1}.") for i, ids in enumerate(completions)]
        rewards, feedback = map(list, zip(*verdicts, strict=True))
        rows = [{"prompt": p} for p in prompts]
        batch = GenerationBatch(rows, prompts, completions, rewards, feedback, first=0, group_size=2, index=index)
        tensors = inputs | padded(completions, "completion")
        tensors |= step.prepare(batch, tensors)
        step.loss(policy.train(), tensors).terms.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.teacher.update(config.teacher_update_rate)
    assert any(not torch.equal(p, q) for p, q in zip(policy.parameters(), start, strict=True))
