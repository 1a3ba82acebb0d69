"""What a `CreditConfig` may hold: ranges, choices, templates, combinations. Every error names the fix."""

from __future__ import annotations

import json
import math
import numbers
import re
import string
from dataclasses import fields
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING

from trl import GRPOConfig

from credit_trl.adaptive import CEILING, FLOOR

if TYPE_CHECKING:
    from credit_trl.config import CreditConfig

TEMPLATE_PLACEHOLDERS = {
    "reprompt_template": ("prompt", "solution", "feedback"),
    "solution_template": ("successful_previous_attempt",),
    "feedback_template": ("feedback_raw",),
}

_CHOICES = {
    "distillation_support": ("teacher_topk", "student_topk", "full", "sampled"),
    "distillation_tail": ("bucket", "renormalize"),
    "distillation_kernels": ("torch", "triton"),
    "contrastive_form": ("subtract", "guide"),
    "contrastive_source": ("batch", "dataset", "hard", "same_task", "none"),
    "contrastive_baseline": ("mean_log", "log_mean"),
    "contrastive_auto_quantity": ("kl", "s"),
    "contrastive_swap": ("input", "hint"),
    "teacher_hint": ("own", "foreign"),
    "teacher_model_kind": ("ema", "live", "base"),
    "teacher_context": ("solution", "think", "think+solution"),
    "on_verifier_error": ("raise", "skip"),
}

# Of transformers' options that are JSON, these may be the name of a file instead.
_JSON_OR_FILE = ("accelerator_config", "fsdp_config", "deepspeed")

# Sources that need another problem in the generation batch.
_FROM_BATCH = ("batch", "hard", "same_task")


