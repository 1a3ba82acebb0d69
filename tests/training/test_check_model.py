"""check_model and check_logits: unsupported families are refused, others pass, and the model is unchanged."""

import pytest
import torch
import transformers
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.training import check_model
from families import FAMILIES
from tables import tables_of

TABLES = tables_of(__file__)


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def with_prediction_head(tokenizer):
    """A model with a dense layer, an activation and a norm between backbone and output embeddings."""
    torch.manual_seed(0)
    ids = {f"{name}_token_id": tokenizer.eos_token_id for name in ("pad", "eos", "bos", "cls", "sep")}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ModernBertDecoderConfig(vocab_size=len(tokenizer), **sizes, **ids)
    return transformers.ModernBertDecoderForCausalLM(config)


REFUSED = r"logits of `ModernBertDecoderForCausalLM` are not the product.*`GRPOTrainer`, or open an issue"


def test_prediction_head_is_refused_by_trainer_and_analysis(with_prediction_head, make_trainer, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=REFUSED):
        make_trainer(model=with_prediction_head)
    for part in (with_prediction_head, tokenizer):
        part.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSED):
        Checkpoint.load(str(tmp_path), device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_prediction_head_is_refused_in_all_dtypes(with_prediction_head, accelerator, dtype):
    model = with_prediction_head.to(dtype)
    with pytest.raises(ValueError, match=REFUSED):
        check_model.check_logits(model, accelerator)
    with pytest.raises(ValueError, match=REFUSED):
        check_model.check_logits(get_peft_model(model, LoraConfig(target_modules=["Wo"])), accelerator)


PRECISIONS = [(torch.float32, "no"), (torch.float32, "bf16"), (torch.bfloat16, "no"), (torch.float16, "no")]


@pytest.mark.parametrize(("dtype", "mixed"), PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_pass_in_all_precisions(make_family, family, dtype, mixed):
    accelerator = Accelerator(cpu=True)
    accelerator.state._mixed_precision = mixed  # a second Accelerator keeps the precision of the first
    try:
        check_model.check_model(make_family(family).to(dtype), accelerator)
    finally:
        accelerator.state._mixed_precision = "no"


@pytest.mark.parametrize("mixed", ["no", "bf16"])
@pytest.mark.parametrize(("model_class", "sizes"), TABLES["sensitive"])
def test_families_sensitive_to_padding_are_refused(monkeypatch, model_class, sizes, mixed):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    config = getattr(transformers, f"{model_class}Config")(vocab_size=64, initializer_range=0.5, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(accelerator.state, "_mixed_precision", mixed)
    with pytest.raises(ValueError, match=rf"The logits of `{model_class}\w+` in \w+ change by .* padded on the left"):
        check_model.check_model(model, accelerator)
    if model_class == "GPT2":  # which generates, and is distilled, without positions of padding
        check_model.check_model(model, accelerator, reads_padding=False)


def test_bidirectional_model_is_refused(tokenizer, accelerator):
    """XLNet reads the whole sequence at each position unless its attention is made one-directional."""
    sizes = {"vocab_size": len(tokenizer), "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48}
    model = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes, initializer_range=0.3))
    with pytest.raises(ValueError, match=r"`XLNetLMHeadModel` change by .* when a token follows"):
        check_model.check_model(model, accelerator)


@pytest.mark.parametrize("changed_rows", [slice(0, 1), slice(None)])
def test_padding_change_of_one_prompt_counts_as_rounding(make_model, changed_rows):
    """Rounding may route a token to another expert."""
    model, accelerator = make_model(), Accelerator(cpu=True)

    def change(module, arguments, output):
        if output.logits.shape[1] > 4:
            output.logits[changed_rows] += output.logits.abs().max() * torch.linspace(0, 1, output.logits.shape[-1])

    model.register_forward_hook(change)
    if changed_rows == slice(0, 1):
        check_model.check_model(model, accelerator)
        return
    with pytest.raises(ValueError, match="padded on the left"):
        check_model.check_model(model, accelerator)


@pytest.mark.parametrize("value", [None, 4.0])
def test_wrong_soft_cap_is_detected(make_family, accelerator, monkeypatch, value):
    model = make_family("Gemma2")
    check_model.check_logits(model, accelerator)
    monkeypatch.setattr("credit_trl.loss.head._first_set", lambda _, *names: value if "soft" in names[0] else None)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM"):
        check_model.check_logits(model, accelerator)


def test_masked_logits_are_detected(make_model, accelerator):
    model = make_model()

    def masked(module, args, logits):
        return logits.index_fill(-1, torch.tensor([7]), -torch.inf)

    model.lm_head.register_forward_hook(masked)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        check_model.check_logits(model, accelerator)


def test_check_restores_modes_and_random_states(make_model, with_prediction_head, accelerator):
    class Drawing(torch.nn.Module):
        def forward(self, hidden, *args, **kwargs):
            torch.rand(3)
            return torch.nn.functional.silu(hidden)

    for model in (make_model(), with_prediction_head):
        model.train()
        model.model.layers[0].eval()
        model.model.layers[1].mlp.act_fn = model.model.layers[1].mlp.act = Drawing()
        modes = [module.training for module in model.modules()]
        state = torch.get_rng_state()
        try:
            check_model.check_logits(model, accelerator)
        except ValueError:
            assert model is with_prediction_head
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in model.modules()] == modes
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharded_models_are_skipped(with_prediction_head, accelerator, monkeypatch, kind):
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    monkeypatch.setattr(with_prediction_head, "forward", lambda **inputs: pytest.fail("a sharded model was called"))
    check_model.check_logits(with_prediction_head, accelerator)
