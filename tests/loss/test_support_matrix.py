"""The support matrix of `docs/first_node.md`: ways to train × families, each cell a run of a tiny random model.

`test_model_families.py` trains every family fully; here are adapters, quantised bases, recomputed activations,
thinking, and a vision-language model with text-only prompts. One family of each way is fast, the others are slow.
"""

import copy

import pytest
import torch
import transformers
from peft import LoraConfig
from tokenizers.processors import TemplateProcessing

import families
from credit_trl import CreditTrainer
from credit_trl.contexts.tokens import PrivilegedContext
from families import FAMILIES, SMALL
from tiny import CHAT_TEMPLATE, context_ids
from vlm import build_vlm

MATRIX = ("Qwen3", "Llama", "Olmo3", "Gemma2", "Qwen3Moe")
TARGETS = ["q_proj", "v_proj"]
ADAPTERS = {
    "LoRA": LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False),
    "DoRA": LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
}


def cells(families=MATRIX):
    """Cells of the matrix; the fast tests run the first family only."""
    return [pytest.param(f, marks=() if f == "Qwen3" else pytest.mark.slow) for f in families]


def assert_distilled(trainer: CreditTrainer) -> None:
    """Check that every sample had a teacher and a contrast, and that loss and weights are finite."""
    logged = trainer.state.log_history[0]
    assert logged["credit/frac_without_teacher"] == 0.0
    assert abs(logged["credit/s_mean"]) > 0.0
    assert logged["loss"] != 0.0
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters() if p.is_floating_point())


def weights(trainer: CreditTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", cells())
def test_adapter_trains_on_an_unchanged_base(make_family, make_trainer, family, adapter):
    options = {"max_steps": 2, "teacher_update_rate": 0.5, "teacher_sync_steps": 1, "learning_rate": 1e-2}
    trainer = make_trainer(model=make_family(family), peft_config=copy.deepcopy(ADAPTERS[adapter]), **options)
    initial = weights(trainer)
    trainer.train()
    assert_distilled(trainer)
    final = weights(trainer)
    changed = {name for name, value in final.items() if not torch.equal(value, initial[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert any(".default" in name for name in changed)
    assert any(".teacher" in name for name in changed)
    assert any("lora_magnitude" in name for name in changed) == (adapter == "DoRA")
    moved = max((final[n] - final[n.replace(".default", ".teacher")]).abs().max() for n in final if ".default" in n)
    start = max((final[n] - initial[n]).abs().max() for n in final if ".default" in n)
    assert 0 < moved < start  # between where the student began and where it is


@pytest.mark.parametrize("family", cells())
def test_recomputed_activations_give_the_same_weights(make_family, make_trainer, family):
    ends = []
    for recompute in (False, True):
        options = {"max_steps": 1, "optim": "sgd", "gradient_checkpointing": recompute}
        trainer = make_trainer(model=make_family(family), **options)
        initial = weights(trainer)
        trainer.train()
        assert_distilled(trainer)
        ends.append(weights(trainer))
    assert any(not torch.equal(ends[0][name], value) for name, value in initial.items())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-5, atol=1e-7, msg=name)


@pytest.fixture
def four_bits(make_family, make_trainer, tmp_path, monkeypatch):
    """Builds a trainer of an adapter on a four-bit base of the given family."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: `make test-slow` installs it")

    def make(family):
        # It quantises blocks of 64 weights.
        monkeypatch.setattr(families, "SMALL", {**SMALL, "hidden_size": 64, "intermediate_size": 64})
        if "head_dim" in FAMILIES[family]:
            monkeypatch.setitem(FAMILIES[family], "head_dim", 32)
        path = str(tmp_path / "model")
        make_family(family).save_pretrained(path)
        quantised = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        options = {"max_steps": 1, "learning_rate": 1e-2, "model_init_kwargs": {"quantization_config": quantised}}
        return make_trainer(model=path, peft_config=copy.deepcopy(ADAPTERS["LoRA"]), **options)

    return make


@pytest.mark.parametrize("family", cells())
def test_an_adapter_trains_on_a_base_of_four_bits(four_bits, family):
    trainer = four_bits(family)
    assert {p.dtype for p in trainer.model.parameters()} >= {torch.uint8}
    adapter, answers = adapter_of(trainer), answers_of_base(trainer)
    trainer.train()
    assert_distilled(trainer)
    assert trainer.state.log_history[0]["grad_norm"] > 0.0
    unchanged = {name for name, value in adapter_of(trainer).items() if torch.equal(value, adapter[name])}
    assert unchanged == {name for name in adapter if ".teacher" in name}  # it is frozen
    torch.testing.assert_close(answers_of_base(trainer), answers, rtol=1e-5, atol=1e-5)


def adapter_of(trainer: CreditTrainer) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights(trainer).items() if "lora_" in name}


@torch.no_grad()
def answers_of_base(trainer: CreditTrainer) -> torch.Tensor:
    """Logits of the model without its adapters."""
    trainer.model.eval()
    with trainer.model.disable_adapter():
        return trainer.model(input_ids=torch.arange(20)[None]).logits


# Qwen3's: without thinking, the prompt opens and closes the thoughts itself.
THINKING = CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
)


@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
def test_contexts_open_the_answer_like_the_student(make_trainer, tokenizer, thinks):
    thinking_tokenizer = copy.deepcopy(tokenizer)
    thinking_tokenizer.chat_template = THINKING
    options = {"max_steps": 1, "contrastive_count": 2, "chat_template_kwargs": {"enable_thinking": thinks}}
    trainer = make_trainer(processing_class=thinking_tokenizer, **options)
    seen, build = [], trainer._build_contexts

    def recording(batch):
        built = build(batch)
        seen.extend(ids for contexts in built for ids in context_ids(contexts))
        return built

    trainer._build_contexts = recording
    trainer.train()
    assert_distilled(trainer)
    opening = "<|im_start|>assistant\n" + ("" if thinks else "<think>\n\n</think>\n\n")
    assert len(seen) == 8 * 3
    assert all(thinking_tokenizer.decode(ids).endswith(opening) for ids in seen)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_vision_language_model_trains_on_prompts_of_text(make_trainer, dataset, adds_bos):
    """The teacher's prompt without z is the student's, also where the tokenizer adds BOS, which processors keep."""
    model, processor = build_vlm("LlavaNext", torch.float32)
    text_tokenizer = processor.tokenizer
    text_tokenizer.bos_token = "<boi>"
    if adds_bos:
        pieces = [("<boi>", text_tokenizer.bos_token_id)]
        text_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<boi> $A", special_tokens=pieces)
    trainer = make_trainer(model=model, processing_class=processor, max_steps=1)
    prompt = dataset[0]["prompt"]
    (student,) = trainer._tokenize_prompts([prompt])[0]
    assert trainer.context_builder.encode(prompt, PrivilegedContext()) == list(student)
    assert (student[0] == text_tokenizer.bos_token_id) == adds_bos
    initial = weights(trainer)
    trainer.train()
    assert_distilled(trainer)
    changed = {name for name, value in weights(trainer).items() if not torch.equal(value, initial[name])}
    assert any("language_model" in name for name in changed)
    assert not any("vision" in name for name in changed)  # no image, no gradient
