"""NaN and infinities never reach weights, teacher or checkpoints; updates that the dtype rounds away are an alarm."""

import math
import warnings
from functools import partial

import pytest
import torch
from transformers import TrainerCallback

from credit_trl.training.metrics import CreditWarning
from credit_trl.training.weights import NonFiniteError, guarded, nonfinite_weight
from tiny import length_verdicts


@pytest.fixture
def make_trainer(make_trainer):
    return partial(make_trainer, save_strategy="steps", save_steps=1, max_steps=4)


class At(TrainerCallback):
    """Calls a function at the begin of the step after `step` steps."""

    def __init__(self, step, function):
        self.step = step
        self.function = function

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.function()


def spoil(tensor, value=math.nan):
    with torch.no_grad():
        tensor.view(-1)[0] = value


def gradient(trainer, value):
    parameter = next(trainer.model.parameters())
    handle = parameter.register_hook(lambda grad: handle.remove() or grad.index_fill(0, torch.tensor([0]), value))


def loss(trainer, value):
    compute = trainer._distillation_loss

    def once(model, inputs):
        trainer._distillation_loss = compute
        return compute(model, inputs).detach() * 0 + value + sum(p.sum() * 0 for p in trainer.model.parameters())

    trainer._distillation_loss = once


# Fault -> what happens after two steps, and the source that the error names.
FAULTS = {
    "NaN in a gradient": (lambda t: gradient(t, math.nan), "the gradient of the update"),
    "infinite gradient": (lambda t: gradient(t, math.inf), "the gradient of the update"),
    "NaN loss with a finite gradient": (lambda t: loss(t, math.nan), "the loss of the update"),
    "infinite loss": (lambda t: loss(t, math.inf), "the loss of the update"),
    "NaN in the teacher": (
        lambda t: spoil(t.teacher.named_weights()["model.embed_tokens.weight"]),
        "the teacher's weight `model.embed_tokens.weight`",
    ),
}


CASES = [
    *((fault, {}) for fault in FAULTS),
    ("NaN in a gradient", {"distillation_weight": 0.0, "packed": True}),
    ("NaN loss with a finite gradient", {"distillation_weight": 0.5, "packed": True}),
]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[torch.Tensor]]:
    """Weights after three steps without a fault, by the options of the run, once they are known."""
    return {}


@pytest.mark.parametrize(("fault", "options"), CASES)
def test_nonfinite_step_ends_the_run_before_the_optimizer(make_trainer, tmp_path, undisturbed, fault, options):
    happen, source = FAULTS[fault]
    make_trainer = partial(make_trainer, max_steps=3, **options)
    trainer = make_trainer()
    trainer.add_callback(At(2, lambda: happen(trainer)))
    with pytest.raises(NonFiniteError) as ended:
        trainer.train()
    assert str(ended.value).startswith("Step 3 is not finite")
    assert source in str(ended.value)
    assert f"The last checkpoint is {tmp_path / 'run' / 'checkpoint-2'}." in str(ended.value)
    assert nonfinite_weight(trainer.model, {}) is None
    resumed = make_trainer()
    resumed.train("latest")
    if str(options) not in undisturbed:
        uninterrupted = make_trainer(output_dir=str(tmp_path / "whole"), save_strategy="no")
        uninterrupted.train()
        undisturbed[str(options)] = list(uninterrupted.model.parameters())
    assert all(map(torch.equal, resumed.model.parameters(), undisturbed[str(options)]))


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"distillation_weight": 0.5, "packed": True}], ids=str)
@pytest.mark.parametrize("value", [-math.inf, math.nan], ids=["probability 0", "NaN"])
def test_nonfinite_loss_of_one_sample_names_it(make_trainer, dataset, value, options):
    rows = dataset.map(
        lambda row, i: {"prompt": [{"role": "user", "content": f"{'Long. ' * 30} Row {i}?"}]}, with_indices=True
    )
    trainer = make_trainer(rows=rows, save_strategy="no", max_reprompt_len=1024, **options)
    prepare = trainer.credit_step.prepare
    expected = []

    def forbid(batch, tensors, contexts):
        """The teacher gives the likeliest token of one sample probability 0, which the policy does not."""
        prepared = prepare(batch, tensors, contexts)
        prepared["teacher_logps"][5, 0, 0] = value
        prepared["teacher_token_logps"][5, 0] = value
        expected.append(batch.prompts[5][-1]["content"].rpartition(" ")[2])
        return prepared

    trainer.credit_step.prepare = forbid
    with pytest.raises(NonFiniteError, match="Step 1 is not finite") as ended:
        trainer.train()
    excerpt = str(ended.value).partition("of a sample whose prompt ends in ")[2]
    assert expected[0] in excerpt
    assert excerpt.count("Row") == 1
    assert len(excerpt) < 200


