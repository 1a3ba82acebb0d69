"""What stands under the padding of TRL's batches changes nothing: soft-capped models, packed and padded passes."""

import pytest
import torch
from trl import GRPOTrainer

LAYOUTS = [("Qwen3", False), ("Qwen3", True), ("Gemma2", False), ("Gemma3", True)]


def ragged_rollouts(prompts, trainer):
    """Prompts and completions of many lengths."""
    tokenizer = trainer.processing_class
    texts = ["x" * (5 * i % 17) + prompt[-1]["content"] for i, prompt in enumerate(prompts)]
    completions = [tokenizer("0123456789"[: 1 + 7 * i % 10])["input_ids"] for i in range(len(prompts))]
    return {
        "prompt_ids": [tokenizer(text)["input_ids"] for text in texts],
        "completion_ids": [[*ids, tokenizer.eos_token_id] for ids in completions],
        "logprobs": None,
    }


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout[0]}-{'packed' if layout[1] else 'padded'}")
def trainer(request, make_family, make_trainer, dataset):
    family, packed = request.param
    options = {"packed": packed, "num_iterations": 2, "temperature": 0.7, "max_completion_length": 12}
    built = make_trainer(model=make_family(family), rollout_func=ragged_rollouts, **options)
    built.current_gradient_accumulation_steps = 1
    built.inputs = built._prepare_inputs([row for row in dataset.select(range(4)) for _ in range(2)])
    return built


def test_log_probabilities_at_rollout_time_are_trls(trainer):
    ids, mask = (
        torch.cat([trainer.inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1)
        for kind in ("ids", "mask")
    )
    width = trainer.inputs["completion_ids"].shape[1]
    arguments = (trainer.model, ids, mask, width)
    with torch.no_grad():
        expected = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *arguments)[0]
        measured = [trainer._get_per_token_logps_and_entropies(*arguments, batch_size=size)[0] for size in (None, 3)]
    is_valid = trainer.inputs["completion_mask"].bool()
    assert 0 < is_valid.sum() < is_valid.numel()
    for logps in (*measured, trainer.inputs["old_per_token_logps"]):
        torch.testing.assert_close(logps[is_valid], expected[is_valid], rtol=1e-4, atol=1e-5)


def test_values_under_padding_reach_neither_loss_nor_gradient(trainer):
    inputs = trainer.inputs
    spoiled = dict(inputs)
    for name, values in inputs.items():
        part = "prompt" if name.startswith("prompt") else "completion"
        padding = ~inputs[f"{part}_mask"].bool()
        if isinstance(values, torch.Tensor) and values.shape[:2] == padding.shape and not name.endswith("mask"):
            spoiled[name] = values.clone()
            spoiled[name][padding] = torch.nan if values.is_floating_point() else 7
    results = []
    for batch in (inputs, spoiled):
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in trainer.model.parameters() if p.grad is not None)])
    assert results[0][0] != 0.0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
