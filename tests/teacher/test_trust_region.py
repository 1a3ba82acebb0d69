"""A teacher that does not forget: the trust region between base and average, and rehearsal under (x, z)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from credit_trl import CreditTrainer, objective
from credit_trl.loss.head import LMHead
from credit_trl.loss.rehearsal import is_rehearsal
from credit_trl.loss.trust_region import TrustRegion, joint_head, weighted_states
from credit_trl.loss.uses import choose_support
from test_trainer_parity import logps, loss_and_gradients, perturb, prepared, samples
from tiny import length_verdicts

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture
def make_trainer(make_model, make_config, tokenizer, dataset):
    def make(lora=False, dtype=torch.float64, **options):
        return CreditTrainer(
            make_model(dtype=dtype),
            length_verdicts,
            make_config(**options),
            dataset,
            processing_class=tokenizer,
            peft_config=LORA if lora else None,
        )

    return make


def move_average(trainer, scale=0.05):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for average, _ in trainer.teacher.pairs():
            average += scale * torch.randn(average.shape, generator=generator, dtype=torch.float64).to(average.dtype)


@given(seed=st.integers(0, 2**16), weight=st.floats(0.01, 1.0))
@settings(max_examples=30, deadline=None)
def test_the_mixture_is_the_normalised_product_of_powers(seed, weight):
    generator = torch.Generator().manual_seed(seed)
    base, average = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    product = base.exp() ** (1 - weight) * average.exp() ** weight
    ours = objective.trust_region(base, average, weight).exp()
    torch.testing.assert_close(ours, product / product.sum(-1, keepdim=True))


@given(seed=st.integers(0, 2**16), weight=st.floats(0.1, 1.0), bound=st.floats(1e-3, 1.0))
@settings(max_examples=30, deadline=None)
def test_the_bound_holds_and_is_used_up(seed, weight, bound):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    heads = [LMHead(torch.randn(9, 6, generator=generator, dtype=torch.float64), temperature=0.7) for _ in range(2)]
    head = joint_head(heads)
    free = weighted_states(hidden, head, TrustRegion(weight))
    bounded = weighted_states(hidden, head, TrustRegion(weight, bound))
    base = (hidden[:, :6] @ heads[0].weight.T / 0.7).log_softmax(-1)

    def kl(states):
        mixed = (states @ head.weight.T / 0.7).log_softmax(-1)
        return (mixed.exp() * (mixed - base)).sum(-1)

    assert (kl(bounded) <= bound + 1e-9).all()
    is_cut = kl(free) > bound
    torch.testing.assert_close(bounded[~is_cut], free[~is_cut])
    # The weight is found to 2**-12 of its range; a small bound is reached at a small weight.
    assert (kl(bounded)[is_cut] > 0.9 * bound).all()


@pytest.mark.parametrize(
    ("lora", "support"),
    [
        (False, "teacher_topk"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((False, "full"), (False, "student_topk"), (True, "teacher_topk"), (True, "full"))
        ),
    ],
)
def test_scores_are_those_of_the_mixture_of_both_models(make_trainer, lora, support):
    trainer = make_trainer(
        lora, teacher_model_kind="trust_region", teacher_trust_weight=0.3, distillation_support=support
    )
    move_average(trainer)
    kept, build = [], trainer._build_contexts
    trainer._build_contexts = lambda batch: kept.extend(build(batch)) or kept
    inputs = prepared(trainer)
    terms = []
    loss = trainer.distillation.__call__
    model = trainer.accelerator.unwrap_model(trainer.model)
    mask = inputs["completion_mask"].bool()
    result = loss(trainer.model, inputs, mask, mask.double(), 0.1)
    for own, (_, completion) in zip(kept, samples(inputs), strict=True):
        parts = []
        with torch.no_grad():
            for part in trainer.teacher.parts(model):
                parts.append(logps(part, own.teacher, completion))
        mixed = objective.trust_region(*parts, 0.3)
        terms.append(mixed.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1))
        assert (parts[0] - parts[1]).abs().max() > 0.01
    torch.testing.assert_close(result.terms.teacher_token_logps, torch.cat(terms), rtol=1e-6, atol=1e-6)


def test_weight_one_is_the_average(make_trainer):
    losses = []
    for options in ({"teacher_model_kind": "trust_region", "teacher_trust_weight": 1.0}, {}):
        trainer = make_trainer(**options)
        move_average(trainer)
        losses.append(loss_and_gradients(trainer, prepared(trainer))[0])
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)


def test_bounding_the_kl_copies_no_head():
    """The weight of an 8 B model would take 5 GB in fp32."""
    hidden, weight = torch.randn(2048, 16).bfloat16(), torch.randn(5000, 16).bfloat16()
    largest = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and func is torch.ops.aten._to_copy.default:
                largest.append(out.numel())
            return out

    with Recorder():
        weighted_states(hidden, LMHead(weight), TrustRegion(0.5, kl=0.1))
    assert max(largest) < weight.numel() // 2


def test_only_the_average_moves(make_trainer):
    trainer = make_trainer(teacher_model_kind="trust_region", teacher_update_rate=0.5, dtype=torch.float32)
    before = [p.clone() for p in trainer.teacher.base.model.parameters()]
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.teacher.base.model.parameters(), strict=True))
    assert trainer.state.log_history[0]["credit/teacher_drift"] > 0


def test_a_head_with_a_bias_is_refused():
    heads = [LMHead(torch.ones(3, 2), bias=torch.zeros(3))] * 2
    with pytest.raises(ValueError, match="has a bias or a soft cap"):
        joint_head(heads)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.5])
def test_a_share_of_the_batches_rehearses_evenly(share):
    chosen = [i for i in range(200) if is_rehearsal(i, share)]
    assert len(chosen) == pytest.approx(200 * share, abs=1)
    gaps = {b - a for a, b in itertools.pairwise(chosen)}
    assert max(gaps) - min(gaps) <= 1
    assert not any(is_rehearsal(i, 0.0) for i in range(50))


def test_rehearsal_keeps_a_support_of_the_whole_vocabulary_stored(make_trainer, tokenizer):
    """The base's scores could not be read again in the update, whose teacher is another."""
    trainer = make_trainer(teacher_rehearsal=0.5, distillation_topk=len(tokenizer))
    assert choose_support(trainer.args, len(tokenizer)).kind == "teacher_topk"
    assert choose_support(make_trainer(distillation_topk=len(tokenizer)).args, len(tokenizer)).kind == "full"


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("ema", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("live", True), ("trust_region", False))),
    ],
)
def test_rehearsal_is_the_divergence_from_the_base_under_z(make_trainer, kind, lora):
    trainer = make_trainer(lora, teacher_model_kind=kind, teacher_rehearsal=0.5, distillation_topk=20)
    trainer._step = 1
    base = []
    kept, build = [], trainer._build_contexts
    trainer._build_contexts = lambda batch: kept.extend(build(batch)) or kept
    perturb(trainer.model, scale=0.01)
    inputs = prepared(trainer)
    ours = loss_and_gradients(trainer, inputs)
    losses = []
    with trainer.base_teacher.active() as model:
        for own, (_, completion) in zip(kept, samples(inputs), strict=True):
            with torch.no_grad():
                base.append(logps(model, own.teacher, completion))
    trainer.model.zero_grad()
    for f, own, (prompt, completion) in zip(base, kept, samples(inputs), strict=True):
        assert prompt == own.teacher
        log_p, support = logps(trainer.model, prompt, completion), f.topk(20).indices
        inside = [objective.add_tail_bucket(x.gather(-1, support)) for x in (log_p, f)]
        losses.append((inside[0].exp() * (inside[0] - inside[1])).sum(-1))
    expected = torch.cat(losses).mean()
    expected.backward()
    torch.testing.assert_close(ours[0], expected.detach(), rtol=1e-5, atol=1e-7)
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None and name in ours[1]:
            torch.testing.assert_close(ours[1][name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_rehearsal_is_not_logged_as_credit_of_the_teacher(make_trainer):
    """Its teacher is the initial policy, whose fidelity says nothing of the average's."""
    trainer = make_trainer(teacher_rehearsal=0.5, max_steps=4, logging_steps=1)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [is_rehearsal(i, 0.5) for i in range(4)] == ["credit/delta_v_mean" not in entry for entry in logs]
    plain = [entry for entry in logs if "credit/delta_v_mean" in entry]
    assert all("credit/teacher_fidelity" not in entry for entry in logs if entry not in plain)
    assert any("credit/teacher_fidelity" in entry for entry in plain)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_with_both_equals_the_uninterrupted_one(make_trainer, tmp_path, lora):
    options = {
        "teacher_model_kind": "trust_region",
        "teacher_trust_kl": 0.05,
        "teacher_rehearsal": 0.5,
        "teacher_update_rate": 0.3,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 4,
        "dtype": torch.float32,
    }
    whole = make_trainer(lora, **options)
    whole.train()
    resumed = make_trainer(lora, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    for (a, _), (b, _) in zip(whole.teacher.pairs(), resumed.teacher.pairs(), strict=True):
        assert torch.equal(a, b)