def check_values(config: CreditConfig) -> None:
    """Each option by itself.

    Raises:
        ValueError: a value of another type or out of range, or a template that loses or lacks something.
    """
    _check_types(config)
    _check_json(config)
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(choices)}; got {getattr(config, name)!r}.")
    if config.distillation_kernels == "triton" and find_spec("triton") is None:
        raise ValueError(
            "`distillation_kernels='triton'` needs the package triton, which is not installed. torch's CUDA builds "
            "bring it along: install one, or set `distillation_kernels='torch'`."
        )
    _check_adapted(config) if config.contrastive_coef == "auto" else _check_coefficient(config)
    for name in ("distillation_weight", "distillation_alpha", "contrastive_plausibility"):
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise ValueError(f"`{name}` must be in [0, 1], got {getattr(config, name)}.")
    if not 0.0 <= config.contrastive_gate < 1.0:
        raise ValueError(
            f"`contrastive_gate` must be in [0, 1), got {config.contrastive_gate}: no total variation exceeds 1. For "
            "no contrast at all set `contrastive_coef=0`."
        )
    if not 0.0 < config.teacher_update_rate <= 1.0:
        raise ValueError(f"`teacher_update_rate` must be in (0, 1], got {config.teacher_update_rate}.")
    for name in ("contrastive_count", "distillation_topk", "max_reprompt_len", "scoring_batch_tokens"):
        if getattr(config, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {getattr(config, name)}.")
    for name in ("teacher_sync_steps", "distillation_chunk_size"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise ValueError(f"`{name}` must be at least 1 or None, got {getattr(config, name)}.")
    if config.verifier_timeout is not None and config.verifier_timeout <= 0.0:
        raise ValueError(f"`verifier_timeout` must be positive or None, got {config.verifier_timeout}.")
    if config.distillation_is_clip is not None and config.distillation_is_clip <= 0.0:
        raise ValueError(f"`distillation_is_clip` must be positive or None, got {config.distillation_is_clip}.")
    for name, placeholders in TEMPLATE_PLACEHOLDERS.items():
        _check_template(name, getattr(config, name), placeholders)


_NUMBERS = {"int": numbers.Integral, "float": numbers.Real}


def _check_types(config: CreditConfig) -> None:
    """A list in the YAML or a text in a script is named here, where a comparison would fail without a name."""
    for own in takewhile(lambda one: one is not GRPOConfig, type(config).__mro__):
        for name, declared in vars(own).get("__annotations__", {}).items():
            kind, _, otherwise = str(declared).partition(" | ")
            value = getattr(config, name)
            if kind in _NUMBERS and not (value is None and otherwise == "None"):
                _check_number(name, value, kind)
    if config.contrastive_coef != "auto":
        _check_number("contrastive_coef", config.contrastive_coef, "float", " or 'auto'")
    for one in fields(config):
        if re.search(r"\b(int|float)\b", declared := str(one.type)) and not re.search(r"\bstr\b", declared):
            _check_is_no_text(one.name, getattr(config, one.name))


def _check_is_no_text(name: str, value: object) -> None:
    """transformers keeps a number that is written as text, and fails where the optimizer is made."""
    if not isinstance(value, str):
        return
    try:
        meant = float(value)
    except ValueError:
        return
    raise ValueError(
        f"`{name}` is the text {value!r}, where a number belongs. In YAML a number with an exponent needs a point: "
        f"write {meant:.1e}."
    )


def _check_number(name: str, value: object, kind: str, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS[kind]):
        wanted = {"int": "a whole number", "float": "a number"}[kind]
        raise ValueError(f"`{name}` must be {wanted}{otherwise}, got {value!r}.")


def _check_coefficient(config: CreditConfig) -> None:
    coefficient = config.contrastive_coef
    if config.contrastive_form == "guide":
        if not (coefficient >= 0.0 and math.isfinite(coefficient)):
            raise ValueError(f"`contrastive_coef` must be finite and at least 0, got {coefficient}.")
    elif not 0.0 <= coefficient <= 1.0:
        raise ValueError(
            f"`contrastive_coef` must be in [0, 1], got {coefficient}. The paper finds 0.05 to 0.1 best; only "
            "`contrastive_form='guide'` takes more than 1."
        )


def _check_json(config: CreditConfig) -> None:
    """Options that a command line gives as text; transformers' own error does not name them."""
    for name in config._VALID_DICT_FIELDS:
        value = getattr(config, name)
        if not isinstance(value, str) or (name in _JSON_OR_FILE and not value.startswith("{")):
            continue
        try:
            read = json.loads(value)
        except ValueError as error:
            read = error
        if not isinstance(read, dict):
            why = f": {read}" if isinstance(read, ValueError) else ""
            raise ValueError(
                f"`{name}` must be a JSON object, such as '{{\"name\": false}}', got {value!r}{why}. Names stand in "
                "double quotes, and true, false and null are written so."
            )


def _check_adapted(config: CreditConfig) -> None:
    level, ceiling = config.contrastive_auto_level, CEILING[config.contrastive_form]
    if level is None or not (level > 0.0 and math.isfinite(level)):
        raise ValueError(
            f"`contrastive_coef='auto'` needs a level above 0 to hold: set `contrastive_auto_level`, got {level}. "
            "A run with a fixed λ logs the quantity as `credit/kl_to_teacher` or `credit/s_mean`."
        )
    if not FLOOR <= config.contrastive_auto_start <= ceiling:
        raise ValueError(
            f"`contrastive_auto_start` must be in [{FLOOR}, {ceiling}] for `contrastive_form="
            f"{config.contrastive_form!r}`, got {config.contrastive_auto_start}."
        )
    if not 0.0 < config.contrastive_auto_rate <= 1.0:
        raise ValueError(f"`contrastive_auto_rate` must be in (0, 1], got {config.contrastive_auto_rate}.")


def check_combinations(config: CreditConfig) -> None:
    """Options together.

    Raises:
        ValueError: a combination that could not train, or that asks for something it would not get.
    """
    if config.enable_jit_checkpoint:
        raise ValueError(
            "`enable_jit_checkpoint=True` saves inside a step, where weights, reference and generation batch are not "
            "of one moment: a run resumed from there is another one. Set it to False and save often (`save_steps`)."
        )
    if config.distillation_weight == 0.0:
        return
    if config.torch_compile:
        raise ValueError(
            "`torch_compile=True` compiles the model's forward pass, and a distillation loss reads hidden states "
            "below it: nothing would be compiled. Set `torch_compile=False`."
        )
    if config.use_transformers_continuous_batching:
        raise ValueError(
            "`use_transformers_continuous_batching=True` casts the whole model at each rollout, the reference beside "
            "the trained adapter too, whose average would then stand still. Set `use_vllm=True` for fast rollouts, or "
            "`use_transformers_continuous_batching=False`."
        )
    if config.distillation_support == "sampled":
        _check_sampled(config)
    if config.contrasts:
        _check_contrast(config)
    if config.teacher_hint == "foreign":
        _check_batch_has_other_problems(config)
    if not config.use_successful_as_teacher and not config.include_environment_feedback:
        raise ValueError(
            "The teacher would see nothing that the student does not: set `include_environment_feedback=True` or "
            "`use_successful_as_teacher=True`."
        )
    if config.distillation_weight == 1.0:
        _check_policy_terms_are_off(config)


def _check_sampled(config: CreditConfig) -> None:
    if config.distillation_alpha != 1.0:
        raise ValueError(
            "`distillation_support='sampled'` scores the realised token only, which gives the reverse KL: it "
            f"needs `distillation_alpha=1`, got {config.distillation_alpha}."
        )
    if config.contrastive_plausibility > 0.0:
        raise ValueError(
            "`contrastive_plausibility` compares tokens, and `distillation_support='sampled'` scores one: set "
            "`contrastive_plausibility=0`, or use a top-k or full support."
        )
    if config.contrastive_coef == "auto" and config.contrastive_auto_quantity == "kl":
        raise ValueError(
            "`contrastive_auto_quantity='kl'` is a divergence between distributions, and `distillation_support="
            "'sampled'` scores one token: set `contrastive_auto_quantity='s'`, or use a top-k or full support."
        )


def _check_contrast(config: CreditConfig) -> None:
    if config.contrastive_swap == "hint" and config.contrastive_source != "batch":
        raise ValueError(
            "`contrastive_swap='hint'` takes hints of other rollouts, which only the batch has: set "
            "`contrastive_source='batch'`."
        )
    if config.contrastive_source == "none" and config.contrastive_count != 1:
        raise ValueError(
            "`contrastive_source='none'` leaves the question out, which can be done once: set `contrastive_count=1`, "
            f"got {config.contrastive_count}."
        )
    if config.contrastive_source in _FROM_BATCH:
        _check_batch_has_other_problems(config)


def _check_batch_has_other_problems(config: CreditConfig) -> None:
    if config.generation_batch_size // config.num_generations < 2:
        raise ValueError(
            f"A generation batch of {config.generation_batch_size} rollouts with `num_generations="
            f"{config.num_generations}` holds one problem, so there is no other question to contrast with. Raise "
            "`per_device_train_batch_size`, `gradient_accumulation_steps` or `generation_batch_size`, draw the "
            "other questions with `contrastive_source='dataset'`, leave the question out with "
            "`contrastive_source='none'`, or set `contrastive_coef=0` (SDPO)."
        )


def _check_policy_terms_are_off(config: CreditConfig) -> None:
    """Terms of GRPO's loss are not computed at `distillation_weight=1`: asking for one there is a mistake."""
    off = {
        "beta": 0.0,
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "delta": None,
        "epsilon_high": None,
    }
    for name, neutral in off.items():
        if getattr(config, name) != neutral:
            raise ValueError(
                f"`{name}={getattr(config, name)}` belongs to GRPO's loss, which `distillation_weight=1` leaves "
                f"out. Lower `distillation_weight`, or set `{name}={neutral!r}`."
            )


def _check_template(name: str, template: str, placeholders: tuple[str, ...]) -> None:
    """A template has each of its placeholders once and no other, so that nothing in it is lost or left unfilled."""
    try:
        found = [field_name for _, field_name, _, _ in string.Formatter().parse(template) if field_name is not None]
    except ValueError as error:
        raise ValueError(
            f"`{name}` is not a format string ({error}); write literal braces as {{{{ and }}}}."
        ) from None
    missing = [p for p in placeholders if p not in found]
    if missing:
        raise ValueError(f"`{name}` lacks {', '.join('{' + p + '}' for p in missing)}: {template!r}.")
    unknown = [f for f in found if f not in placeholders]
    if unknown or len(found) != len(placeholders):
        raise ValueError(
            f"`{name}` must have each of {', '.join('{' + p + '}' for p in placeholders)} once and no other "
            f"placeholder: {template!r}."
        )