@pytest.mark.parametrize("fault", ["NaN in a gradient", "NaN loss with a finite gradient"])
def test_skipped_step_changes_no_weight_and_is_counted(make_trainer, fault):
    trainer = make_trainer(on_nonfinite="skip", learning_rate=1e-2, save_strategy="no")
    initial = {}
    trainer.add_callback(At(2, lambda: FAULTS[fault][0](trainer)))
    trainer.add_callback(At(2, lambda: initial.update({n: p.clone() for n, p in trainer.model.named_parameters()})))

    class Compare(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                assert all(torch.equal(p, initial[n]) for n, p in trainer.model.named_parameters())

    trainer.add_callback(Compare())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["credit/frac_skipped_updates"] for entry in logs] == [0.0, 0.0, 1.0, 0.0]
    assert nonfinite_weight(trainer.model, {}) is None
    assert any(not torch.equal(p, initial[n]) for n, p in trainer.model.named_parameters())


def test_a_loss_scale_is_no_reason_for_a_loss_that_is_not_finite(make_trainer):
    trainer = make_trainer(save_strategy="no")
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.add_callback(At(2, lambda: loss(trainer, math.nan)))
    with pytest.raises(NonFiniteError, match="from the loss of the update"):
        trainer.train()


def test_weights_in_fp8_are_read():
    assert nonfinite_weight(torch.nn.Module(), {"w": torch.ones(2).to(torch.float8_e4m3fn)}) is None


@pytest.mark.parametrize("whose", ["policy", "teacher"])
def test_nonfinite_weights_are_never_written(make_trainer, tmp_path, whose):
    trainer = make_trainer()

    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                weights = trainer.teacher.named_weights() if whose == "teacher" else dict(model.named_parameters())
                spoil(weights["model.norm.weight"], math.inf)

    model = trainer.model
    trainer.add_callback(Spoil())
    with pytest.raises(NonFiniteError, match=f"The {whose}'s weight `model.norm.weight` is not finite, so nothing"):
        trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
    if whose == "policy":
        with pytest.raises(NonFiniteError, match="so nothing is saved"):
            trainer.save_model(str(tmp_path / "final"))
        assert not (tmp_path / "final").exists()


def test_finite_loss_and_its_gradient_are_unchanged_bit_for_bit():
    x = torch.randn(5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    value = x.exp().sum()
    (expected,) = torch.autograd.grad(value, x, retain_graph=True)
    mask = torch.tensor([1, 1, 1, 1, 0])
    padded = {"teacher_token_logps": torch.where(mask.bool(), x, torch.nan), "completion_mask": mask}
    guarded_loss, _ = guarded(value, padded | {"generic_token_logps": None})
    (gradient,) = torch.autograd.grad(guarded_loss, x)
    assert torch.equal(guarded_loss, value)
    assert torch.equal(gradient, expected)
    assert guarded(x.sum() / 0, {})[0].isnan()
    assert guarded(x.sum(), {"teacher_token_logps": x / 0 * 0, "completion_mask": mask})[0].isnan()


@pytest.fixture
def warned(make_model, make_trainer):
    def run(dtype, rewards=length_verdicts, **options):
        model = make_model().to(dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer(rewards, model=model, learning_rate=1e-6, save_strategy="no", **options)
            count = len(caught)
            trainer.train()
        messages = [str(w.message) if w.category is CreditWarning else "" for w in caught]
        return messages[:count], messages[count:]

    return run


def test_bf16_weights_at_the_papers_rate_are_named_and_counted_once(warned):
    constructed, trained = warned(torch.bfloat16, max_steps=3)
    [message] = [text for text in constructed if "trained weights are bfloat16" in text]
    assert "keep `bf16=True`" in message
    [message] = [text for text in trained if "first update changed" in text]
    assert float(message.split("changed ")[1].split("%")[0]) < 10


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 1},
        {"max_steps": 2, "warmup_steps": 2, "lr_scheduler_type": "constant_with_warmup"},  # first update of rate 0
        {"max_steps": 2, "rewards": lambda completions, **_: [0.0] * len(completions)},  # no gradient
    ],
    ids=["paper", "warm-up", "no loss"],
)
def test_fp32_weights_move(warned, options):
    messages = [text for texts in warned(torch.float32, **options) for text in texts]
    assert not [text for text in messages if "update changed" in text or "trained weights" in text]
