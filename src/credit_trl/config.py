"""Every knob of CREDIT, its range and its symbol in the paper, checked where it is set."""

from __future__ import annotations

import json
import math
import numbers
import re
import string
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from trl import GRPOConfig

from credit_trl.objective import ContrastRule

if TYPE_CHECKING:
    Coefficient = float | Literal["auto"]
else:

    def Coefficient(value: str | float) -> float | str:
        """A number, or `"auto"`."""
        return value if value == "auto" else float(value)


@dataclass
class CreditConfig(GRPOConfig):
    r"""
    Configuration of [`CreditTrainer`]: TRL's [`~trl.GRPOConfig`] plus what turns feedback into credit.

    GRPO, SDPO and CREDIT are one trainer that differs only in the advantage: `distillation_weight=0` is GRPO,
    `contrastive_coef=0` is SDPO. Options that TRL's `SDPOConfig` has too keep their names; defaults are the paper's
    LiveCodeBench column.

    Parameters:
        > The contrast

        contrastive_coef (`float` or `"auto"`, *optional*, defaults to `0.1`):
            λ: how much of the input-generic baseline Ĝ is taken off the teacher (Eq. 8), in [0, 1]; any λ ≥ 0 for
            `contrastive_form="guide"`. The paper finds 0.05 to 0.1 best and a collapse of S_t towards 0.5. `"auto"`
            adapts it after every optimizer step, see the next four; `credit/contrastive_coef` logs it.
        contrastive_auto_quantity (`"kl"` or `"s"`, *optional*, defaults to `"kl"`):
            What `"auto"` holds: the mean divergence from the target to the teacher (`credit/kl_to_teacher`), or the
            mean S_t (`credit/s_mean`).
        contrastive_auto_level (`float`, *optional*):
            Where, in nats; to be stated with `"auto"`. What a run with a fixed λ that you like logs is a good level.
        contrastive_auto_start (`float`, *optional*, defaults to `0.1`):
            λ of the first step.
        contrastive_auto_rate (`float`, *optional*, defaults to `0.1`):
            In (0, 1]: the most that log λ moves in a step.
        contrastive_form (`"subtract"` or `"guide"`, *optional*, defaults to `"subtract"`):
            The target: the paper's `f − λ Ĝ`, or `f + λ (f − Ĝ)`, which is the teacher itself where the question does
            not matter, and is guided away from the generic prediction elsewhere. λ = 1 there is the paper's 0.5
            without its flattening.
        contrastive_gate (`float`, *optional*, defaults to `0.0`):
            In [0, 1): contrast only positions where the total variation between teacher and contrast exceeds it; 0
            contrasts all.
        contrastive_plausibility (`float`, *optional*, defaults to `0.0`):
            In [0, 1]: contrast only tokens that have at least this share of the teacher's highest probability; 0
            contrasts all. The tail bucket, whose tokens are not told apart, is then left to the teacher.
        contrastive_count (`int`, *optional*, defaults to `1`):
            C ≥ 1: other questions per sample. Each costs one more forward pass of the teacher.
        contrastive_source (`str`, *optional*, defaults to `"batch"`):
            Where the other questions come from: the global generation batch (`"batch"`, the paper), the most similar
            prompts of it (`"hard"`), those of the same `task` column (`"same_task"`, for mixed runs), the whole
            `"dataset"`, for batches that hold few problems, or nowhere: `"none"` leaves the question out, which needs
            no other prompt and has one contrast.
        contrastive_baseline (`"mean_log"` or `"log_mean"`, *optional*, defaults to `"mean_log"`):
            Ĝ of several contrasts: the mean of their logs (the paper), or the log of their mean, which makes Ŝ the
            paper's pCMI. The same for C = 1.
        contrastive_swap (`"input"` or `"hint"`, *optional*, defaults to `"input"`):
            What the contrast exchanges: the question (the paper), or what the teacher is shown, for that of another
            problem of the batch (as in RLCSD). The second is a control for experiments.

        > The distillation loss

        distillation_weight (`float`, *optional*, defaults to `1.0`):
            In [0, 1]: `(1 − w) · GRPO loss + w · distillation loss`.
        distillation_alpha (`float`, *optional*, defaults to `1.0`):
            α in [0, 1]: 1 reverse KL (Algorithm 1), 0 forward KL, 0.5 Jensen-Shannon.
        distillation_support (`str`, *optional*, defaults to `"teacher_topk"`):
            Which tokens of the vocabulary carry the loss: the teacher's K most likely (the paper), the student's
            (`"student_topk"`, SDPO's code), all (`"full"`) or the sampled token only (`"sampled"`, α = 1).
        distillation_topk (`int`, *optional*, defaults to `20`):
            K_v. The paper uses 20 on LiveCodeBench, 100 elsewhere.
        distillation_tail (`"bucket"` or `"renormalize"`, *optional*, defaults to `"bucket"`):
            What happens to the mass outside a top-K support: one more bucket, or conditioning on the support. Doing
            neither collapses, so it is not offered.
        distillation_is_clip (`float`, *optional*, defaults to `2.0`):
            Upper bound on the importance ratio π_θ / π_rollout of the sampled token that multiplies its loss when a
            generation batch is used for more than one update. `None`: no ratio.
        distillation_chunk_size (`int`, *optional*):
            Tokens whose vocabulary row lives at the same time. `None` chooses.
        distillation_kernels (`"torch"` or `"triton"`, *optional*, defaults to `"torch"`):
            What finishes, sums and differentiates rows of logits on a GPU: torch in many passes over memory, or
            Triton in one each. `"torch"` is the default because nothing has been measured on a GPU: `"triton"` agrees
            with it in Triton's interpreter on a CPU, and what it saves is a count of bytes (docs/performance.md). It
            needs a GPU, and the package triton, which torch's CUDA builds bring along.
        scoring_batch_tokens (`int`, *optional*, defaults to `16384`):
            Tokens in one forward pass of the teacher, padding included; independent of the micro-batch.
        scoring_packed (`bool`, *optional*, defaults to `False`):
            Sequences one after the other instead of side by side: no padding at all. Needs an attention
            implementation with variable lengths (FlashAttention, FlexAttention).

        > The teacher π_ref

        teacher_model_kind (`"ema"`, `"live"` or `"base"`, *optional*, defaults to `"ema"`):
            An exponential moving average of the policy, the policy itself, or the initial policy.
        teacher_update_rate (`float`, *optional*, defaults to `0.01`):
            In (0, 1]: `teacher ← (1 − rate) · teacher + rate · student`.
        teacher_sync_steps (`int`, *optional*):
            Optimizer steps between two updates of the EMA. `None`: one update a generation batch.
        teacher_offload (`bool`, *optional*, defaults to `False`):
            Keep the teacher's copy in main memory between scoring phases. For full fine-tuning without sharding.

        > The teacher's context: what the teacher reads besides the prompt

        teacher_hint (`"own"` or `"foreign"`, *optional*, defaults to `"own"`):
            Whose solution and feedback the teacher sees: its own problem's, or another's of the batch. The second is
            a control for experiments: nothing is to be learnt from it.
        include_environment_feedback (`bool`, *optional*, defaults to `True`):
            Whether `Verdict.feedback` and the column `privileged_context` reach the teacher.
        environment_feedback_only_without_solution (`bool`, *optional*, defaults to `False`):
            Use feedback only where the group has no successful rollout to show (SDPO's code).
        use_successful_as_teacher (`bool`, *optional*, defaults to `True`):
            Whether a successful rollout of the same group is shown as the solution.
        success_reward_threshold (`float`, *optional*, defaults to `1.0`):
            Reward from which a rollout counts as successful.
        dont_reprompt_on_self_success (`bool`, *optional*, defaults to `True`):
            A rollout is never its own demonstration.
        teacher_context (`str`, *optional*, defaults to `"solution"`):
            What of a successful rollout the teacher sees: `"solution"` without its thinking, `"think"` alone, or
            `"think+solution"`. The paper finds the first stable and the second collapsing.
        remove_thinking_from_demonstration (`bool`, *optional*):
            SDPO's switch: `True` is `teacher_context="solution"`, `False` is `"think+solution"`, `None` leaves it to
            `teacher_context`.
        max_reprompt_len (`int`, *optional*, defaults to `10240`):
            Tokens of a teacher or contrast prompt. Over budget, feedback is cut in its middle first, then the
            demonstration; the prompt and the generation prompt never are.
        reprompt_template, solution_template, feedback_template (`str`, *optional*):
            SDPO's wording. Placeholders: `{prompt}{solution}{feedback}`, `{successful_previous_attempt}`,
            `{feedback_raw}`.

        > Verifiers that fail

        on_verifier_error (`"raise"` or `"skip"`, *optional*, defaults to `"raise"`):
            What a reward function that raises, or exceeds `verifier_timeout`, does to the run: ends it, or leaves the
            rollouts that it was given out of the loss. `credit/frac_verifier_skipped` counts them.
        verifier_timeout (`float`, *optional*):
            Seconds that one call of a reward function (all rollouts of one process) may take; what it returns later
            is ignored. With a limit it runs in a thread of its own. `None`: no limit.

    Raises:
        ValueError: at construction, for any value out of range or any combination that could not train.
    """

    contrastive_coef: Coefficient = field(
        default=0.1, metadata={"help": "λ in [0, 1] (Eq. 8), any λ >= 0 for 'guide', or auto."}
    )
    contrastive_auto_quantity: Literal["kl", "s"] = field(
        default="kl", metadata={"help": "What an adapted λ holds: the target's divergence to the teacher, or S_t."}
    )
    contrastive_auto_level: float | None = field(
        default=None, metadata={"help": "The level at which an adapted λ holds it, in nats."}
    )
    contrastive_auto_start: float = field(default=0.1, metadata={"help": "An adapted λ at the first step."})
    contrastive_auto_rate: float = field(
        default=0.1, metadata={"help": "The most that the log of an adapted λ moves in a step."}
    )
    contrastive_form: Literal["subtract", "guide"] = field(
        default="subtract", metadata={"help": "The target: f - λ G (the paper), or f + λ (f - G)."}
    )
    contrastive_gate: float = field(
        default=0.0, metadata={"help": "Contrast where the total variation to the contrast exceeds it; 0 is off."}
    )
    contrastive_plausibility: float = field(
        default=0.0, metadata={"help": "Contrast tokens with this share of the teacher's maximum; 0 is off."}
    )
    contrastive_count: int = field(default=1, metadata={"help": "C >= 1, other questions per sample."})
    contrastive_source: Literal["batch", "dataset", "hard", "same_task", "none"] = field(
        default="batch",
        metadata={"help": "Other questions: of the batch (all, the nearest, the same task), the dataset, or none."},
    )
    contrastive_baseline: Literal["mean_log", "log_mean"] = field(
        default="mean_log", metadata={"help": "Average contrasts as the mean of logs (the paper) or log of the mean."}
    )
    contrastive_swap: Literal["input", "hint"] = field(
        default="input", metadata={"help": "Contrast with another question, or another problem's hint (a control)."}
    )

    distillation_weight: float = field(
        default=1.0, metadata={"help": "w in [0, 1]: (1 - w) * GRPO loss + w * distillation loss."}
    )
    distillation_alpha: float = field(
        default=1.0, metadata={"help": "α in [0, 1]: 1 reverse KL, 0 forward KL, 0.5 Jensen-Shannon."}
    )
    distillation_support: Literal["teacher_topk", "student_topk", "full", "sampled"] = field(
        default="teacher_topk", metadata={"help": "Tokens that carry the loss."}
    )
    distillation_topk: int = field(default=20, metadata={"help": "K, the size of a top-k support."})
    distillation_tail: Literal["bucket", "renormalize"] = field(
        default="bucket", metadata={"help": "The mass outside a top-k support: one more bucket, or renormalised away."}
    )
    distillation_is_clip: float | None = field(
        default=2.0, metadata={"help": "Upper bound on the importance ratio of off-policy updates; None for no ratio."}
    )
    distillation_chunk_size: int | None = field(
        default=None, metadata={"help": "Tokens whose vocabulary row lives at the same time; None chooses."}
    )
    distillation_kernels: Literal["torch", "triton"] = field(
        default="torch", metadata={"help": "What works on rows of logits on a GPU; triton is unmeasured there."}
    )
    scoring_batch_tokens: int = field(
        default=16384, metadata={"help": "Tokens in one forward pass of the teacher, padding included."}
    )
    scoring_packed: bool = field(
        default=False, metadata={"help": "Score without padding; needs attention with variable lengths."}
    )

    teacher_model_kind: Literal["ema", "live", "base"] = field(
        default="ema", metadata={"help": "The teacher: an average of the policy, the policy, or the initial policy."}
    )
    teacher_update_rate: float = field(default=0.01, metadata={"help": "Update rate of the EMA teacher."})
    teacher_sync_steps: int | None = field(
        default=None,
        metadata={"help": "Optimizer steps between two updates of the EMA; None for one a generation batch."},
    )
    teacher_offload: bool = field(
        default=False, metadata={"help": "Keep the teacher's copy in main memory between scoring phases."}
    )

    teacher_hint: Literal["own", "foreign"] = field(
        default="own", metadata={"help": "Whose solution and feedback the teacher sees; foreign is a control."}
    )
    include_environment_feedback: bool = field(
        default=True, metadata={"help": "Whether feedback reaches the teacher."}
    )
    environment_feedback_only_without_solution: bool = field(
        default=False, metadata={"help": "Use feedback only where no successful rollout can be shown."}
    )
    use_successful_as_teacher: bool = field(
        default=True, metadata={"help": "Show a successful rollout of the group to the teacher."}
    )
    success_reward_threshold: float = field(
        default=1.0, metadata={"help": "Reward from which a rollout counts as successful."}
    )
    dont_reprompt_on_self_success: bool = field(
        default=True, metadata={"help": "A rollout is never its own demonstration."}
    )
    teacher_context: Literal["solution", "think", "think+solution"] = field(
        default="solution", metadata={"help": "What of a successful rollout the teacher sees."}
    )
    remove_thinking_from_demonstration: bool | None = field(
        default=None, metadata={"help": "SDPO's switch for `teacher_context`; None leaves it alone."}
    )
    max_reprompt_len: int = field(default=10240, metadata={"help": "Tokens of a teacher or contrast prompt."})
    reprompt_template: str = field(
        default="{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        metadata={"help": "The teacher's user turn; needs {prompt}, {solution} and {feedback}."},
    )
    solution_template: str = field(
        default="\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
        metadata={"help": "The demonstration's section; needs {successful_previous_attempt}."},
    )
    feedback_template: str = field(
        default="\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        metadata={"help": "The feedback's section; needs {feedback_raw}."},
    )

    on_verifier_error: Literal["raise", "skip"] = field(
        default="raise", metadata={"help": "A reward function that fails ends the run, or its rollouts are left out."}
    )
    verifier_timeout: float | None = field(
        default=None, metadata={"help": "Seconds that one call of a reward function may take; None for no limit."}
    )

    def __post_init__(self) -> None:
        # Our own options first: TRL looks at the machine, and its error about that would hide a mistake in them.
        check_values(self)
        self._settle_teacher_context()
        try:
            super().__post_init__()
        except ValueError as error:
            if "bf16" not in str(error):
                raise
            raise ValueError(f"{error} On a machine without a GPU set `use_cpu=True` and `bf16=False`.") from error
        check_combinations(self)  # reads the sizes of batches, which TRL settles

    @property
    def contrasts(self) -> bool:
        """Whether other questions are read at all: λ is not 0."""
        return self.contrastive_coef != 0.0

    @property
    def contrast_rule(self) -> ContrastRule:
        """Form, gate and plausibility, as the kernels take them."""
        return ContrastRule(self.contrastive_form, self.contrastive_gate, self.contrastive_plausibility)

    def _settle_teacher_context(self) -> None:
        if self.remove_thinking_from_demonstration is None:
            return
        wanted = "solution" if self.remove_thinking_from_demonstration else "think+solution"
        default = type(self).__dataclass_fields__["teacher_context"].default
        if self.teacher_context not in (default, wanted):
            raise ValueError(
                f"`remove_thinking_from_demonstration={self.remove_thinking_from_demonstration}` means "
                f"`teacher_context={wanted!r}`, but `teacher_context={self.teacher_context!r}`. Set one of them only."
            )
        self.teacher_context = wanted


# Bounds of an adapted λ: it can rise again from the lower one; the upper one is that of the form.
FLOOR = 1e-3
CEILING = {"subtract": 1.0, "guide": 10.0}

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
            "`enable_jit_checkpoint=True` saves inside a step, where weights, teacher and generation batch are not "
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
            "`use_transformers_continuous_batching=True` casts the whole model at each rollout, the teacher beside "
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
            "`distillation_support='sampled'` scores the sampled token only, which gives the reverse KL: it "
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
