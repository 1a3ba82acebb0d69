"""Tasks of `trl credit-quickstart`: the embedded task, and tool choice in English with SmolLM2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from credit_trl.cli.tool_choice_base import WarmUp

# Options of `CreditConfig` that differ from its defaults.
_COMMON: dict[str, Any] = {
    "lr_scheduler_type": "constant_with_warmup",
    "teacher_update_rate": 0.02,
    "success_feedback_template": None,  # SDPO's wording for all feedback, which the bases were pretrained to read
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


@dataclass(frozen=True)
class QuickstartTask:
    """A task with its model, settings and the parts of its report.

    Args:
        load: `(world) -> (model, tokenizer)`, the base in fp32.
        defaults: options of `CreditConfig`.
        groups: groups of held-out prompts and their titles in the report.
        words: token classes of the report's table, besides "generic".
        test_rows: options of the task's `build` for the held-out prompts.
        evaluations: evaluations during training, those before the first and after the last step included.
        evaluation_batch: responses sampled at once by an evaluation.
        scored: prompts, and responses to each, of the table of S_t.
        threads: torch threads; 0 keeps torch's choice.
        opening: beginning of a response in a normal form, for the frame rate; None for tasks without openings.
    """

    name: str
    load: Callable[[str], tuple[Any, Any]]
    defaults: Mapping[str, Any]
    groups: Mapping[str, str]
    words: tuple[str, ...]
    test_rows: Mapping[str, int]
    evaluations: int
    evaluation_batch: int
    scored: tuple[int, int]
    threads: int
    opening: Callable[[str], str] | None = None


def quickstart_task(model: str) -> QuickstartTask:
    """The task of a model: `"quickstart"` or `"smollm2"`."""
    if model not in ("quickstart", "smollm2"):
        raise ValueError(f"The quickstart has the models quickstart and smollm2, not {model!r}.")
    return _embedded() if model == "quickstart" else _smollm2()


def _embedded() -> QuickstartTask:
    """16 prompts of 4 rollouts per step; learning rate and its schedule for half a million parameters.

    A frozen teacher does not unlearn to read feedback as an average of the policy does. With reverse KL and JSD a cue
    could stay unlearnt (seeds 100 to 102): where the policy's probability of the right topic has become small, their
    gradients vanish, that of forward KL does not.
    """
    from credit_trl.tasks import quickstart

    options = {
        "max_steps": 130,
        "per_device_train_batch_size": 64,
        "num_generations": 4,
        "max_completion_length": 32,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 30},
        "warmup_steps": 10,
        "teacher_model_kind": "base",
        "distillation_alpha": 0.0,
        "scoring_batch_tokens": 4096,  # the states of a pass stay in the cache of a core
        "bf16": False,
    }
    return QuickstartTask(
        name=quickstart.TASK,
        load=lambda world: quickstart.load_model(world=world),
        defaults={**_COMMON, **options},
        groups={name: f"{name} cues" for name in ("known", "unknown", "holdout")},
        words=("cue", "topic", "tool", "city"),
        test_rows={"rows_per_cue": 4},
        evaluations=5,
        evaluation_batch=288,
        scored=(32, 2),
        threads=1,  # more gain little for this model
    )


def _smollm2() -> QuickstartTask:
    """8 prompts of 2 rollouts per step; the teacher is the base and reads the feedback alone.

    With a demonstration the teacher would only have to copy. In a run with an averaged teacher and a base that opens
    some answers under feedback with a sentence, openings spread and the reward fell (`examples/smollm/README.md`).
    """
    from credit_trl.cli.tool_choice_base import has_fast_bf16
    from credit_trl.tasks import tool_choice

    options = {
        "max_steps": 40,
        "per_device_train_batch_size": 16,
        "num_generations": 2,
        "max_completion_length": 24,
        "learning_rate": 7e-5,
        "warmup_steps": 3,
        "teacher_model_kind": "base",
        "use_successful_as_teacher": False,
        "scoring_packed": True,  # prompts are longer than answers, and packed passes read each prompt once
        "update_packed": True,
        "bf16": has_fast_bf16("cpu"),
    }
    return QuickstartTask(
        name="tool_choice",
        load=load_warmed_up,
        defaults={**_COMMON, **options},
        groups={"argument": "new arguments", "request": "new requests"},
        words=("tool", "argument", "opening"),
        test_rows={"rows_per_tool": 8},
        evaluations=3,
        evaluation_batch=96,
        scored=(16, 1),
        threads=0,
        opening=tool_choice.opening,
    )


def load_warmed_up(world: str, settings: WarmUp | None = None) -> tuple[Any, Any]:
    """Model in fp32 and tokenizer of SmolLM2 after its warm-up on the task's form; prints what the base can do."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from credit_trl.cli.tool_choice_base import describe_base, has_fast_bf16, warmed_up_base
    from credit_trl.tasks.model_names import model_path

    if world != "plain":
        raise ValueError(f"--world {world}: SmolLM2 has the world plain only.")
    if not has_fast_bf16("cpu"):
        print("This CPU is slow in bf16: SmolLM2 is trained in fp32, which takes about twice as long.", flush=True)
    directory = warmed_up_base(model_path("smollm2"), settings)
    print(describe_base(directory), flush=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(directory)
