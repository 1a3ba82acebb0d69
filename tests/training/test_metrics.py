"""Logged metrics and one-time warnings."""

import math
import warnings
from pathlib import Path

import pytest
import torch

from credit_trl import CreditConfig, Verdict
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts
from credit_trl.loss.credit_loss import CreditLoss, MicroBatchLoss
from credit_trl.training.metrics import (
    Alarms,
    CreditWarning,
    TokenMetrics,
    context_metrics,
    micro_batch_fidelity,
)
from tables import tables_of
from tiny import length_verdicts

TABLES = tables_of(__file__)

ZERO = torch.tensor(0.0)


def terms(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return CreditLoss(torch.zeros(()), *(torch.randn(n, generator=generator) for _ in CreditLoss._fields[1:]))


def micro_batch(terms, contrasted, fidelity=ZERO, engine=None):
    return MicroBatchLoss(terms, contrasted, fidelity, ~contrasted, None, len(contrasted), len(contrasted), engine)


def token_metrics(*losses, is_sampled=False, reduce=lambda local: local):
    """Metrics of all micro-batches of a log."""
    config = CreditConfig("run", distillation_support="sampled" if is_sampled else "teacher_topk")
    metrics = TokenMetrics(config, reduce)
    for loss in losses:
        metrics.add("train", loss)
    assert metrics.read("eval") == {}
    values = metrics.read("train")
    assert metrics.read("train") == {}
    return values


def test_token_metrics_are_moments_at_the_sampled_tokens():
    token_terms, contrasted = terms(50), torch.tensor([True, False]).repeat(25)
    metrics = token_metrics(micro_batch(token_terms, contrasted))
    f, g, p = token_terms.teacher_token_logps, token_terms.generic_token_logps, token_terms.token_logps
    specific = (f - g)[::2]
    expected = {
        "credit/advantage_mean": token_terms.advantages.mean(),
        "credit/advantage_std": token_terms.advantages.std(correction=0),
        "credit/kl_to_teacher": token_terms.kl_to_teacher[::2].mean(),
        "credit/s_mean": specific.mean(),
        "credit/s_std": specific.std(correction=0),
        "credit/generic_mean": g[::2].mean(),
        "credit/delta_v_mean": (f - p).mean(),
        "credit/delta_v_std": (f - p).std(correction=0),
        "credit/s_accepted": specific[f[::2] > math.log(0.5)].square().mean().sqrt(),
        "credit/kl_to_target": token_terms.kl_to_target.mean(),
        "credit/support_mass_student": token_terms.student_mass.mean(),
        "credit/support_mass_teacher": token_terms.teacher_mass.mean(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name


def test_function_of_the_user_is_averaged_over_tokens():
    parts = [terms(3, 1), terms(5, 2)]
    metrics = TokenMetrics(CreditConfig("run"), lambda local: local)
    metrics.functions["positive"] = lambda loss: (loss.terms.advantages > 0.0).float()
    for part in parts:
        metrics.add("train", micro_batch(part, torch.ones(len(part.advantages), dtype=torch.bool)))
    advantages = torch.cat([part.advantages for part in parts])
    assert metrics.read("train")["positive"] == pytest.approx((advantages > 0.0).float().mean().item())


def test_sums_over_processes_give_global_metrics():
    parts, masks = [terms(7, 1), terms(12, 2)], [torch.ones(7, dtype=torch.bool), torch.ones(12, dtype=torch.bool)]
    engines, gathered = [torch.randn(7), torch.randn(12)], []
    losses = [micro_batch(*of, torch.tensor(0.25), engine) for *of, engine in zip(parts, masks, engines, strict=True)]
    token_metrics(losses[0], reduce=lambda local: gathered.append(local) or local)
    apart = token_metrics(losses[1], reduce=lambda local: gathered[0] + local)
    joined = CreditLoss(*map(torch.hstack, zip(*parts, strict=True)))
    joined_batch = micro_batch(joined, torch.cat(masks), torch.tensor(0.25), torch.cat(engines))
    together = token_metrics(joined_batch)
    assert "sampling/importance_sampling_ratio/mean" in together
    medians = [part.ratio.median().item() for part in (*parts, joined_batch.terms)]  # that of a log is their mean
    name = "sampling/importance_sampling_ratio/median"
    assert [apart.pop(name), together.pop(name)] == pytest.approx([sum(medians[:2]) / 2, medians[2]])
    assert apart == pytest.approx(together)


def test_tokens_of_all_micro_batches_of_a_log_have_one_weight():
    parts = [terms(n, n) for n in (2, 30)]
    metrics = token_metrics(*(micro_batch(p, torch.ones(len(p.ratio), dtype=torch.bool)) for p in parts))
    delta = torch.cat([part.teacher_token_logps - part.token_logps for part in parts])
    assert metrics["credit/delta_v_mean"] == pytest.approx(delta.mean().item(), rel=1e-5)
    assert metrics["credit/delta_v_std"] == pytest.approx(delta.std(correction=0).item(), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(torch.cat([part.entropy for part in parts]).mean().item(), rel=1e-5)


def test_metrics_without_tokens_are_nan():
    def measure(n, **options):
        return token_metrics(
            micro_batch(terms(n), torch.zeros(n, dtype=torch.bool), torch.tensor(math.nan)), **options
        )

    assert all(math.isnan(value) for value in measure(0).values())
    without_contrast = measure(3)
    sampled = measure(3, is_sampled=True)
    assert without_contrast.keys() - sampled.keys() == {
        f"credit/{name}" for name in ("kl_to_target", "kl_to_teacher", "support_mass_student", "support_mass_teacher")
    }
    assert math.isnan(without_contrast["credit/s_mean"])
    assert not math.isnan(without_contrast["credit/delta_v_mean"])


def test_context_shares():
    built = [
        TokenContexts([1], [[2]], privileged=PrivilegedContext("d", "f")),
        TokenContexts([1], privileged=PrivilegedContext(None, "f"), cut=True),
        TokenContexts(None, feedback_dropped=True),
        TokenContexts([1], [[2]], privileged=PrivilegedContext("d")),
    ]
    shares = context_metrics(built, True, lambda counts: counts)
    assert shares == TABLES["shares"]
    assert context_metrics(built, False, lambda counts: counts)["credit/frac_without_contrast"] == 0.0


def test_fidelity_of_one_token_is_its_weighted_gap():
    fidelity = micro_batch_fidelity(
        torch.tensor([2.0]), torch.tensor([[True]]), torch.tensor([0]), torch.tensor([3.0])
    )
    assert fidelity == 6.0


@pytest.mark.parametrize(("no_teacher", "skipped", "dropped", "warns"), TABLES["no_teacher"])
def test_no_teacher_warns_where_nothing_explains_it(no_teacher, skipped, dropped, warns):
    shares = {
        "without_teacher": no_teacher,
        "without_contrast": 0.0,
        "feedback_dropped": dropped,
        "with_feedback": 1.0,
    }
    alarms = Alarms()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alarms.check_contexts({f"credit/frac_{name}": share for name, share in shares.items()}, skipped)
    assert (alarms.raised == {"no_teacher"}) == warns
    with pytest.warns(CreditWarning):
        alarms.check_contexts({f"credit/frac_{name}": 0.5 * (name == "feedback_dropped") for name in shares})
    assert "feedback_dropped" in alarms.raised
    assert len(caught) == warns


@pytest.fixture
def run(make_trainer, dataset):
    def start(reward_funcs=length_verdicts, **options):
        trainer = make_trainer(reward_funcs, eval_rows=dataset, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        return trainer, [str(w.message) for w in caught if w.category is CreditWarning]

    return start


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_every_metric_is_logged_at_every_step(run, weight):
    trainer, _ = run(**TABLES["evaluated"], distillation_weight=weight)
    train = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluation = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(train) == len(evaluation) == 2
    for entry in train:
        assert all(math.isfinite(entry[name]) for name in [*TABLES["every_step"], "credit/teacher_drift"])
        assert all(entry[f"credit/seconds_{s}"] > 0 for s in "rollout verdict contexts scores update".split())
    for entry in evaluation:
        assert all(math.isfinite(entry[f"eval_{name}"]) for name in TABLES["every_step"])
    table = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    names = {name for name in train[0] if name.startswith("credit/") and "seconds" not in name}
    assert not {name for name in names if f"| `{name}`" not in table and f", `{name}`" not in table}
    for name in {**train[0], **evaluation[0]}:
        with pytest.raises(ValueError, match="a name that the trainer"):
            Verdict(0.0, None, {name: 1.0})


WARNED = TABLES["warned"] | {
    "no teacher": ({"reward_funcs": lambda completions, **_: [0.0] * len(completions)}, "batch has a teacher")
}


@pytest.mark.parametrize("case", WARNED)
def test_run_warns_once(run, make_model, case):
    options, message = WARNED[case]
    start = make_model(**options.get("weights", {}))
    model = make_model(**options.get("weights", {}))
    options = {name: value for name, value in options.items() if name != "weights"}
    trainer, warned = run(model=model, max_steps=3, **options)
    assert len([text for text in warned if message in text]) == 1
    is_same = [torch.equal(p, q) for p, q in zip(trainer.model.parameters(), start.parameters(), strict=True)]
    assert all(is_same) == (case in ("masked", "no teacher"))  # whose loss is 0


def test_samples_without_a_teacher_hide_no_missing_contrast():
    contexts = [TokenContexts([1]), TokenContexts(None), TokenContexts(None)]
    shares = context_metrics(contexts, True, lambda counts: counts)
    with pytest.warns(CreditWarning, match="No sample with a teacher of this generation batch has a contrast prompt"):
        Alarms().check_contexts(shares)


def test_an_evaluation_without_contrasts_hides_no_training_without(run, dataset):
    """Evaluation and training warn once each."""
    _, warned = run(rows=dataset.select([0] * 6), eval_on_start=True, per_device_eval_batch_size=4, max_steps=1)
    assert len([message for message in warned if "has a contrast prompt" in message]) == 2


def warnings_of_logs(metrics, logs, count):
    """Messages of `Alarms.check_log` for equal logs in a row."""
    alarms = Alarms()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            alarms.check_log({name: [value] for name, value in metrics.items()}, logs, 200)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(("specific", "delta_v", "logs", "warns"), TABLES["generic"])
def test_credit_that_is_not_input_specific_warns(specific, delta_v, logs, warns):
    names = ("credit/s_accepted", "credit/delta_v_mean", "credit/delta_v_std")
    warned = warnings_of_logs(dict(zip(names, (specific, *delta_v), strict=True)), {}, logs)
    assert ["S_t is near zero on the tokens" in message for message in warned] == [True] * warns


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_lost_gradient_warns_once(run, make_model, max_grad_norm):
    model = make_model()
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)
    trainer, warned = run(model=model, max_steps=4, max_grad_norm=max_grad_norm)
    assert len([w for w in warned if "its gradient is exactly 0" in w]) == 1
    assert all(e["loss"] != 0.0 for e in trainer.state.log_history if "loss" in e)


@pytest.mark.parametrize(("grad_norm", "loss", "mean", "std", "logs", "warns"), TABLES["gradients"])
def test_gradient_is_lost_where_only_it_is_zero(grad_norm, loss, mean, std, logs, warns):
    metrics = {"credit/advantage_mean": mean, "credit/advantage_std": std}
    warned = warnings_of_logs(metrics, {"grad_norm": grad_norm, "loss": loss}, logs)
    assert ["its gradient is exactly 0" in message for message in warned] == [True] * warns


@pytest.mark.parametrize("scale_rewards", ["group", "batch"])
def test_flat_reward_warns_once_and_a_varying_one_never(run, scale_rewards):
    def of_prompt(completions, prompts, **columns):
        return [Verdict(float(len(str(prompt)) % 2), "no") for prompt in prompts]

    _, warned = run(of_prompt, max_steps=7, scale_rewards=scale_rewards)
    assert len([w for w in warned if "equal in 5 generation batches in a row" in w]) == 1
    alarms = Alarms()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(20):
            alarms.raise_if(step % 5 != 0, "flat_reward", mean=1.0)


def test_undefined_metrics_of_a_batch_without_contrast_prompts_reach_no_logger(run, dataset):
    """Without a contrast no S_t is defined; an evaluation follows, and the last log has no step."""
    trainer, _ = run(rows=dataset.select([0] * 6), contrastive_coef=0.5, **TABLES["evaluated"])
    logged = [value for entry in trainer.state.log_history for value in entry.values()]
    assert all(value is not None and math.isfinite(float(value)) for value in logged)
    for entry in (e for e in trainer.state.log_history if "loss" in e):
        assert entry["credit/frac_without_contrast"] == 1.0
        assert "credit/s_mean" not in entry
        assert entry["credit/advantage_mean"] == pytest.approx(entry["credit/delta_v_mean"])


@pytest.mark.parametrize(("kind", "value"), [("missing", math.nan), ("infinite", -math.inf)])
def test_engine_without_log_probabilities_is_no_engine_without_differences(kind, value):
    token_terms = terms(10)
    engine = token_terms.token_logps.clone()
    loss = micro_batch(token_terms, torch.ones(10, dtype=torch.bool), engine=engine)
    assert token_metrics(loss)[f"sampling/frac_{kind}_logps"] == 0.0
    engine[:4] = value
    metrics = token_metrics(loss)
    assert metrics[f"sampling/frac_{kind}_logps"] == 0.4
    [message] = [text for text in warnings_of_logs(metrics, {}, 2) if f"are {kind}" in text]
    assert "40.0% of the sampled tokens" in message
