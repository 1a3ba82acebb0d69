"""Inputs of a forward pass whose prompts have images; the vision tower encodes each list of images once."""

import inspect
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from credit_trl.contexts.images import PromptImages, joined_images
from credit_trl.teacher.causal_lm import backbone, unwrap_adapters
from credit_trl.teacher.packing import to_device


def image_inputs(
    model: nn.Module,
    ids: Sequence[Sequence[int]],
    images: Sequence[PromptImages | None],
    device: torch.device,
    encoded: dict[int, Any],
) -> dict[str, Any]:
    """Inputs beside the token ids for rows that are padded on the right; nothing where no row has images.

    The model forms its own mask and positions: tokens of an image may see each other, and have two-dimensional
    positions. Call it where the backbone is called, as it runs the tower, on one list of images at a time: a pass
    holds the tower's activations of one prompt, whatever its budget of tokens.

    Args:
        ids: of each row, without padding.
        encoded: the tower's outputs by the identity of the images, to which new ones are added. Keep it while neither
            images nor weights change.

    Raises:
        ValueError: the model has no vision tower.
    """
    present = [prompt_images for prompt_images in images if prompt_images is not None]
    if not present:
        return {}
    tower = backbone(model)
    if not hasattr(tower, "get_image_features"):
        raise ValueError(
            f"The prompts have images, and `{type(unwrap_adapters(model)).__name__}` has no vision tower. Use a "
            "vision-language model, also as `teacher_model_name_or_path`."
        )
    takes_features = "mm_encoder_outputs" in inspect.signature(tower.forward).parameters
    rows = list(map(torch.tensor, ids))
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    inputs: dict[str, Any] = joined_images(present, padded, with_pixels=not takes_features)
    inputs["attention_mask"] = (padded >= 0).long()
    for name, values in inputs.items():
        inputs[name] = to_device(values, device)
    if takes_features:
        outputs = []
        for prompt_images in present:
            if id(prompt_images) not in encoded:
                encoded[id(prompt_images)] = _encode(tower, prompt_images, device)
            outputs.append(encoded[id(prompt_images)])
        inputs["mm_encoder_outputs"] = {"image": _joined_features(outputs)}
    return inputs


def _encode(tower: nn.Module, images: PromptImages, device: torch.device) -> Any:
    """Outputs of the tower for one list of images."""
    parameters = inspect.signature(tower.get_image_features).parameters
    inputs = {}
    for name, values in images.tensors.items():
        if name in parameters:
            inputs[name] = to_device(values, device)
    return tower.get_image_features(**inputs, return_dict=True)


def _joined_features(outputs: list[Any]) -> Any:
    """Outputs of the tower for several lists of images as one: features of each image, and of each layer."""
    kind = type(outputs[0])
    pooled = _joined([output.pooler_output for output in outputs])
    layers = getattr(outputs[0], "deepstack_features", None)
    if layers is None:
        return kind(pooler_output=pooled)
    joined_layers = []
    for layer in range(len(layers)):
        joined_layers.append(_joined([output.deepstack_features[layer] for output in outputs]))
    return kind(pooler_output=pooled, deepstack_features=joined_layers)


def _joined(features: list[Any]) -> Any:
    """Features as one tensor, or as one list of the features of each image."""
    if isinstance(features[0], Tensor):
        return torch.cat(features)
    return list(chain.from_iterable(features))


def zero_of_tower(model: nn.Module) -> Tensor | float:
    """0 with a gradient of 0 for every trained parameter outside of the language model.

    DDP waits for the gradients of the tower also on a process whose micro-batch has no images.
    """
    causal_lm = unwrap_adapters(model)
    text_parameters: set[int] = set()
    for part in (causal_lm.get_decoder(), causal_lm.get_output_embeddings()):
        text_parameters.update(map(id, part.parameters()))
    zero = 0.0
    for parameter in causal_lm.parameters():
        if parameter.requires_grad and id(parameter) not in text_parameters:
            zero = zero + parameter.flatten()[0] * 0.0
    return zero
