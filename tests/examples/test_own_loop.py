"""`CreditLoop` in the plain loop of `examples/` against the trainer, and against dense passes on stale samples."""

import importlib
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.tasks import quickstart
from credit_trl.training.step import CreditStep

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def loop(monkeypatch):
    """The module `examples/own_loop.py`."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("own_loop")


@pytest.fixture(scope="module")
def rows():
    return quickstart.build("train", rows_per_cue=1).to_list()


def test_plain_loop_has_the_losses_of_the_trainer(loop, rows, tmp_path):
    def rollout(prompts, trainer):
        tokenizer = trainer.processing_class
        encoded = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True) for prompt in prompts]
        prompt_ids = [encoding["input_ids"] for encoding in encoded]
        completion_ids = loop.sample(trainer.model, tokenizer, prompt_ids, seed=trainer.state.global_step)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    options = {"save_strategy": "no", "max_steps": loop.STEPS, "shuffle_dataset": False, "disable_tqdm": True}
    config = CreditConfig(str(tmp_path), **loop.OPTIONS, **options)
    losses = []

    class RecordingTrainer(CreditTrainer):
        def _distillation_loss(self, model, inputs):
            loss = super()._distillation_loss(model, inputs)
            losses.append(loss.item())
            return loss

    data = Dataset.from_list(rows)
    trainer = RecordingTrainer("quickstart", quickstart.reward, config, data, rollout_func=rollout)
    trainer.train()
    steps = torch.tensor(losses).view(loop.STEPS, config.gradient_accumulation_steps).sum(dim=1)
    assert steps.abs().min() > 1e-3
    torch.testing.assert_close(torch.tensor(loop.train(rows)), steps, rtol=0, atol=1e-6)


def dense_logps(model, prompt, ids):
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(dim=-1)


def test_stale_samples_have_the_dense_loss_with_the_ratio(loop, rows, monkeypatch):
    """The ratio is of the policies before and after two updates, computed from weights that the test stores."""
    expected = []
    without_ratio = []
    sampled = {}  # first completion of a batch -> the policy that sampled it
    original_sample = loop.sample
    prepare = CreditStep.prepare

    def sample(model, tokenizer, prompts, seed):
        completions = original_sample(model, tokenizer, prompts, seed)
        policy, _ = loop.load()
        policy.load_state_dict(model.state_dict())
        sampled[tuple(map(tuple, completions))] = policy
        return completions

    @torch.no_grad()
    def dense(step, batch, tensors):
        contexts = step.build_contexts(batch)
        old_policy = sampled[tuple(map(tuple, batch.completion_ids))]
        losses = torch.zeros(2, dtype=torch.float64)
        for i, ids in enumerate(batch.completion_ids):
            prompt = tensors["prompt_ids"][i][tensors["prompt_mask"][i].bool()].tolist()
            if contexts[i].teacher is None:
                continue
            logps, old = (dense_logps(model, prompt, ids) for model in (step.teacher.student, old_policy))
            (teacher_ids, _), *contrast = contexts[i].sequences()
            target = dense_logps(step.teacher.model, teacher_ids, ids)
            if contrast:
                target = target - step.config.contrastive_coef * dense_logps(step.teacher.model, contrast[0][0], ids)
            divergence = (logps.exp() * (logps - target)).sum(dim=-1)
            ratio = (logps - old).exp().gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            losses += torch.stack([(divergence * ratio.clamp(max=2.0)).sum(), divergence.sum()])
        losses /= sum(map(len, batch.completion_ids))
        expected.append(losses[0].item())
        without_ratio.append(losses[1].item())

    def prepare_and_compare(self, batch, tensors, contexts=None):
        dense(self, batch, tensors)
        return prepare(self, batch, tensors, contexts)

    monkeypatch.setattr(loop, "sample", sample)
    monkeypatch.setattr(CreditStep, "prepare", prepare_and_compare)
    losses = loop.train(rows, steps=4, lag=2)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    differences = torch.tensor(losses) - torch.tensor(without_ratio)
    assert differences[0].abs() < 1e-5  # sampled by the policy that is trained
    assert differences[2:].abs().min() > 1e-4


def test_loop_refuses_a_mixture_with_grpo(loop):
    model, tokenizer = loop.load()
    with pytest.raises(ValueError, match="`distillation_weight=1`"):
        loop.make_loop(model, tokenizer, CreditConfig("unused", **loop.OPTIONS, distillation_weight=0.5))
