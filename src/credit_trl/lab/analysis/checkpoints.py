"""A model as it stands at some point of a run: the policy, its lagged teacher, and their tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from credit_trl.contexts.prompts import Prompt
from credit_trl.tasks.quickstart_model import model_path
from credit_trl.teacher.models import ADAPTER_NAME, TEACHER_FILE, CopyTeacher, Teacher
from credit_trl.training import adaptive
from credit_trl.training.checks import check_logits


@dataclass(frozen=True)
class Checkpoint:
    """π_θ and π_ref of one point of a run.

    Args:
        name: what maps call it.
        tokenizer: of both models.
        student: π_θ.
        teacher: π_ref; the student itself is exact self-distillation.
        chat_template_kwargs: passed to the chat template (`{"enable_thinking": False}`).
        contrastive_coef: λ, where the run adapts it and left it here.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    student: Teacher
    teacher: Teacher
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    contrastive_coef: float | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        teacher: nn.Module | None = None,
        name: str = "model",
        chat_template_kwargs: dict[str, Any] | None = None,
        contrastive_coef: float | None = None,
    ) -> Checkpoint:
        """A checkpoint of models that are in memory; without a teacher the model is its own."""
        device = next(model.parameters()).device
        student = Teacher(model, OneProcess(device))
        # The teacher computes in the student's precision, as in training.
        lagged = student if teacher is None else CopyTeacher(model, OneProcess(device), teacher)
        return cls(name, tokenizer, student, lagged, chat_template_kwargs or {}, contrastive_coef)

    @classmethod
    def load(
        cls,
        model: str,
        checkpoint: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        name: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Checkpoint:
        """Read a model, or a checkpoint of a run that started from it.

        Args:
            model: a path, a name on the hub, or `"quickstart"` for the model that the package brings.
            checkpoint: a `checkpoint-…` directory: full weights or adapters of `model`. The teacher that
                `CreditTrainer` saved there is read too, and an adapted λ; without a teacher the policy is its own.
            device: by default the GPU, if there is one.
            dtype: of the weights; an averaged teacher stays in fp32.
            name: by default that of the checkpoint's directory, or of the model.

        Raises:
            FileNotFoundError: `checkpoint` is no directory with a model in it.
            ValueError: the model does more to its logits than is read here; see `checks.check_logits`.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        path = model_path(model)
        policy = _load_policy(path, checkpoint, dtype).to(device).eval()
        check_logits(policy, OneProcess(device))
        own = checkpoint is not None and (Path(checkpoint) / "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint if own else path)
        teacher = None
        if checkpoint is not None and (Path(checkpoint) / TEACHER_FILE).exists():
            teacher = _load_teacher(policy, Path(checkpoint) / TEACHER_FILE)
        default = Path(checkpoint).name if checkpoint is not None else model.rstrip("/").split("/")[-1]
        return cls.of(
            policy,
            tokenizer,
            teacher=teacher,
            name=name or default,
            chat_template_kwargs=chat_template_kwargs,
            contrastive_coef=None if checkpoint is None else _adapted_coefficient(Path(checkpoint)),
        )

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The text of a conversation up to the generation prompt."""
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self.chat_template_kwargs
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """The student's context: token ids of a prompt, as TRL encodes it."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        return self.tokenizer(self.render(prompt), add_special_tokens=False)["input_ids"]

    def describe(self) -> str:
        """One line: parameters, device, and whether the teacher lags."""
        size = sum(parameter.numel() for parameter in self.student.student.parameters())
        lag = "its own teacher" if self.teacher is self.student else "a lagged teacher"
        return f"{self.name}: {size:,} parameters on {self.student.accelerator.device}, {lag}"

    def end_ids(self) -> set[int]:
        """Ids that end a response."""
        model = self.student.unwrapped(self.student.student)
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends = ends if isinstance(ends, Sequence) else [ends]
        return {i for i in (*ends, self.tokenizer.eos_token_id) if i is not None}


class OneProcess:
    """What `Teacher` asks of an accelerator, for a model on one device: no wrapping, no collectives."""

    native_amp = False
    distributed_type = "NO"
    state = SimpleNamespace(deepspeed_plugin=None)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()


def _load_policy(path: str, checkpoint: str | Path | None, dtype: str | torch.dtype) -> nn.Module:
    if checkpoint is None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    checkpoint = Path(checkpoint)
    if (checkpoint / "adapter_config.json").exists():
        from peft import PeftModel

        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=dtype), str(checkpoint))
    if not (checkpoint / "config.json").exists():
        raise FileNotFoundError(
            f"{checkpoint} holds neither config.json nor adapter_config.json: name a run's `checkpoint-…`."
        )
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)


def _adapted_coefficient(checkpoint: Path) -> float | None:
    path = checkpoint / adaptive.COEFFICIENT_FILE
    return float(json.loads(path.read_text("utf-8"))["contrastive_coef"]) if path.is_file() else None


def _load_teacher(policy: nn.Module, path: Path) -> nn.Module:
    """A copy of the policy with the weights of the teacher, in the dtype in which they were saved."""
    saved = load_file(path)
    names = {name: name.replace(f".{ADAPTER_NAME}", ".default") for name in saved}
    model = copy.deepcopy(policy)
    own = dict(model.named_parameters())
    if missing := [name for name in names.values() if name not in own]:
        raise ValueError(f"{path} holds weights that the model lacks, for example {missing[:3]}.")
    is_adapter = names.keys() != set(names.values())
    dtype = next(iter(saved.values())).dtype
    model = model if is_adapter else model.to(dtype)
    for name, weight in saved.items():
        own[names[name]].data = weight.to(own[names[name]].device)
    return model.requires_grad_(False).eval()
