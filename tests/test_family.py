"""The family of methods: each row of the table starts from its recipe, and its first-step loss is its formula."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from credit_trl import CreditConfig, CreditTrainer, Verdict
from credit_trl.cli import training
from test_trainer_parity import logps, loss_and_gradients, perturb, prepared, samples
from tiny import build_tokenizer

ROOT = Path(__file__).parents[1]
RECIPES = {path.stem: path for path in sorted((ROOT / "examples" / "recipes" / "family").glob("*.yaml"))}
PAGE = ROOT / "docs" / "family.md"
TOPK = 20


def table() -> dict[str, dict[str, object]]:
    """Recipe -> option lines of its row in docs/family.md."""
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if recipe := re.search(r"recipes/family/(\w+)\.yaml", line):
            cells = line.split("|")
            rows[recipe[1]] = yaml.safe_load("\n".join(re.findall(r"`(\w+: [^`]+)`", cells[-2])))
    return rows


def method_options(name: str) -> dict[str, object]:
    """Options of a recipe that select the method."""
    own = yaml.safe_load(RECIPES[name].read_text())
    prefixes = ("credit_", "contrastive_", "distillation_", "teacher_model", "teacher_prompt")
    return {key: value for key, value in own.items() if key.startswith(prefixes)}


def test_the_table_and_the_recipes_have_the_same_rows_and_options():
    rows = table()
    assert rows.keys() == RECIPES.keys()
    for name, lines in rows.items():
        assert len(lines) <= 4, name
        assert lines.items() <= method_options(name).items(), name


@pytest.fixture
def teacher_path(make_model, tmp_path):
    """A wider model with the policy's vocabulary on disk."""
    path = tmp_path / "teacher"
    make_model(seed=5, dtype=torch.float64, hidden_size=48).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)


def answers_verdicts(completions, answer, **kwargs):
    """Mixed rewards in every group and feedback that differs between rollouts."""
    texts = [c[-1]["content"] for c in completions]
    return [Verdict(float(i % 3 == 0), f"Not {t!r}: {a}.") for i, (t, a) in enumerate(zip(texts, answer, strict=True))]


def buckets(values, support):
    """(t, K + 1): log-probabilities of the support, and of the rest."""
    inside = values.gather(-1, support)
    outside = values.scatter(-1, support, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([inside, outside], -1)


def naive_sample(name, config, advantage, is_success, p, f, g, tokens):
    """(t,) losses of one sample before the average over the tokens of the batch."""

    def at(x):
        return x.gather(-1, tokens[:, None]).squeeze(-1)

    surrogate = (at(p) - at(p).detach()).exp()  # GRPO's ratio on-policy
    if name == "grpo":
        return -advantage * surrogate
    if name == "rlsd":
        ratio = ((at(f) - at(p)).detach().exp()) ** torch.sign(advantage)
        return -advantage * (1 + config.distillation_weight * (ratio.clamp(0.8, 1.2) - 1)) * surrogate
    if name == "rlcsd":
        if not len(g):  # no wrong context
            return -advantage * surrogate
        wrong = torch.stack([at(x) for x in g]).exp().mean(0).log()
        moved = advantage + 0.1 * torch.tanh((at(f) - wrong) / 0.03)
        moved = moved.clamp(min=0) if advantage > 0 else moved.clamp(max=0) if advantage < 0 else 0 * moved
        return -moved * surrogate
    if name == "srpo" and is_success:
        return -advantage * surrogate
    support = f.topk(TOPK).indices
    log_p, target = buckets(p, support), buckets(f, support)
    if name == "credit":
        target = target - config.contrastive_coef * buckets(g[0], support)
    if name == "guide":
        target = target + config.contrastive_coef * (target - buckets(g[0], support))
    return (log_p.exp() * (log_p - target)).sum(-1)


def naive_loss(name, trainer, inputs, contexts, teacher):
    """The row's formula from plain forward passes in fp64, and its gradients."""
    config, model = trainer.args, trainer.model
    rewards = torch.tensor(trainer._generation_batch.rewards, dtype=torch.float64).view(-1, trainer.num_generations)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    successes = rewards.flatten() >= 1
    losses, entropies = [], []
    for i, (prompt, completion) in enumerate(samples(inputs)):
        own = contexts[i]
        with torch.no_grad():
            f = logps(teacher, own.teacher, completion) if own.teacher else None
            g = [logps(teacher, ids, completion) for ids in own.contrasts]
        p, tokens = logps(model, prompt, completion), torch.tensor(completion)
        losses.append(naive_sample(name, config, advantages[i], successes[i], p, f, g, tokens))
        entropies.append(None if f is None else -(f.exp() * f).sum(-1))
    if name == "srpo":
        routed = [i for i in range(len(losses)) if not successes[i]]
        mean = torch.cat([(-entropies[i]).exp() for i in routed]).mean()
        for i in routed:
            losses[i] = losses[i] * (-entropies[i]).exp() / mean
    model.zero_grad()
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.detach(), {n: q.grad.clone() for n, q in model.named_parameters() if q.grad is not None}


@pytest.mark.parametrize("name", RECIPES)
def test_first_step_loss_is_the_rows_formula(name, make_model, make_config, dataset, tokenizer, teacher_path):
    options = method_options(name) | {"distillation_topk": TOPK}
    options |= {"teacher_model_name_or_path": teacher_path} if name == "gkd" else {}
    if options.get("credit_use") == "modulate":
        del options["distillation_topk"]
    config = make_config(**options)
    model = make_model(dtype=torch.float64)
    trainer = CreditTrainer(model, answers_verdicts, config, dataset, processing_class=tokenizer)
    teacher, contexts = None, [None] * 8
    if name != "grpo":
        teacher = trainer.teacher.model
        perturb(teacher, scale=0.02 if name != "gkd" else 0.0)
        build, kept = trainer._build_contexts, []
        trainer._build_contexts = lambda batch: kept.extend(build(batch)) or kept
    inputs = prepared(trainer)
    contexts = contexts if name == "grpo" else kept
    if name == "grpo":
        contexts = [type("None", (), {"teacher": None, "contrasts": ()})] * 8
    if name == "rlcsd":
        assert any(len({tuple(ids) for ids in c.contrasts}) > 1 for c in contexts)
    ours = loss_and_gradients(trainer, inputs)
    expected = naive_loss(name, trainer, inputs, contexts, teacher)
    assert ours[0].item() == pytest.approx(expected[0].item(), abs=1e-6)
    assert any(gradient.abs().max() > 1e-4 for gradient in expected[1].values())
    for parameter, gradient in expected[1].items():
        torch.testing.assert_close(ours[1][parameter], gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_rows_recipe_trains_on_the_embedded_task(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    line = ["--config", str(RECIPES[name]), "--output_dir", str(tmp_path), "--max_steps", "2"]
    trainer = training.make_trainer(*training.make_parser().parse_args_and_config(line))
    trainer.train()
    losses = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in losses] == [1, 2]
    assert name == "gkd" or all(row["grad_norm"] > 0 for row in losses)  # gkd's teacher is the policy's own file


def test_recipes_load_as_configurations(tmp_path):
    for name in RECIPES:
        CreditConfig(str(tmp_path), **method_options(name), use_cpu=True, bf16=False, num_generations=4)
