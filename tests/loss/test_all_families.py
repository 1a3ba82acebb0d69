"""Every causal language model of transformers trains alike in each layout of its passes, or is refused."""

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from credit_trl import CreditTrainer
from tables import tables_of
from tiny import length_verdicts

TABLES = tables_of(__file__)

SIZES = {name: size for names, size in TABLES["sizes"].items() for name in names.split()}
LARGEST = 4_000_000  # parameters; a family whose sizes have other names is not tiny
# PhiMoE samples its experts in training; a step of Kimi Linear takes over a minute on a CPU.
NOT_TRAINED = {"phimoe", "kimi_linear"}
FITTING = frozenset(TABLES["fitting"].split())


def has_field(config: PreTrainedConfig, name: str) -> bool:
    """Whether a configuration has a value that is neither computed nor different between layers."""
    try:
        return hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)
    except Exception:  # of transformers, where layers differ
        return False


def build_tiny(family: str, tokenizer) -> PreTrainedModel:
    """A random model without dropout, or a skip where the sizes do not make one."""
    kind, names = CONFIG_MAPPING[family], MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    vocabulary = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(tokenizer))
    sizes = SIZES | vocabulary | {"pad_token_id": tokenizer.pad_token_id}
    try:
        default = kind()
        if has_field(default, "kv_lora_rank"):  # latent attention has as many keys as queries
            sizes |= {"num_key_value_heads": 2}
            del sizes["head_dim"]
        random = [name for name, value in vars(default).items() if isinstance(value, float)]
        sizes |= {name: 0.0 for name in random if "drop" in name or "jitter" in name}
        config = kind(**{name: value for name, value in sizes.items() if has_field(default, name)})
        with torch.device("meta"):
            count = model_class(config).num_parameters()
        if count > LARGEST:
            raise ValueError(f"{count} parameters")
        torch.manual_seed(0)
        model = model_class(config).float()
        with torch.no_grad():
            model(input_ids=torch.arange(5, 17).view(2, 6), use_cache=False)
    except Exception as error:
        if family in FITTING:
            raise
        pytest.skip(f"the sizes of this test make no model of this family: {error}"[:100])
    return model


@pytest.fixture
def step(make_config, tokenizer, family):
    """Gradient norm, loss and mean S_t of one step over completions of many lengths."""
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "q" * (1 + 2 * i)}], "answer": "1"} for i in range(8)]
    )

    def rollouts(prompts, trainer):
        render = tokenizer.apply_chat_template
        return {
            "prompt_ids": [render(p, add_generation_prompt=True, return_dict=True)["input_ids"] for p in prompts],
            "completion_ids": [
                tokenizer(f"{i % 4}" * (1 + i % 3) + p[-1]["content"])["input_ids"] for i, p in enumerate(prompts)
            ],
            "logprobs": None,
        }

    def run(**options) -> list[float]:
        sizes = {"max_steps": 1, "max_completion_length": 16, "max_reprompt_len": 400, "max_grad_norm": 1e9}
        config = make_config(**sizes, distillation_topk=None, **options)
        model = build_tiny(family, tokenizer)
        trainer = CreditTrainer(
            model, length_verdicts, config, rows, processing_class=tokenizer, rollout_func=rollouts
        )
        trainer.train()
        logged = trainer.state.log_history[0]
        return [logged[name] for name in ("grad_norm", "loss", "credit/s_mean")]

    return run


def unless_refused(step, reason: str, **options) -> list[float] | None:
    """Result of a step, or None if the trainer refuses the model for this reason."""
    try:
        return step(**options)
    except ValueError as error:
        if reason not in str(error):
            raise
        return None


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_TRAINED))
def test_family_trains_alike_in_each_layout_or_is_refused(step, family):
    expected = unless_refused(step, "The logits of")  # of an encoder, or with absolute positions
    if expected is None:
        return
    close = pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert step(per_device_train_batch_size=4, gradient_accumulation_steps=2) == close
    assert unless_refused(step, "cannot be packed", packed=True) in (None, close)
