"""Another model as the teacher, with its own dtype, quantisation and adapter."""

from __future__ import annotations

import json
import math
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from credit_trl.config import CreditConfig
from credit_trl.teacher.models import BASE_SLOT, OwnModelTeacher, Teacher, TrustRegionTeacher, make_teacher
from credit_trl.teacher.sharding import full_shape, is_zero3, place_frozen

SOURCE_FILE = "teacher.json"


@dataclass(frozen=True)
class TeacherSource:
    """Where the weights of an external teacher come from."""

    name: str  # on the hub, or path
    revision: str | None = None  # branch, tag or commit; None for the default branch
    adapter: str | None = None  # PEFT adapter
    init_kwargs: dict[str, Any] = field(default_factory=dict)  # of `from_pretrained`
    trust_remote_code: bool = False  # whether the repository's own code may run

    @classmethod
    def of(cls, config: CreditConfig) -> TeacherSource:
        return cls(
            config.teacher_model_name_or_path,
            config.teacher_model_revision,
            config.teacher_adapter_name_or_path,
            dict(config.teacher_model_init_kwargs or {}),
            config.trust_remote_code,
        )

    def load(self, accelerator: Accelerator) -> PreTrainedModel:
        """Load the model in the dtype of its files, unless `init_kwargs` has another, without gradients."""
        options = {"dtype": "auto", "trust_remote_code": self.trust_remote_code, **self.init_kwargs}
        if "quantization_config" in options:  # quantised weights cannot be moved between devices
            options.setdefault("device_map", {"": accelerator.device})
        model = AutoModelForCausalLM.from_pretrained(self.name, revision=self.revision, **options)
        if self.adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, self.adapter)
        return model.requires_grad_(False)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer beside the weights."""
        try:
            return AutoTokenizer.from_pretrained(
                self.name, revision=self.revision, trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"The teacher {self.name!r} has no tokenizer that loads ({error}), so its vocabulary cannot be "
                "compared with the policy's. Save the tokenizer beside its weights."
            ) from error


class ModelTeacher(OwnModelTeacher):
    """Teacher with weights of its own that never change.

    It computes in its own dtype; under FSDP2 and DeepSpeed in that of the run's configuration. Quantized weights are
    whole on every process. A checkpoint stores where the weights come from. See `OwnModelTeacher` for the arguments.
    """

    def __init__(
        self, student: nn.Module, accelerator: Accelerator, source: TeacherSource, offload: bool = False
    ) -> None:
        self.source, model = source, source.load(accelerator)
        self.commit = getattr(model.config, "_commit_hash", None)
        stays = offload or getattr(model, "is_quantized", False)  # quantized weights stay where they were loaded
        super().__init__(student, accelerator, model if stays else place_frozen(model, accelerator), offload)

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.accelerator.device.type, enabled=False)

    def drift(self) -> float:
        """NaN: the parameters of another model have no counterpart in the policy."""
        return math.nan

    def save(self, directory: str | Path, writes: bool) -> None:
        if writes:
            (Path(directory) / SOURCE_FILE).write_text(json.dumps(self._identity()))

    def load(self, directory: str | Path) -> None:
        path = Path(directory) / SOURCE_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"The checkpoint {directory} has no {SOURCE_FILE}: its run had another `teacher_model_kind`. Resume "
                "with that, or start a new run from its weights."
            )
        saved, own = json.loads(path.read_text()), self._identity()
        for name in own.keys() & saved.keys():
            if saved[name] != own[name] and (name != "commit" or None not in (saved[name], own[name])):
                raise ValueError(
                    f"{path} was saved with the teacher's {name} {saved[name]!r}, and this run has {own[name]!r}. "
                    "Resume with the checkpoint's `teacher_model_name_or_path` and `teacher_model_revision`."
                )

    def _identity(self) -> dict[str, Any]:
        identity = {name: asdict(self.source)[name] for name in ("name", "revision", "adapter")}
        return identity | {"commit": self.commit}


def build_teacher(
    config: CreditConfig, student: nn.Module, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase
) -> Teacher:
    """The teacher of a configuration, before the policy is wrapped for distributed training.

    Raises:
        ValueError: see `make_teacher` and `check_same_vocabulary`.
    """
    kind, offload = config.teacher_model_kind, config.teacher_offload
    if kind != "model":
        return make_teacher(kind, student, accelerator, offload)
    source = TeacherSource.of(config)
    _check_placement(source, accelerator, offload)
    check_same_vocabulary(tokenizer, source.tokenizer(), source.name)
    teacher = ModelTeacher(student, accelerator, source, offload)
    own, others = (
        full_shape(m.get_output_embeddings().weight)[0] for m in (student, teacher.unwrapped(teacher.model))
    )
    if others < own:
        raise ValueError(
            f"The teacher {source.name!r} has {others} rows in its output embeddings, fewer than the policy's {own}. "
            "Use a teacher with at least the policy's vocabulary."
        )
    return teacher


def _check_placement(source: TeacherSource, accelerator: Accelerator, offload: bool) -> None:
    is_quantized = "quantization_config" in source.init_kwargs
    if offload and accelerator.distributed_type in ("FSDP", "DEEPSPEED"):
        raise ValueError(
            "`teacher_offload=True` needs an unsharded teacher, and FSDP and DeepSpeed shard it (use their "
            "configuration to offload it). Set `teacher_offload=False`."
        )
    if offload and is_quantized:
        raise ValueError(
            "`teacher_offload=True` moves the teacher's weights between devices, and quantized weights cannot be "
            "moved. Remove one of `teacher_offload` and the `quantization_config` of `teacher_model_init_kwargs`."
        )
    if is_quantized and is_zero3(accelerator):
        raise ValueError(
            "Under ZeRO-3 transformers loads no quantized model onto a device. Use FSDP2 or ZeRO-2, or remove the "
            "`quantization_config` of `teacher_model_init_kwargs`."
        )


def build_base(config: CreditConfig, teacher: Teacher, student: nn.Module, accelerator: Accelerator) -> Teacher | None:
    """The initial policy that rehearsal reads, that of a trust region where there is one; None without rehearsal."""
    if not config.teacher_rehearsal:
        return None
    if isinstance(teacher, TrustRegionTeacher):
        return teacher.base
    return make_teacher("base", student, accelerator, config.teacher_offload, BASE_SLOT)


def check_same_vocabulary(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str) -> None:
    """Check that the tokenizers of the policy and of the teacher called `name` give every id the same token.

    Raises:
        ValueError: they differ; the message has the first differing id.
    """
    ours, theirs = ({i: token for token, i in one.get_vocab().items()} for one in (own, other))
    differing = [i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)]
    if differing:
        first = min(differing)
        raise ValueError(
            f"The teacher {name!r} has another vocabulary than the policy: the first differing id is {first}, "
            f"{ours.get(first)!r} for the policy and {theirs.get(first)!r} for the teacher ({len(differing)} of "
            f"{len(ours)} ids differ). Use a teacher with the policy's tokenizer, or TRL's GOLD, which distils across "
            "tokenizers."
        )
