"""GRPO with `packed=True` against TRL's trainer: losses, gradients and weights of three optimizer steps."""

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
from families import FAMILIES, build_family
from packed_runs import LOSSES, PACKED, REFUSALS, TABLES, assert_equal
from test_trainer_options import BASE, BESIDE, NOT_RUN, global_state, options  # noqa: F401, a fixture
from test_trainer_parity import mixed_verdicts
from tiny import build_model
from vlm import build_vlm

ADAM = {"optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"}
GRID = [pytest.param(given, id=name, marks=pytest.mark.slow) for name, given in LOSSES.items()]
OPTIONS = [
    pytest.param(BESIDE.get(name, {}) | {name: value}, id=name, marks=pytest.mark.slow)
    for name, value in options().items()
    if name not in {*NOT_RUN, *ADAM, *BASE, *TABLES["common"], "neftune_noise_alpha"}  # which is refused
]


@pytest.fixture
def train(tmp_path):
    return partial(packed_runs.train, tmp_path)


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


def model_of(family, tokenizer):
    model = build_family(tokenizer, family)
    if hasattr(model.config, "output_router_logits"):  # fails in generation from padded prompts
        model.config.output_router_logits = False
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_grpo_equals_trls_for_families(train, tokenizer, family):
    """Heads with a bias, a scale, a soft cap or tied weights, sliding windows, and experts with a router's loss."""
    ours = train(CreditConfig, PACKED, model_of(family, tokenizer))
    theirs = train(GRPOConfig, {}, model_of(family, tokenizer))
    assert ours.trainer.aux_loss_enabled == (family == "Qwen3Moe")
    assert (ours.trainer.policy_step is None) == (family == "Gemma2")  # whose attention is not packed
    assert_equal(ours, theirs, 1e-5)  # large random weights, which increase rounding


def scripted_rollouts(prompts, trainer, has_masks=False, has_logps=False):
    """Completions of several lengths; a tool wrote each second token, or an engine reported log-probabilities."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    letters = torch.tensor(trainer.processing_class("abcdefghij")["input_ids"])
    lengths = torch.randint(2, 12, (len(prompts),), generator=generator).tolist()
    completions = [letters[torch.randint(10, (length,), generator=generator)].tolist() for length in lengths]
    ids = [trainer.processing_class.apply_chat_template(prompt, return_dict=False) for prompt in prompts]
    generated = {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}
    if has_masks:
        generated["env_mask"] = [[(place + 1) % 2 for place in range(len(row))] for row in completions]
    if has_logps:  # about those of the nearly uniform policy
        generated["logprobs"] = [
            (torch.randn(len(row), generator=generator) / 2 - 5.5).tolist() for row in completions
        ]
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


KINDS = [
    pytest.param(name, weight, marks=() if (name, weight) == ("tool masks", 0.5) else pytest.mark.slow)
    for name in TABLES["kinds"]
    for weight in (0.0, 0.5)
]


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(("name", "weight"), KINDS)
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


@pytest.mark.parametrize(("weight", "options"), [(0.0, {"packed": True}), (0.5, {"packed": None})])
def test_grpos_loss_reads_the_policy_once_and_no_padding(make_trainer, weight, options):
    """One pass of the backbone with gradients for each micro-batch; TRL's model is not called."""
    trainer = make_trainer(mixed_verdicts, distillation_weight=weight, max_steps=1, **options)
    rows = []

    def count(module, arguments, keywords):
        ids = keywords["input_ids"]
        if torch.is_grad_enabled():
            rows.append((len(ids), ids.shape[1]))

    trainer.model.model.register_forward_pre_hook(count, with_kwargs=True)
    read = []
    loss = trainer.compute_loss

    def counted(model, inputs, **keywords):
        read.append(int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()))
        return loss(model, inputs, **keywords)

    trainer.compute_loss = counted
    trainer.train()
    assert len(rows) == len(read) == 1
    (count_of_rows, width), (valid,) = rows[0], read
    assert count_of_rows == 1
    assert width <= valid
