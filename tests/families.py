"""Small random models of several families, with different heads and layers."""

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tables import tables_of

SMALL, FAMILIES = (tables_of(__file__)[name] for name in ("small", "families"))
CLASSES = {"Qwen3 tied": "Qwen3", "Gemma3": "Gemma3Text"}


def build_family(tokenizer: PreTrainedTokenizerFast, family: str) -> PreTrainedModel:
    """Build the random model of a family of `FAMILIES`, the same in every call."""
    name = CLASSES.get(family, family)
    sizes = {"vocab_size": len(tokenizer), "initializer_range": 0.3, **SMALL, **FAMILIES[family]}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = getattr(transformers, f"{name}Config")(**sizes, **ids)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    return model
