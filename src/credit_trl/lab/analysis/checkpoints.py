"""Policy, lagged teacher and tokenizer of one point of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.prompts import Prompt, chat_renderer
from credit_trl.evaluation.config import SamplingConfig
from credit_trl.evaluation.engines import encode_prompt
from credit_trl.evaluation.generation import end_of_turn_ids, generate_ids
from credit_trl.quickstart_model import model_path, naming_model
from credit_trl.rollout.thinking import ThinkingMarks, thinking_marks
from credit_trl.teacher.models import TEACHER_FILE, CopyTeacher, Teacher, make_teacher
from credit_trl.training.check_model import check_logits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """π_θ and π_ref of one point of a run."""

    name: str  # in maps and reports
    tokenizer: PreTrainedTokenizerBase  # of both models
    student: Teacher  # π_θ
    teacher: Teacher  # π_ref; the student itself for self-distillation without lag
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # such as `{"enable_thinking": False}`

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
        teacher: str = "live",
        device: str | torch.device | None = None,
        name: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Checkpoint:
        """Load a model, or a checkpoint of a run that started from it.

        Args:
            model: path, hub name, `"quickstart"` for the embedded model.
            checkpoint: `checkpoint-…` directory with full weights or adapters of `model`. The teacher that
                `CreditTrainer` saved there is loaded too.
            teacher: `teacher_model_kind` of the run. Where no teacher is saved, as with a final model, it is `model`
                for `"base"`, and else the policy, with a warning for `"ema"`.
            device: None takes the GPU if there is one.
            name: None takes the name of the checkpoint's directory, or of the model.

        Raises:
            ValueError: the model transforms its logits in an unsupported way; see `check_logits`.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        path = model_path(model)
        with naming_model(model):
            policy = _load_policy(path, checkpoint).to(device).eval()
        one_process = SimpleNamespace(distributed_type="NO", autocast=nullcontext)
        check_logits(policy, one_process)
        has_tokenizer = checkpoint is not None and (Path(checkpoint) / "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint if has_tokenizer else path)
        student = lagged = Teacher(policy)
        if checkpoint is not None and (Path(checkpoint) / TEACHER_FILE).exists():
            lagged = make_teacher("ema", policy)  # in fp32, which also holds the weights of other kinds
            lagged.load(checkpoint)
        elif checkpoint is not None and teacher == "base":
            lagged = CopyTeacher(policy, None, _load_policy(path, None).to(device, policy.dtype))
        elif checkpoint is not None and teacher == "ema":
            logger.warning(
                "%s holds no teacher, so its policy is the teacher. Name a `checkpoint-…` folder of the run.",
                checkpoint,
            )
        default = Path(checkpoint).name if checkpoint is not None else model.rstrip("/").split("/")[-1]
        return cls(name or default, tokenizer, student, lagged, chat_template_kwargs or {})

    @property
    def marks(self) -> ThinkingMarks:
        """See `thinking_marks`."""
        return thinking_marks(self.tokenizer, self.chat_template_kwargs.get("chat_template"))

    def context_builder(self, config: CreditConfig) -> ContextBuilder:
        """Builder of the teacher's and the contrast prompts of this checkpoint."""
        render = chat_renderer(self.tokenizer, **self.chat_template_kwargs)
        return ContextBuilder(self.tokenizer, config, self.end_ids(), render, marks=self.marks)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt as the student reads it."""
        return encode_prompt(self.tokenizer, prompt, **self.chat_template_kwargs)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, batch_size: int = 64
    ) -> list[list[int]]:
        """Sample a completion of each prompt (token ids) from the student, see `evaluation.generate_ids`."""
        with self.student.active() as model:
            return generate_ids(model, prompts, sampling, self.end_ids(), batch_size=batch_size)

    def end_ids(self) -> list[int]:
        """Ids that end a response, sorted."""
        return end_of_turn_ids(self.student.unwrapped(self.student.student), self.tokenizer)


def _load_policy(path: str, checkpoint: str | Path | None) -> nn.Module:
    has_adapters = checkpoint is not None and (Path(checkpoint) / "adapter_config.json").exists()
    weights = path if checkpoint is None or has_adapters else checkpoint
    model = AutoModelForCausalLM.from_pretrained(weights, dtype="auto")
    return PeftModel.from_pretrained(model, str(checkpoint)) if has_adapters else model
