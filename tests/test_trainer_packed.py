"""GRPO with `packed=True` against TRL's trainer: losses, gradients and weights of three optimizer steps."""

import gc
import math
from functools import partial

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig

import packed_runs
from credit_trl import CreditConfig
from credit_trl.teacher.packing import cannot_pack
from credit_trl.training.metrics import CreditWarning
from distributed.jobs import deterministic_rollouts
from families import build_family
from packed_runs import LOSSES, PACKED, REFUSALS, TABLES, assert_equal
from test_trainer_options import BASE, BESIDE, NOT_RUN, global_state, options  # noqa: F401, a fixture
from test_trainer_parity import mixed_verdicts
from tiny import build_model
from vlm import build_vlm

ADAM = {"optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"}
GRID = [pytest.param(given, id=name, marks=pytest.mark.slow) for name, given in LOSSES.items()]
# See `misuse/mistakes.yaml`; the last is the old name of the second, whose cache takes all memory.
REFUSED = {"neftune_noise_alpha", "use_transformers_continuous_batching", "use_transformers_paged"}
OPTIONS = [
    pytest.param(BESIDE.get(name, {}) | {name: value}, id=name, marks=pytest.mark.slow)
    for name, value in options().items()
    if name not in {*NOT_RUN, *ADAM, *BASE, *TABLES["common"], *REFUSED}
]


@pytest.fixture
def train(tmp_path):
    yield partial(packed_runs.train, tmp_path)
    gc.collect()  # trainers are in cycles of references


@pytest.mark.parametrize("given", [*TABLES["fast"], *GRID, *OPTIONS])
def test_packed_grpo_equals_trls(train, given):
    try:
        theirs = train(GRPOConfig, given)
    except REFUSALS as error:  # TRL refuses it
        with pytest.raises(type(error)):
            train(CreditConfig, given | PACKED)
        return
    ours = train(CreditConfig, given | PACKED)
    assert (ours.trainer.policy_step is None) == (cannot_pack(ours.trainer.model) is not None)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_zero_weight_without_packing_is_trls_bit_for_bit(train, loss_type):
    theirs = train(GRPOConfig, {"loss_type": loss_type})
    assert theirs.largest_gradient > 1e-3
    ours = train(CreditConfig, {"loss_type": loss_type, "distillation_weight": 0.0})
    assert all(torch.equal(ours.weights[name], weight) for name, weight in theirs.weights.items())


def model_of(family, tokenizer):
    model = build_family(tokenizer, family)
    if hasattr(model.config, "output_router_logits"):  # fails in generation from padded prompts
        model.config.output_router_logits = False
    return model


def scripted_rollouts(prompts, trainer, has_masks=False, has_logps=False):
    """Completions of several lengths; a tool wrote each second token, or an engine reported log-probabilities."""
    generated = deterministic_rollouts(prompts, trainer)
    completions = generated["completion_ids"]
    if has_masks:
        generated["env_mask"] = [[(place + 1) % 2 for place in range(len(row))] for row in completions]
    if has_logps:  # about those of the nearly uniform policy
        generated["logprobs"] = [[-5.5 + math.sin(token) for token in row] for row in completions]
    return generated


ROLLOUTS = {
    "masked": partial(scripted_rollouts, has_masks=True),
    "reported": partial(scripted_rollouts, has_logps=True),
}


def failing_verdicts(completions, answer, trainer_state, **kwargs):
    """`mixed_verdicts` except in the second step, in which the verifier fails."""
    if trainer_state.global_step == 1:
        raise ConnectionError("the verifier is unavailable")
    return mixed_verdicts(completions, answer)


def adapter():
    return LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)


def parts_of(kind, tokenizer):
    """Arguments of a trainer for a row of the table `kinds`, whose options stay in the row."""
    verdicts = failing_verdicts if kind.pop("verdicts", None) else mixed_verdicts
    parts = {"rollout_func": ROLLOUTS.get(kind.pop("rollouts", None)), "verdicts": verdicts}
    if kind.pop("adapter", False):
        parts["peft_config"] = adapter()
    if "family" in kind:
        parts["model"] = model_of(kind.pop("family"), tokenizer)
    if kind.pop("four_bits", False):
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: `make test-slow` installs it")
        quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        kind["model_init_kwargs"] = {"quantization_config": quantized, "dtype": "float32"}
    return parts


@pytest.mark.slow
@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("name", TABLES["kinds"])
def test_packed_rows_equal_trls_pass_for_each_kind_of_run(train, tokenizer, monkeypatch, name, weight):
    """At weight 0 padded rows are TRL's run bit for bit; in a mixture they are two passes of the policy."""
    monkeypatch.setattr("trl.generation.vllm_generation.VLLMGeneration.sync_weights", lambda self: None)
    runs = {}
    for packed in (True, False):
        kind = dict(TABLES["kinds"][name], packed=packed, distillation_weight=weight)
        tolerance = kind.pop("tolerance", 1e-6)
        parts = parts_of(kind, tokenizer)
        runs[packed] = train(CreditConfig, kind, **parts)
        assert (runs[packed].trainer.policy_step is not None) == packed
    assert_equal(runs[True], runs[False], tolerance)


def four_bit_head(tokenizer, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: `make test-slow` installs it")
    build_model(tokenizer, hidden_size=64, intermediate_size=64, head_dim=32).save_pretrained(tmp_path / "model")
    quantized = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["none"])
    return AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=quantized)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_head_of_four_bits_is_refused(make_trainer, tokenizer, tmp_path, weight):
    model = four_bit_head(tokenizer, tmp_path)
    with pytest.raises(ValueError, match="not the product of its last hidden states"):
        make_trainer(model=model, peft_config=adapter(), distillation_weight=weight, packed=True)


def test_what_cannot_be_packed_takes_trls_path_with_a_warning(make_trainer):
    prompt_tuning = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    vision_model, processor = build_vlm("Qwen2_5_VL", torch.float32)
    options = {"distillation_weight": 0.0, "packed": True}
    for reason, parts in (
        ("its adapter adds tokens to each row", {"peft_config": prompt_tuning}),
        ("images need padded rows", {"model": vision_model, "processing_class": processor}),
    ):
        with pytest.warns(CreditWarning, match=f"`packed=True` has no effect: {reason}"):
            trainer = make_trainer(**options, **parts)
        assert trainer.policy_step is None
