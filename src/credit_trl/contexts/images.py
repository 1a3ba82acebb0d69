"""Images of a prompt: the text that stands for them, and the tensors that the model reads beside its token ids.

The processor of the model is called once for each distinct list of images, with nothing else. `ContextBuilder` then
encodes the prompt as any text, so that the processor never sees z: a placeholder in z stays text.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, IterableDataset
from jaxtyping import Int
from torch import Tensor

from credit_trl.contexts.prompts import check_local_images
from credit_trl.rollout.batch import content_key

# Outputs of processors that TRL passes on. Others, such as masks of cross-attention, depend on the whole prompt.
_IMAGE_INPUTS = {
    *"pixel_values image_grid_thw pixel_attention_mask spatial_shapes image_sizes image_position_ids".split()
}
_TYPE_INPUTS = ("mm_token_type_ids", "token_type_ids")
_MARK = "\x04"  # between the images of a text that the processor expands


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt as the model reads them."""

    tensors: dict[str, Tensor]  # first dimension: images, tiles or patches
    modalities: dict[int, int]  # token id -> modality, of tokens that are not text
    types_name: str | None  # name of the model's input with the modality of each token, if it has one


torch.serialization.add_safe_globals([PromptImages])  # checkpoints hold rollouts


class _ReadImages(NamedTuple):
    """A list of images, and what the processor returned for it."""

    images: Sequence[Any]
    inputs: PromptImages
    texts: list[str]  # that stand for each image in an expanded prompt


class ImageReader:
    """Reads lists of images with the processor of a model, each once until `clear`."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self._read: dict[str, _ReadImages] = {}

    @property
    def placeholder_ids(self) -> set[int]:
        """Token ids that stand for an image in a rendered prompt or in an expanded one."""
        tokenizer = self.processor.tokenizer
        ids = {tokenizer.convert_tokens_to_ids(self.processor.image_token)}
        ids.add(getattr(self.processor, "image_token_id", None))
        ids.add(getattr(tokenizer, "image_token_id", None))
        return ids - {None}

    def clear(self) -> None:
        self._read.clear()

    def read(self, images: Sequence[Any]) -> PromptImages | None:
        """Inputs of the model for the images of a prompt; None without images.

        Raises:
            ValueError: the processor returns inputs that cannot be combined with a longer text.
        """
        return self._cached(images).inputs if images else None

    def sources(self, inputs: PromptImages) -> Sequence[Any]:
        """The images that were read as `inputs`."""
        return next(cached.images for cached in self._read.values() if cached.inputs is inputs)

    def expand(self, text: str, images: Sequence[Any]) -> str:
        """A rendered prompt in which each placeholder is replaced by the text that stands for its image.

        Raises:
            ValueError: the text does not have one placeholder for each image.
        """
        if not images:
            return text
        expanded, *pieces = text.split(self.processor.image_token)
        if len(pieces) != len(images):
            raise ValueError(
                f"The chat template renders {len(pieces)} placeholders {self.processor.image_token!r} for "
                f"{len(images)} images. Use one that renders each image part once, and texts without the placeholder."
            )
        for image_text, piece in zip(self._cached(images).texts, pieces, strict=True):
            expanded += image_text + piece
        return expanded

    def encode(self, text: str, images: Sequence[Any] = ()) -> list[int]:
        """Token ids of a rendered prompt as TRL forms them. Without `images`, each placeholder stays one token."""
        tokenizer = self.processor.tokenizer
        has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return tokenizer(self.expand(text, images), add_special_tokens=not has_bos)["input_ids"]

    def _cached(self, images: Sequence[Any]) -> _ReadImages:
        key = " ".join(map(content_key, images))
        if key not in self._read:
            self._read[key] = self._process(images)
        return self._read[key]

    def _process(self, images: Sequence[Any]) -> _ReadImages:
        recorder = _Recorder(self.processor.tokenizer)
        processor = copy.copy(self.processor)
        processor.tokenizer = recorder
        text = _MARK.join([processor.image_token] * len(images))
        outputs = processor(images=[list(images)], text=[text], return_tensors="pt")
        ids = outputs.pop("input_ids")[0].tolist()
        outputs.pop("attention_mask", None)
        name = next((name for name in _TYPE_INPUTS if name in outputs), None)
        types = outputs.pop(name)[0].tolist() if name else ()
        if unknown := sorted(set(outputs) - _IMAGE_INPUTS):
            raise ValueError(
                f"`{type(self.processor).__name__}` returns {', '.join(unknown)}, which cannot be formed for the "
                "longer prompt of the teacher. Set `distillation_weight=0` (GRPO), or use a model of another family."
            )
        modalities = {token: modality for token, modality in zip(ids, types, strict=False) if modality}
        inputs = PromptImages(dict(outputs), modalities, name)
        return _ReadImages(images, inputs, recorder.text.split(_MARK))


class _Recorder:
    """A tokenizer that keeps the last text that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: list[str], **options: Any) -> Any:
        self.text = text[0]
        return self.tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def with_local_images(dataset: Any) -> Any:
    """A dataset, or a dictionary of them, of which no image is an address, that `datasets` would fetch with its row.

    Rows of a stream with typed images are checked when they are read, before they are decoded. Prompts of a `Dataset`
    are checked with their form, and transformed rows when they are read.

    Raises:
        ValueError: an image of a column is an address.
    """
    if isinstance(dataset, dict):
        return {name: with_local_images(rows) for name, rows in dataset.items()}
    if isinstance(dataset, IterableDataset) and "Image(" in str(dataset.features):
        return dataset.decode(False).map(_local_row, features=dataset.features).decode()
    if isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
        _check_image_columns(dataset)
    return dataset


