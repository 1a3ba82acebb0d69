"""Tiny random vision-language models of several families with their processors; no hub, no torchvision."""

import importlib
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn
from transformers import PreTrainedModel

from credit_trl import Verdict
from tables import tables_of
from tiny import build_tokenizer

TABLES = tables_of(__file__)
FAMILIES = TABLES["families"]
SPECIAL = (*TABLES["special"].split(), *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)))
SIZES = ((24, 16), (16, 24), (32, 32), (24, 24))


def build_vlm(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **processor_parts: Any
) -> tuple[PreTrainedModel, Any]:
    """The random model of a family, to which images matter, and its processor, with other parts where given."""
    family_table = TABLES["engine" if processor_parts else "families"][family]
    # Two line breaks are one token, as in real vocabularies.
    tokenizer = build_tokenizer(merges=[("Ċ", "Ċ")], special=SPECIAL)
    tokenizer.chat_template = TABLES["template"].replace("PLACEHOLDER", family_table["placeholder"])
    if family == "Gemma3":
        for name, token in (("boi", "<boi>"), ("eoi", "<eoi>"), ("image", "<soft>")):
            setattr(tokenizer, f"{name}_token", token)
            setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    module, name = family_table["images"].split(":")
    module = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    pixels = getattr(module, f"{name}ImageProcessorPil")(**family_table["pixels"])
    common = {"image_processor": pixels, "tokenizer": tokenizer, "chat_template": tokenizer.chat_template}
    processor = _unchecked(getattr(transformers, f"{family}Processor"))(
        **common, **family_table["processor"] | processor_parts
    )
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = (
        TABLES["common"] | family_table["text"] | ends | {"vocab_size": len(tokenizer), "tie_word_embeddings": False}
    )
    text = {name: value for name, value in text.items() if name not in family_table.get("without", ())}
    ids = {
        name: tokenizer.convert_tokens_to_ids(x) if x in SPECIAL else x for name, x in family_table["config"].items()
    }
    options = ids | {"text_config": text, "vision_config": dict(family_table["vision"]), "tie_word_embeddings": False}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**options, pad_token_id=tokenizer.pad_token_id)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            scale = 0.5 if "embed" in name else 0.2
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
        elif "norm" not in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module, 1.0 if family == "Gemma3" else 0.0)
    model.generation_config = transformers.GenerationConfig(**ends)
    return model.to(dtype), processor


def _norm(module: nn.Module, offset: float, states: torch.Tensor) -> torch.Tensor:
    """The norm in the dtype of the states; the family's own computes in fp32."""
    epsilon = getattr(module, "variance_epsilon", None) or module.eps
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + epsilon) * (offset + module.weight)


def _unchecked(cls: type) -> type:
    """The processor class without its check of the components' classes, which would need torchvision's."""
    return type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda self, *args, **kwargs: None})


def picture(seed: int, size: tuple[int, int] = (24, 16)) -> Image.Image:
    """Random pixels."""
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def rows(counts=(1, 0, 2, 1), sizes=SIZES, same_text: bool = False) -> list[dict[str, Any]]:
    """Dataset rows whose prompts have as many images as `counts` names."""
    image_rows = []
    for i, count in enumerate(counts):
        start = sum(counts[:i])
        images = [picture(100 + n, sizes[n % len(sizes)]) for n in range(start, start + count)]
        question = "What is it?" if same_text else f"What is {i}?"
        prompt = [{"role": "system", "content": "Look."}, {"role": "user", "content": question}]
        image_rows.append({"prompt": prompt, "answer": str(i), "images": images})
    return image_rows


def image_verdicts(completions, answer, **kwargs) -> list[Verdict]:
    """Verdicts that random models can satisfy, with feedback that has a placeholder as text."""
    texts = [completion[-1]["content"] for completion in completions]
    return [
        Verdict(float(len(text.encode()) % 2), f"<|image_pad|><image><boi> is no image, {right_answer}.")
        for text, right_answer in zip(texts, answer, strict=True)
    ]
