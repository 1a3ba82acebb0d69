"""Backbone of a model, and the dtype of the LM head's product."""

import pytest
import torch

from credit_trl.loss import scores
from credit_trl.loss.head import lm_head
from credit_trl.teacher import causal_lm
from credit_trl.teacher.causal_lm import head_dtype
from credit_trl.teacher.passes import chosen_sequences, policy_states
from credit_trl.training import step
from tables import tables_of

TABLES = tables_of(__file__)

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("row", TABLES["head_dtypes"].values(), ids=TABLES["head_dtypes"])
def test_head_dtype_matches_models_own_head(row):
    device, *dtypes = row
    hidden, weight, autocast, expected = (name and getattr(torch, name) for name in dtypes)
    assert head_dtype(hidden, weight, device, autocast) == expected


def test_4_bit_layers_keep_their_layout():
    quantized, layer = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    quantized.support_avx512bf16_for_cpu = True
    causal_lm.keep_quantized_differentiable(torch.nn.Sequential(quantized, layer))
    assert not quantized.support_avx512bf16_for_cpu
    assert not hasattr(layer, "support_avx512bf16_for_cpu")


@pytest.mark.filterwarnings("ignore:The trained weights are bfloat16")
def test_fp32_head_reproduces_model_logps(make_model, make_trainer):
    model = make_model(dtype=BF16)
    assert not causal_lm.uses_fp32_lm_head(model)
    trainer = make_trainer(model=model, cast_lm_head_to_fp32=True)
    ids = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(1))
    batch = {"prompt_ids": ids[:, :6], "completion_ids": ids[:, 6:]}
    batch |= {name.replace("ids", "mask"): torch.ones_like(part) for name, part in batch.items()}
    with torch.no_grad():
        hidden = policy_states(model, chosen_sequences(batch, batch["completion_mask"].bool()))[0]
        expected = model(input_ids=ids).logits[:, 5:-1]
    assert hidden.dtype == expected.dtype == FP32
    actual = torch.log_softmax(hidden @ lm_head(model, 1.0).weight.to(FP32).T, dim=-1).view_as(expected)
    torch.testing.assert_close(actual, torch.log_softmax(expected, dim=-1), rtol=1e-6, atol=1e-6)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0.0


@pytest.mark.parametrize(
    ("bf16", "casts", "expected"), [(True, False, BF16), (True, True, FP32), (False, False, FP32)]
)
def test_student_and_teacher_use_same_head_dtype(make_trainer, monkeypatch, bf16, casts, expected):
    """Apply the rule of a GPU on a CPU."""
    entered = {"student": set(), "teacher": set()}
    loss, states = step.credit_loss, scores.token_states

    def record_loss(hidden, *args, **kwargs):
        entered["student"].add(hidden.dtype)
        return loss(hidden, *args, **kwargs)

    def record_states(*args, **kwargs):
        for part in states(*args, **kwargs):
            entered["teacher"].add(part[2].dtype)
            yield part

    monkeypatch.setattr(causal_lm, "head_dtype", lambda h, w, device, autocast: head_dtype(h, w, "cuda", autocast))
    monkeypatch.setattr(step, "credit_loss", record_loss)
    monkeypatch.setattr(scores, "token_states", record_states)
    trainer = make_trainer(bf16=bf16, cast_lm_head_to_fp32=casts)
    trainer.train()
    assert entered == {"student": {expected}, "teacher": {expected}}
    assert trainer.state.log_history[0]["grad_norm"] > 0.0