def _local_row(row: dict[str, Any]) -> dict[str, Any]:
    check_local_images(row.get("prompt"), [row.get("image"), row.get("images")])
    return row


def _check_image_columns(dataset: Dataset) -> None:
    for name in {"image", "images"} & set(dataset.column_names):
        for table in dataset.select_columns(name).with_format("arrow").iter(1000):
            images = table[name].combine_chunks()
            while pa.types.is_list(images.type):
                images = images.flatten()
            if pa.types.is_struct(images.type):  # of `datasets.Image`
                images = pc.if_else(images.field("bytes").is_null(), images.field("path"), None)
            check_local_images([], images.to_pylist())


def thumbnail(image: Any, size: int = 256) -> Any:
    """A copy of an image of Pillow with at most `size` pixels a side; another value unchanged."""
    if not hasattr(image, "thumbnail"):
        return image
    picture = image.convert("RGB")
    picture.thumbnail((size, size))
    return picture


def joined_images(
    images: Sequence[PromptImages], ids: Int[Tensor, "B L"], *, with_pixels: bool = True
) -> dict[str, Tensor]:
    """Inputs of the model for several prompts, in the order of their rows.

    Args:
        images: of the rows that have some, at least one.
        ids: of all rows, padded; a model may read the modality of each.
        with_pixels: include what only the vision tower reads.
    """
    inputs = {}
    for name in images[0].tensors:
        if with_pixels or not name.startswith("pixel"):
            inputs[name] = _joined([prompt_images.tensors[name] for prompt_images in images])
    types_name = images[0].types_name
    if types_name is not None:
        types = torch.zeros_like(ids)
        for prompt_images in images:
            for token, modality in prompt_images.modalities.items():
                types[ids == token] = modality
        inputs[types_name] = types
    return inputs


def _joined(parts: list[Tensor]) -> Tensor:
    """Parts along the first dimension; the others are padded with 0, as processors pad images and tiles."""
    sizes = np.max([part.shape[1:] for part in parts], axis=0).tolist()
    padded = []
    for part in parts:
        padded_part = part.new_zeros((len(part), *sizes))
        padded_part[tuple(map(slice, part.shape))] = part
        padded.append(padded_part)
    return torch.cat(padded)


def trl_image_fields(batch: dict[str, Any]) -> dict[str, Any]:
    """The images of a micro-batch as TRL's forward pass reads them; nothing where it has none.

    TRL's own fields cannot be split for every mixture of prompts with and without images. Here all images belong to
    the first sample: TRL reads the micro-batch in one slice.
    """
    images = batch.get("prompt_images") or []
    present = [prompt_images for prompt_images in images if prompt_images is not None]
    if not present:
        return {}
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    fields: dict[str, Any] = {}
    for name, values in joined_images(present, ids).items():
        fields[name] = values.to(ids.device)
    pixels = fields["pixel_values"]
    count = len(fields.get("image_grid_thw", pixels))
    zeros = [0] * (len(images) - 1)
    fields["num_images"] = [count, *zeros]
    fields["num_tiles"] = [len(pixels), *zeros]
    return fields
