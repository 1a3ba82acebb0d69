"""Policy, lagged teacher and tokenizer of one point of a run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.prompts import Prompt, chat_renderer
from credit_trl.evaluation.config import SamplingConfig
from credit_trl.evaluation.generation import encode_prompt, end_of_turn_ids, generate_ids, pad_id
from credit_trl.tasks.model_names import model_path, naming_model
from credit_trl.teacher.models import ADAPTER_NAME, TEACHER_FILE, CopyTeacher, Teacher
from credit_trl.training.check_model import check_logits


@dataclass(frozen=True)
class Checkpoint:
    """π_θ and π_ref of one point of a run.

    Args:
        name: name in maps and reports.
        tokenizer: tokenizer of both models.
        student: π_θ.
        teacher: π_ref; the student itself for self-distillation without lag.
        chat_template_kwargs: arguments of the chat template (`{"enable_thinking": False}`).
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    student: Teacher
    teacher: Teacher
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        teacher: nn.Module | None = None,
        name: str = "model",
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Checkpoint:
        """Checkpoint of models in memory; without `teacher` the model is its own teacher."""
        student = Teacher(model)
        # The teacher computes in the student's precision, as in training.
        lagged = student if teacher is None else CopyTeacher(model, None, teacher)
        return cls(name, tokenizer, student, lagged, chat_template_kwargs or {})

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
        """Load a model, or a checkpoint of a run that started from it.

        Args:
            model: path, hub name, `"quickstart"` for the embedded model.
            checkpoint: `checkpoint-…` directory with full weights or adapters of `model`. The teacher that
                `CreditTrainer` saved there is loaded too; without it the policy is its own teacher.
            device: None takes the GPU if there is one.
            dtype: dtype of the weights; an averaged teacher stays in fp32.
            name: None takes the name of the checkpoint's directory, or of the model.

        Raises:
            ValueError: the model transforms its logits in an unsupported way; see `check_logits`.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        path = model_path(model)
        with naming_model(model):
            policy = _load_policy(path, checkpoint, dtype).to(device).eval()
        check_logits(policy, OneProcess())
        own = checkpoint is not None and (Path(checkpoint) / "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint if own else path)
        teacher = None
        if checkpoint is not None and (Path(checkpoint) / TEACHER_FILE).exists():
            teacher = _load_teacher(policy, Path(checkpoint) / TEACHER_FILE)
        default = Path(checkpoint).name if checkpoint is not None else model.rstrip("/").split("/")[-1]
        return cls.from_model(
            policy, tokenizer, teacher=teacher, name=name or default, chat_template_kwargs=chat_template_kwargs
        )

    def context_builder(self, config: CreditConfig) -> ContextBuilder:
        """Builder of the teacher's and the contrast prompts of this checkpoint."""
        render = chat_renderer(self.tokenizer, options=self.chat_template_kwargs)
        return ContextBuilder(self.tokenizer, config, self.end_ids(), render)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt as the student reads it."""
        return encode_prompt(self.tokenizer, prompt, **self.chat_template_kwargs)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, batch_size: int = 64
    ) -> list[list[int]]:
        """Sample a completion of each prompt (token ids) from the student, see `evaluation.generate_ids`."""
        with self.student.active() as model:
            return generate_ids(
                model,
                prompts,
                sampling,
                eos_token_ids=self.end_ids(),
                pad_token_id=pad_id(self.tokenizer),
                batch_size=batch_size,
            )

    def end_ids(self) -> list[int]:
        """Ids that end a response, sorted."""
        return end_of_turn_ids(self.student.unwrapped(self.student.student), self.tokenizer)


class OneProcess:
    """Stand-in for an accelerator on one device without mixed precision."""

    distributed_type = "NO"

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()


def _load_policy(path: str, checkpoint: str | Path | None, dtype: str | torch.dtype) -> nn.Module:
    if checkpoint is None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    checkpoint = Path(checkpoint)
    if (checkpoint / "adapter_config.json").exists():
        from peft import PeftModel

        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=dtype), str(checkpoint))
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)


def _load_teacher(policy: nn.Module, path: Path) -> nn.Module:
    """Copy of the policy with the saved weights of the teacher, in their saved dtype."""
    saved = load_file(path)
    names = {name: name.replace(f".{ADAPTER_NAME}", ".default") for name in saved}
    model = copy.deepcopy(policy)
    own = dict(model.named_parameters())
    if missing := [name for name in names.values() if name not in own]:
        raise ValueError(f"{path} has weights that the model does not have, for example {missing[:3]}.")
    is_adapter = names.keys() != set(names.values())
    dtype = next(iter(saved.values())).dtype
    model = model if is_adapter else model.to(dtype)
    for name, weight in saved.items():
        own[names[name]].data = weight.to(own[names[name]].device)
    return model.requires_grad_(False).eval()
