"""Another model as the teacher, with its own dtype, quantisation and adapter."""

import json
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from credit_trl.config import CreditConfig
from credit_trl.teacher.models import CopyTeacher, Teacher, make_teacher
from credit_trl.teacher.sharding import full_shape, gathered, is_zero3, place_frozen

SOURCE_FILE = "teacher.json"


class ModelTeacher(CopyTeacher):
    """Teacher with weights of its own that never change.

    It computes in its own dtype; under FSDP2 and DeepSpeed in that of the run's configuration. Quantized weights are
    whole on every process. A checkpoint stores where the weights come from.
    """

    def __init__(self, student: nn.Module, accelerator: Accelerator, config: CreditConfig) -> None:
        name = config.teacher_model_name_or_path
        init_kwargs = config.teacher_model_init_kwargs or {}
        options = {"dtype": "auto", "trust_remote_code": config.trust_remote_code} | init_kwargs
        model_config = AutoConfig.from_pretrained(name, **teacher_place(config))
        # Quantized weights cannot be moved between devices.
        if "quantization_config" in init_kwargs or hasattr(model_config, "quantization_config"):
            if is_zero3(accelerator):
                raise ValueError(
                    "ZeRO-3 cannot partition the quantized weights of the teacher. Use FSDP2 or ZeRO-2, or a teacher "
                    "without a `quantization_config`."
                )
            options.setdefault("device_map", {"": accelerator.device})
        reads_images = hasattr(student.config, "vision_config") and hasattr(model_config, "vision_config")
        auto = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
        model = auto.from_pretrained(name, **options)
        model.requires_grad_(False)
        head_shape = full_shape(student.get_output_embeddings().weight)
        _pad_vocabulary(model, head_shape[0])
        commit = getattr(model.config, "_commit_hash", None)
        self.identity = {"name": name, "revision": init_kwargs.get("revision"), "commit": commit}
        if not getattr(model, "is_quantized", False):  # quantized weights stay where they were loaded
            model = place_frozen(model, accelerator)
        super().__init__(student, accelerator, model)

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, enabled=False)

    def named_weights(self) -> dict[str, Tensor]:
        """None are stored: they never change."""
        return {}

    def drift(self) -> float:
        """NaN: the parameters of another model have no counterpart in the policy."""
        return math.nan

    def save(self, directory: str | Path, writes: bool) -> None:
        if writes:
            (Path(directory) / SOURCE_FILE).write_text(json.dumps(self.identity))

    def load(self, directory: str | Path) -> None:
        """Check that the checkpoint has the same commit of the teacher, whose branch on the hub may have moved.

        A checkpoint of a teacher with another name passes: `resume_changes` decides about that.

        Raises:
            ValueError: the commit differs, or the revision where a commit is unknown.
        """
        path = Path(directory) / SOURCE_FILE
        saved: dict[str, Any] = {}
        if path.is_file():
            saved = json.loads(path.read_text())
        identity = self.identity
        has_commits = None not in (saved.get("commit"), identity["commit"])
        kind = "commit" if has_commits else "revision"
        if saved.get("name") == identity["name"] and saved[kind] != identity[kind]:
            raise ValueError(
                f"{path} was saved with the {kind} {saved[kind]!r} of the teacher {identity['name']!r}, and this run "
                f"has {identity[kind]!r}. Resume with `teacher_model_init_kwargs={{'revision': {saved[kind]!r}}}`."
            )


def teacher_place(config: CreditConfig) -> dict[str, Any]:
    """Options of the teacher's weights that its configuration and its tokenizer are loaded with too."""
    init_kwargs = config.teacher_model_init_kwargs or {}
    options = {"trust_remote_code": config.trust_remote_code}
    for name in ("revision", "subfolder", "token", "cache_dir"):
        if name in init_kwargs:
            options[name] = init_kwargs[name]
    return options


def build_teacher(
    config: CreditConfig, student: nn.Module, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase
) -> Teacher:
    """The teacher of a configuration, before the policy is wrapped for distributed training.

    Raises:
        ValueError: see `make_teacher` and `check_same_vocabulary`.
    """
    if config.teacher_model_kind != "model":
        return make_teacher(config.teacher_model_kind, student, accelerator)
    name = config.teacher_model_name_or_path
    check_same_vocabulary(tokenizer, AutoTokenizer.from_pretrained(name, **teacher_place(config)), name)
    return ModelTeacher(student, accelerator, config)


def _pad_vocabulary(model: PreTrainedModel, size: int) -> None:
    """Give the embeddings at least `size` rows, those of the policy, whose vocabulary may be padded.

    The new rows are the mean of the others, so that the teacher gives padding tokens the logit of an average token.
    """
    rows = full_shape(model.get_output_embeddings().weight)[0]
    if rows < size:
        model.resize_token_embeddings(size, mean_resizing=False)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            for parameter in layer.parameters():
                with gathered([parameter], write=True):
                    parameter.data[rows:] = parameter.data[:rows].mean(dim=0)


def check_same_vocabulary(
    policy_tokenizer: PreTrainedTokenizerBase, teacher_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Check that the tokenizers of the policy and of the teacher called `name` give every id the same token.

    Raises:
        ValueError: they differ; the message has the first differing id.
    """
    policy_tokens = _tokens_by_id(policy_tokenizer)
    teacher_tokens = _tokens_by_id(teacher_tokenizer)
    ids = policy_tokens.keys() | teacher_tokens.keys()
    differing = [i for i in ids if policy_tokens.get(i) != teacher_tokens.get(i)]
    if differing:
        first_id = min(differing)
        policy_token = policy_tokens.get(first_id)
        teacher_token = teacher_tokens.get(first_id)
        raise ValueError(
            f"The teacher {name!r} has another vocabulary than the policy: the first differing id is {first_id}, "
            f"{policy_token!r} for the policy and {teacher_token!r} for the teacher ({len(differing)} of "
            f"{len(policy_tokens)} ids differ). Use one with the policy's tokenizer, or TRL's GOLD, which needs no "
            "common one."
        )


def _tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}
