"""Training without padding equals training with it, and reads no more tokens than it says."""

import hashlib
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from padded import padding_kept

from credit_trl.teacher.packing import PACKED_SDPA, attention_of
from credit_trl.training.micro_batches import even_groups, exchanged_count
from tables import tables_of

TABLES = tables_of(__file__)

ACCUMULATED = TABLES["accumulated"]


def ragged_rollouts(prompts, trainer):
    """Prompts and completions of many lengths, with the log-probabilities of an engine that differs a little."""
    tokenizer = trainer.processing_class
    prompt_ids, completion_ids, logprobs = [], [], []
    for i, prompt in enumerate(prompts):
        digest = hashlib.sha256(f"{prompt}{i % 4}".encode()).digest()
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        prompt_ids.append(tokenizer("x" * (digest[1] % 30))["input_ids"] + ids)
        length = 1 + digest[0] % 40 if digest[0] > 60 else 1
        completion_ids.append(tokenizer((digest.hex() * 3)[:length])["input_ids"] + [tokenizer.eos_token_id])
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([prompt_ids[-1] + completion_ids[-1]])).logits[0]
        logps = logits[len(prompt_ids[-1]) - 1 : -1].log_softmax(-1)
        sampled = logps.gather(-1, torch.tensor(completion_ids[-1])[:, None])[:, 0]
        noise = torch.randn(len(sampled), generator=torch.Generator().manual_seed(digest[2]))
        logprobs.append([None, *(sampled + 0.1 * noise).tolist()[1:]])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


@pytest.fixture
def make_trainer(make_trainer, dataset, no_engine):
    def make(lora=False, vllm=False, **options):
        defaults = {"max_completion_length": 48, "max_steps": 8, "rollout_func": ragged_rollouts}
        if vllm:
            defaults |= {"use_vllm": True, "vllm_mode": "colocate"}
        if lora:
            defaults["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        if "eval_strategy" in options:
            defaults["eval_rows"] = dataset.select(range(2))
        trainer = make_trainer(**defaults | options)
        if vllm:
            trainer.vllm_generation.sync_weights = lambda: None
        return trainer

    return make


def count_reads(trainer):
    """Counts of tokens that enter the student's embedding with gradient (True) and without, except for generation."""
    reads, generate = Counter(), trainer.rollout_func

    def count(module, args, output):
        reads[torch.is_grad_enabled()] += args[0].numel()

    def uncounted(*args):
        initial = reads[False]
        generated = generate(*args)
        reads[False] = initial
        return generated

    trainer.model.get_input_embeddings().register_forward_hook(count)
    trainer.rollout_func = uncounted
    return reads


def trained(trainer, **arguments):
    """Logged losses and gradient norms, and the weights of a run."""
    trainer.train(**arguments)
    log = [row for row in trainer.state.log_history if "loss" in row]
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return [(row["loss"], row["grad_norm"]) for row in log], weights, log


def assert_equal_runs(expected, second, rtol=1e-6):
    """To 1e-6 in fp32: sums are ordered otherwise where rows are shorter or share another micro-batch."""
    torch.testing.assert_close(torch.tensor(expected[0]), torch.tensor(second[0]), rtol=rtol, atol=1e-6)
    assert expected[1].keys() == second[1].keys()
    for name, weight in expected[1].items():
        assert (weight - second[1][name]).abs().max() <= 1e-6, name


FAST = ("packed", "accumulated", "engine-token_mask", "engine-sequence_mask")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TABLES["unpadded"]]
)
@pytest.mark.filterwarnings("ignore:The engine's log-probabilities")
def test_run_equals_the_padded_run(make_trainer, name):
    options = {"optim": "sgd", "learning_rate": 0.02, **TABLES["unpadded"][name]}
    if name.startswith("engine"):
        options |= {"vllm_importance_sampling_clip_max": 1.2, "vllm_importance_sampling_clip_min": 0.8}
    steps = 3 if name in FAST else 8
    with padding_kept():
        expected = trained(make_trainer(**options, max_steps=steps))
    # A ratio of two probabilities has the absolute rounding of their logarithms, 5e-7 at −5, and gradients of a
    # renormalized support reach norms above 1.
    rtol = 2e-6 if name == "engine-renormalize" else 1e-6
    assert_equal_runs(trained(make_trainer(**options, max_steps=steps)), expected, rtol)
    if name.startswith("engine"):
        uncorrected = trained(make_trainer(**options, max_steps=steps, vllm_importance_sampling_correction=False))
        assert max(abs(a[0] - b[0]) for a, b in zip(uncorrected[0], expected[0], strict=True)) > 1e-4


def prompts_once(batch):
    """Tokens of a micro-batch in which rollouts of one prompt read it once; they sample different first tokens."""
    prompts = {
        tuple(ids[mask.bool()].tolist()) for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    }
    return sum(map(len, prompts)) + int(batch["completion_mask"].sum())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.filterwarnings("ignore:The engine's log-probabilities")
def test_student_reads_what_the_lengths_say(make_trainer, packed, vllm):
    options = {"lora": False, "gradient_checkpointing": False, "max_steps": 2}
    trainer = make_trainer(vllm=vllm, packed=packed, **ACCUMULATED, **options)
    reads, batches = count_reads(trainer), []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: batches.append(inputs) or compute(model, inputs)
    trainer.train()
    lengths = [(x["prompt_mask"].sum(1) + x["completion_mask"].sum(1)).tolist() for x in batches]
    valid = sum(map(sum, lengths))
    assert len(lengths) == 8
    if packed:
        assert reads[True] <= sum(map(prompts_once, batches)) <= valid
    else:
        assert reads[True] == sum(len(of_batch) * max(of_batch) for of_batch in lengths)
        assert valid < reads[True] < 1.3 * valid
    assert reads[False] == 0  # a generation batch is one step
    factors = [row["credit/padding_factor"] for row in trainer.state.log_history if "loss" in row]
    assert sum(factors) / 2 == pytest.approx(reads[True] / valid, rel=0.05)


@pytest.mark.parametrize("kind", ["ema", "live"])
def test_every_model_that_scores_packed_rows_keeps_them_apart(make_trainer, kind):
    """A copy of the policy is a model of its own, and transformers would form a mask of the square of the row."""
    trainer = make_trainer(packed=True, teacher_model_kind=kind)
    assert {attention_of(model) for model in trainer.teacher.models()} == {PACKED_SDPA}


lengths_and_count = st.integers(1, 6).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 900), min_size=count, max_size=6 * count).map(lambda x: x[: len(x) // count * count]),
        st.just(count),
    )
)


@given(lengths_and_count, st.booleans())
def test_groups_hold_every_sample_once_and_are_even(case, by_total):
    lengths, count = case
    groups = even_groups(lengths, count, by_total)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert {len(group) for group in groups} == {len(lengths) // count}
    if not by_total:
        arrived = [lengths[i : i + len(groups[0])] for i in range(0, len(lengths), len(groups[0]))]
        longest = sum(max(lengths[i] for i in group) for group in groups)
        assert longest <= sum(map(max, arrived))


@pytest.mark.parametrize(("options", "count"), TABLES["exchanged"])
def test_samples_are_exchanged_between_the_micro_batches_of_one_step(make_config, options, count):
    config = make_config(**options)
    assert [exchanged_count(config, router_loss) for router_loss in (False, True)] == [count, 1]
