"""`CreditConfig`: every option with its range, its symbol in the paper and its checks."""

from __future__ import annotations

import difflib
import functools
import json
import math
import numbers
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from transformers import GenerationConfig
from trl import GRPOConfig

from credit_trl.objective import ContrastRule


def _with_help(config: type) -> type:
    """The dataclass with the docstring's description of each option as its help on the command line."""
    described = re.findall(r"^ {8}([a-z_, ]+) \(.+\):\n((?: {12}.+\n)+)", config.__doc__ or "", re.MULTILINE)
    for names, text in described:
        for name in names.split(", "):
            config.__dataclass_fields__[name].metadata = {"help": " ".join(text.split())}
    return config


@_with_help
@dataclass
class CreditConfig(GRPOConfig):
    r"""
    Configuration of [`CreditTrainer`]: TRL's [`~trl.GRPOConfig`] and the options of the credit.

    GRPO, SDPO and CREDIT are one trainer that differs only in the advantage: `distillation_weight=0` is GRPO,
    `contrastive_coef=0` is SDPO. Options of TRL's `SDPOConfig` keep their names. Defaults are the paper's
    LiveCodeBench column.

    Parameters:
        > The contrast

        contrastive_coef (`float`, *optional*, defaults to `0.1`):
            λ, the weight of the input-generic baseline Ĝ that is subtracted from the teacher (Eq. 8), in [0, 1]; any
            λ ≥ 0 for `contrastive_form="guide"`. The paper finds 0.05 to 0.1 best, and a collapse of S_t towards 0.5.
        contrastive_form (`"subtract"` or `"guide"`, *optional*, defaults to `"subtract"`):
            Form of the target: the paper's `f − λ Ĝ`, or `f + λ (f − Ĝ)`, which equals the teacher at positions where
            teacher and contrast agree. λ = 1 of `"guide"` is λ = 0.5 of `"subtract"` without its flattening.
        contrastive_gate (`float`, *optional*, defaults to `0.0`):
            In [0, 1): contrast only positions where the total variation between teacher and contrast exceeds it; 0
            contrasts every position.
        contrastive_count (`int`, *optional*, defaults to `1`):
            C ≥ 1: contrast prompts per sample. Each costs one forward pass of the teacher.
        contrastive_source (`str`, *optional*, defaults to `"batch"`):
            Source of the contrast prompts: the global generation batch (`"batch"`, the paper), its most similar
            prompts (`"hard"`), its prompts of the same `task` column (`"same_task"`, for mixed runs), the whole
            `"dataset"` (for batches with few prompts), or `"none"`: one contrast, the system messages with an empty
            user turn. `"wrong_feedback"` keeps the prompt and exchanges z: demonstration and feedback are those of
            failed rollouts of the same group (RLCSD).
        contrastive_baseline (`"mean_log"` or `"log_mean"`, *optional*, defaults to `"mean_log"`):
            Average over the contrasts: the mean of their logs (the paper), or the log of their mean, which makes Ŝ the
            paper's pCMI. Equal for C = 1.
        contrastive_swap (`"input"`, `"hint"` or `"self"`, *optional*, defaults to `"input"`):
            Part that the contrast exchanges: the prompt (the paper), the privileged context, for that of another
            prompt of the batch (as in RLCSD), or nothing (`"self"`): x' = x, so Ĝ = f and the target is the flattened
            teacher (1 − λ) f. `"hint"` and `"self"` are controls for experiments.

        > The use of the credit

        credit_use (`"distill"`, `"modulate"` or `"route"`, *optional*, defaults to `"distill"`):
            `"distill"` moves the policy to the target. `"modulate"` multiplies GRPO's advantage, whose sign is the
            verifier's, by a bounded weight a token (RLSD, RLCSD). `"route"` distils failures and leaves the other
            samples to GRPO (SRPO).
        credit_weight (`"delta_v"`, `"s"` or `"entropy"`, *optional*):
            Quantity that weights tokens: ΔV_t or S_t for `"modulate"`, the teacher's entropy for `"route"` (SRPO's
            dynamic weight). `None`: `"delta_v"` for `"modulate"`, no weight for `"route"`.
        credit_weight_form (`"ratio"` or `"residual"`, *optional*, defaults to `"ratio"`):
            Weight of a token of `"modulate"` with credit c and advantage A: `exp(sign(A) c/τ)` in [1 − ε, 1 + ε]
            (RLSD), or `1 + ε tanh(c/τ) / A`, at least 0 (RLCSD).
        credit_weight_clip (`float`, *optional*, defaults to `0.2`):
            ε in (0, 1].
        credit_weight_temperature (`float`, *optional*, defaults to `1.0`):
            τ > 0. For `"entropy"` the weight is `exp(−H/τ)`, divided by its mean over the distilled tokens.
        credit_weight_norm (`bool`, *optional*, defaults to `True`):
            Whether the weights of a sample are divided by their mean (`"modulate"`), so that the weights change where
            it learns and not how much.

        > Dynamic sampling

        dynamic_sampling_rounds (`int`, *optional*, defaults to `0`):
            Maximum number of times that groups without any signal are replaced by rollouts of other prompts of the
            training dataset. A group has a signal where a sample has a teacher or where GRPO's loss is used and the
            rewards differ.

        > The distillation loss

        distillation_weight (`float`, *optional*, defaults to `1.0`):
            w in [0, 1]: `(1 − w) · GRPO loss + w · distillation loss`. For `"modulate"` the share of the weights,
            `A (1 + w (w_t − 1))`; for `"route"` the coefficient of the distillation loss. 0 is GRPO.
        distillation_alpha (`float`, *optional*, defaults to `1.0`):
            α in [0, 1]: 1 reverse KL (Algorithm 1), 0 forward KL, 0.5 Jensen-Shannon.
        distillation_support (`str`, *optional*, defaults to `"teacher_topk"`):
            Tokens of the vocabulary that carry the loss: the teacher's K most likely (the paper), the student's
            (`"student_topk"`, SDPO's code), all (`"full"`) or the sampled token only (`"sampled"`, α = 1).
        distillation_topk (`int`, *optional*, defaults to `20`):
            K_v. The paper uses 20 on LiveCodeBench, 100 elsewhere.
        distillation_tail (`"bucket"` or `"renormalize"`, *optional*, defaults to `"bucket"`):
            Treatment of the probability outside a top-K support: one more bucket, or conditioning on the support.
            Doing neither collapses and is not supported.
        distillation_is_clip (`float`, *optional*, defaults to `2.0`):
            Upper bound on the importance ratio π_θ / π_rollout of the sampled token, which multiplies its loss when a
            generation batch is used for more than one update. `None`: no ratio.
        distillation_chunk_size (`int`, *optional*):
            Tokens per logits chunk; `None` picks from free memory.
        distillation_kernels (`"auto"`, `"torch"` or `"triton"`, *optional*, defaults to `"auto"`):
            Implementation of the passes over rows of logits. `"auto"` is Triton on a GPU where the package triton is
            installed, as with torch's CUDA builds, and torch elsewhere. They agree in Triton's interpreter; neither
            has been timed on a GPU (docs/performance.md).
        scoring_batch_tokens (`int`, *optional*, defaults to `16384`):
            Maximum number of tokens in one forward pass of the teacher, padding included; independent of the
            micro-batch.
        scoring_packed (`bool`, *optional*, defaults to `False`):
            Concatenate sequences in the teacher's passes instead of padding them. Needs an attention implementation
            with variable lengths (FlashAttention, FlexAttention) or PyTorch's (`"sdpa"`), which reads a beginning that
            several sequences share once: the prompt of a group's rollouts, which others have as a contrast prompt.
        update_packed (`bool`, *optional*, defaults to `False`):
            Concatenate the samples of a micro-batch in the student's passes, instead of padding them to the longest of
            the micro-batch, with the attention implementations of `scoring_packed`; others pad, with one warning.
        update_batch_tokens (`int`, *optional*):
            Maximum number of tokens in one forward and backward pass of the student, padding included. A micro-batch
            with more is computed in parts, whose gradients add up to that of the whole, so that activations take
            memory for this many tokens. A single longer sample is one part. `None`: no limit.

        > The teacher π_ref

        teacher_model_kind (`str`, *optional*, defaults to `"ema"`):
            The teacher: an exponential moving average of the policy (`"ema"`), the policy itself (`"live"`), the
            initial policy (`"base"`), the log-space mixture of base and average (`"trust_region"`, SDPO), or the
            `"model"` that the options `teacher_model_…` name.
        teacher_trust_weight (`float`, *optional*, defaults to `0.5`):
            In (0, 1]: weight of the average in the mixture of `"trust_region"`; 1 is `"ema"`.
        teacher_trust_kl (`float`, *optional*):
            Largest `KL(teacher ‖ base)` of a position of `"trust_region"`, in nats: where the mixture exceeds it, the
            average gets less weight. `None`: no bound.
        teacher_rehearsal (`float`, *optional*, defaults to `0.0`):
            In [0, 1): share of generation batches that train the policy to say under (x, z) what the initial policy
            says there, so that a teacher made from the policy keeps reading z. For `distillation_weight=1`.
        teacher_model_name_or_path (`str`, *optional*):
            Name or path of a causal LM with the policy's vocabulary, such as a larger or a fine-tuned model. A
            checkpoint stores its name and revision, not its weights.
        teacher_model_revision (`str`, *optional*):
            Branch, tag or commit of that model.
        teacher_model_init_kwargs (`dict`, *optional*):
            Keyword arguments of its `from_pretrained`, such as `dtype`, `attn_implementation` or
            `quantization_config`. The dtype defaults to that of its files. It is sharded as the policy is.
        teacher_adapter_name_or_path (`str`, *optional*):
            PEFT adapter of that model.
        teacher_prompt (`"privileged"` or `"student"`, *optional*, defaults to `"privileged"`):
            Prompt of the teacher: (x, z), or the student's own x. With `"student"` every sample has a teacher, and
            `teacher_model_kind="model"` is plain on-policy distillation (GKD with `lmbda=1`, TRL's
            `DistillationTrainer`).
        teacher_update_rate (`float`, *optional*, defaults to `0.01`):
            In (0, 1]: `teacher ← (1 − rate) · teacher + rate · student`.
        teacher_sync_steps (`int`, *optional*):
            Optimizer steps between updates of the EMA. `None`: one update per generation batch.
        teacher_offload (`bool`, *optional*, defaults to `False`):
            Keep the teacher's weights in main memory between scoring phases. For full fine-tuning without sharding.

        > The privileged context z

        teacher_hint (`"own"` or `"foreign"`, *optional*, defaults to `"own"`):
            Privileged context that the teacher reads: the sample's own, or that of another prompt of the batch.
            `"foreign"` is a control for experiments.
        include_environment_feedback (`bool`, *optional*, defaults to `True`):
            Whether `Verdict.feedback` and the column `privileged_context` reach the teacher.
        environment_feedback_only_without_solution (`bool`, *optional*, defaults to `False`):
            Use feedback only where the group has no successful rollout (SDPO's code).
        use_successful_as_teacher (`bool`, *optional*, defaults to `True`):
            Whether the teacher reads a successful rollout of the same group as a demonstration.
        success_reward_threshold (`float`, *optional*, defaults to `1.0`):
            Lowest reward of a successful rollout.
        dont_reprompt_on_self_success (`bool`, *optional*, defaults to `True`):
            Whether a rollout may not be its own demonstration.
        teacher_context (`str`, *optional*, defaults to `"solution"`):
            Part of a demonstration that the teacher reads: `"solution"` without the thinking, `"think"` alone, or
            `"think+solution"`. The paper finds the first stable; the second collapses.
        remove_thinking_from_demonstration (`bool`, *optional*):
            Name of `teacher_context` in SDPO: `True` is `"solution"`, `False` is `"think+solution"`, `None` keeps
            `teacher_context`.
        max_reprompt_len (`int`, *optional*, defaults to `10240`):
            Maximum number of tokens of a teacher or contrast prompt. A longer one loses the middle of its feedback,
            then of its demonstration; the prompt and the generation prompt are never cut.
        reprompt_style (`"sdpo"` or `"paper"`, *optional*, defaults to `"sdpo"`):
            Wording of the teacher's user turn: that of SDPO's code, whose options and results the defaults follow, or
            that of the paper's appendix ("Previous assessment: … Now solve this problem step by step.").
        reprompt_template, solution_template, feedback_template (`str`, *optional*):
            Templates of the teacher's user turn; a template that is set replaces that of the style. Placeholders:
            `{prompt}{solution}{feedback}`, `{successful_previous_attempt}`, `{feedback_raw}`.
        success_feedback_template (`str`, *optional*):
            `feedback_template` of successful rollouts. By default it does not call the attempt unsuccessful, as SDPO's
            code does. `None` (`"None"` too, for command lines), or a `feedback_template` that is not SDPO's: the same
            as `feedback_template`.

        > Errors of reward functions

        on_verifier_error (`"raise"` or `"skip"`, *optional*, defaults to `"raise"`):
            Policy for a reward function that raises or exceeds `verifier_timeout`: end the run, or mask the rollouts
            of that call in the loss; `credit/frac_verifier_skipped` logs their share.
        verifier_timeout (`float`, *optional*):
            Maximum seconds of one call of a reward function (all rollouts of one process); later results are ignored.
            With a limit the function runs in its own thread. `None`: no limit.

        > Stopping

        credit_stop_on (`str`, *optional*):
            Alarms that save a checkpoint and end the run, joined by `|`: `"fidelity"` (`credit/teacher_fidelity` or
            `credit/teacher_prefers_answer` fell below half of its first value), `"collapse"` (the reward fell below
            half of its best) or `"length"` (the mean length of completions grew beyond 1.5 times its first value, or
            the share of truncated ones beyond 1.5 times its first value and 0.15). `None`: alarms only warn.

        > Console

        console_log (`"line"` or `"full"`, *optional*, defaults to `"line"`):
            What a log prints: one line with the main metrics, seconds by stage and the time left, or the dictionary of
            all metrics. `run.json` and `log.jsonl` in `output_dir` have all of them in either case.

    Raises:
        ValueError: at construction, where a value is out of range or a combination cannot train.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]  # noqa: RUF012, as in TRL

    contrastive_coef: float = 0.1
    contrastive_form: Literal["subtract", "guide"] = "subtract"
    contrastive_gate: float = 0.0
    contrastive_count: int = 1
    contrastive_source: Literal["batch", "dataset", "hard", "same_task", "none", "wrong_feedback"] = "batch"
    contrastive_baseline: Literal["mean_log", "log_mean"] = "mean_log"
    contrastive_swap: Literal["input", "hint", "self"] = "input"

    credit_use: Literal["distill", "modulate", "route"] = "distill"
    credit_weight: Literal["delta_v", "s", "entropy"] | None = None
    credit_weight_form: Literal["ratio", "residual"] = "ratio"
    credit_weight_clip: float = 0.2
    credit_weight_temperature: float = 1.0
    credit_weight_norm: bool = True
    dynamic_sampling_rounds: int = 0

    distillation_weight: float = 1.0
    distillation_alpha: float = 1.0
    distillation_support: Literal["teacher_topk", "student_topk", "full", "sampled"] = "teacher_topk"
    distillation_topk: int = 20
    distillation_tail: Literal["bucket", "renormalize"] = "bucket"
    distillation_is_clip: float | None = 2.0
    distillation_chunk_size: int | None = None
    distillation_kernels: Literal["auto", "torch", "triton"] = "auto"
    scoring_batch_tokens: int = 16384
    scoring_packed: bool = False
    update_packed: bool = False
    update_batch_tokens: int | None = None

    teacher_model_kind: Literal["ema", "live", "base", "trust_region", "model"] = "ema"
    teacher_trust_weight: float = 0.5
    teacher_trust_kl: float | None = None
    teacher_rehearsal: float = 0.0
    teacher_model_name_or_path: str | None = None
    teacher_model_revision: str | None = None
    teacher_model_init_kwargs: dict[str, Any] | str | None = None
    teacher_adapter_name_or_path: str | None = None
    teacher_prompt: Literal["privileged", "student"] = "privileged"
    teacher_update_rate: float = 0.01
    teacher_sync_steps: int | None = None
    teacher_offload: bool = False

    teacher_hint: Literal["own", "foreign"] = "own"
    include_environment_feedback: bool = True
    environment_feedback_only_without_solution: bool = False
    use_successful_as_teacher: bool = True
    success_reward_threshold: float = 1.0
    dont_reprompt_on_self_success: bool = True
    teacher_context: Literal["solution", "think", "think+solution"] = "solution"
    remove_thinking_from_demonstration: bool | None = None
    max_reprompt_len: int = 10240
    reprompt_style: Literal["sdpo", "paper"] = "sdpo"
    reprompt_template: str = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
    solution_template: str = "\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
    feedback_template: str = (
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"
    )
    success_feedback_template: str | None = (
        "\nThe following is feedback from your earlier attempt:\n\n{feedback_raw}\n\n"
    )

    on_verifier_error: Literal["raise", "skip"] = "raise"
    verifier_timeout: float | None = None

    credit_stop_on: str | None = None

    console_log: Literal["line", "full"] = "line"

    def __post_init__(self) -> None:
        if self.success_feedback_template == "None":  # a command line cannot pass None
            self.success_feedback_template = None
        # Own options first: TRL checks the machine, and its error would hide theirs.
        check_values(self)
        self._settle_templates()
        self._settle_teacher_context()
        try:
            if self.num_generations == 1 and self._is_pure_distillation:
                self.num_generations = _OneRollout(1)
            super().__post_init__()
            self.num_generations = int(self.num_generations)
        except ValueError as error:
            if "bf16" not in str(error):
                raise
            raise ValueError(f"{error} On a machine without a GPU set `use_cpu=True` and `bf16=False`.") from error
        check_combinations(self)  # uses batch sizes that TRL has resolved

    @property
    def _is_pure_distillation(self) -> bool:
        """Whether GRPO's loss has no share."""
        return self.distillation_weight == 1.0 and self.credit_use == "distill"

    @property
    def shares(self) -> tuple[float, float]:
        """Coefficients of GRPO's loss and of the distillation loss."""
        if self.credit_use == "modulate":
            return 1.0, 0.0
        policy = 1.0 if self.credit_use == "route" else 1.0 - self.distillation_weight
        return policy, self.distillation_weight

    @property
    def contrasts(self) -> bool:
        """Whether contrasts are used: λ is not 0, or S_t is the weight of a token."""
        return self.token_weight == "s" if self.credit_use == "modulate" else self.contrastive_coef != 0.0

    @property
    def token_weight(self) -> str | None:
        """Quantity that weights tokens: `credit_weight`, or the default of the use."""
        return "delta_v" if self.credit_use == "modulate" and self.credit_weight is None else self.credit_weight

    @property
    def stop_causes(self) -> tuple[str, ...]:
        """Alarms of `credit_stop_on`."""
        return tuple(cause.strip() for cause in (self.credit_stop_on or "").split("|") if cause.strip())

    @property
    def teacher_is_frozen(self) -> bool:
        """Whether the teacher's weights never change."""
        return self.teacher_model_kind in ("base", "model")

    @property
    def contrast_rule(self) -> ContrastRule:
        """Form and gate of the contrast."""
        return ContrastRule(self.contrastive_form, self.contrastive_gate)

    def _settle_templates(self) -> None:
        """Replace templates at their default by those of the style."""
        defaults = {name: type(self).__dataclass_fields__[name].default for name in TEMPLATE_PLACEHOLDERS}
        if self.reprompt_style == "paper":
            for name, template in _PAPER_TEMPLATES.items():
                if getattr(self, name) == defaults[name]:
                    setattr(self, name, template)
        is_own = self.feedback_template != defaults["feedback_template"]
        is_default = self.success_feedback_template == defaults["success_feedback_template"]
        if self.success_feedback_template is None or (is_own and is_default):
            self.success_feedback_template = self.feedback_template

    def _settle_teacher_context(self) -> None:
        if self.remove_thinking_from_demonstration is None:
            return
        wanted = "solution" if self.remove_thinking_from_demonstration else "think+solution"
        default = type(self).__dataclass_fields__["teacher_context"].default
        if self.teacher_context not in (default, wanted):
            raise ValueError(
                f"`remove_thinking_from_demonstration={self.remove_thinking_from_demonstration}` means "
                f"`teacher_context={wanted!r}`, but `teacher_context={self.teacher_context!r}`. Set only one of them."
            )
        self.teacher_context = wanted


_FEEDBACK = "It is the feedback of a `Verdict`, or the column `privileged_context`."

# Options of TRL's SDPO, SDFT, GKD and distillation trainers, RLCSD, prime-rl and ms-swift that have another name or no
# counterpart here, and other names of λ and K.
OTHER_TRAINERS = {
    "distillation_mode": "Set `distillation_support`: 'sampled', 'full' or 'student_topk' for TRL's 'sampled_token', "
    "'full_logits' or 'topk_logits'.",
    "distillation_add_tail": "It is `distillation_tail='bucket'`, the default.",
    "gkd_logits_topk": "Set `distillation_topk`.",
    "topk": "Set `distillation_topk`.",
    "teacher_kl_coef": "Set `distillation_weight`.",
    "contrastive_lambda": "Set `contrastive_coef`.",
    "rlcsd_lam": "Set `contrastive_coef`.",
    "rlcsd_k_max": "Set `contrastive_count`, and `contrastive_source='wrong_feedback'`.",
    "teacher_model": "Set `teacher_model_kind='model'` and `teacher_model_name_or_path` of `CreditConfig`.",
    "teacher_mode": "Set `teacher_model_kind`.",
    "teacher_sync_interval": "Set `teacher_sync_steps`.",
    "ema_decay": "Set `teacher_update_rate` to 1 − the decay.",
    "teacher_prompt_template": "Set `reprompt_template`.",
    "correct_privileged_hint_source": _FEEDBACK,
    "demo_key": _FEEDBACK,
    "template": _FEEDBACK,
    "group_size": "Set `num_generations`.",
    "max_prompt_length": "Prompts are never truncated: drop long ones with dataset.filter(...).",
    "max_new_tokens": "Set `max_completion_length`.",
    "max_completion_tokens": "Set `max_completion_length`.",
    "max_length": "Set `max_completion_length`, and `max_reprompt_len` for the teacher's prompt.",
    "lmbda": "All completions are sampled from the policy.",
    "seq_kd": "All completions are sampled from the policy.",
    "generate_from_teacher": "All completions are sampled from the policy.",
    "use_teacher_server": "The teacher runs in the training process.",
    "diagnostics_warning_interval": "Warnings are raised once and need no option.",
    "diagnostics_flat_tolerance": "Warnings are raised once and need no option.",
}


def unknown_option(name: str, known: Iterable[str]) -> str:
    """Advice on an option that does not exist: its counterpart, the most similar name, or an empty string."""
    if name in OTHER_TRAINERS:
        return f" {OTHER_TRAINERS[name]}"
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""


def _checks_names(init: Callable[..., None]) -> Callable[..., None]:
    """An initializer that refuses unknown options with advice."""

    @functools.wraps(init)
    def checked(self: CreditConfig, *args: Any, **options: Any) -> None:
        known = {one.name for one in fields(self) if one.init}
        if unknown := [name for name in options if name not in known]:
            advice = unknown_option(unknown[0], known)
            raise TypeError(f"`{type(self).__name__}` has no option `{unknown[0]}`.{advice}")
        init(self, *args, **options)

    return checked


CreditConfig.__init__ = _checks_names(CreditConfig.__init__)


class _OneRollout(int):
    """1 that passes GRPO's check for at least two rollouts per prompt, where no advantage of GRPO is computed."""

    def __lt__(self, other: int) -> bool:
        return False


TEMPLATE_PLACEHOLDERS = {
    "reprompt_template": ("prompt", "solution", "feedback"),
    "solution_template": ("successful_previous_attempt",),
    "feedback_template": ("feedback_raw",),
    "success_feedback_template": ("feedback_raw",),
}

# Values of options of TRL that it checks later or not at all.
_CHOICES_OF_TRL = {
    "loss_type": ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none", True, False),
}

# Range in words -> its test, and the options that are in it.
_RANGES: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "in [0, 1]": (lambda x: 0.0 <= x <= 1.0, ("distillation_weight", "distillation_alpha")),
    "in [0, 1)": (lambda x: 0.0 <= x < 1.0, ("teacher_rehearsal",)),
    "in (0, 1]": (lambda x: 0.0 < x <= 1.0, ("teacher_update_rate", "teacher_trust_weight", "credit_weight_clip")),
    "positive": (lambda x: 0.0 < x < math.inf, ("credit_weight_temperature",)),
    "positive or None": (lambda x: x is None or x > 0.0, ("teacher_trust_kl", "distillation_is_clip")),
    "positive and finite, or None": (lambda x: x is None or 0.0 < x < math.inf, ("verifier_timeout",)),
    "at least 0": (lambda x: x >= 0, ("dynamic_sampling_rounds",)),
    "at least 1": (
        lambda x: x is not None and x >= 1,
        (
            *("contrastive_count", "distillation_topk", "max_reprompt_len", "scoring_batch_tokens"),
            *("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "max_completion_length"),
        ),
    ),
    "at least 1 or None": (
        lambda x: x is None or x >= 1,
        ("teacher_sync_steps", "distillation_chunk_size", "update_batch_tokens"),
    ),
}

# JSON options of transformers that may also be file names.
_JSON_OR_FILE = ("accelerator_config", "fsdp_config", "deepspeed")

# Templates of the self-teacher contexts in the paper's appendix, where they differ from SDPO's.
_PAPER_TEMPLATES = {
    "reprompt_template": "{prompt}{solution}{feedback}\n\nNow solve this problem step by step.\n",
    "feedback_template": "\nPrevious assessment:\n\n{feedback_raw}\n\n",
}

# Alarms that `credit_stop_on` may name.
StopCause = Literal["fidelity", "collapse", "length"]

# Sources that need at least two prompts in the generation batch.
_FROM_BATCH = ("batch", "hard", "same_task")


def check_values(config: CreditConfig) -> None:
    """Check each option by itself.

    Raises:
        ValueError: a value has the wrong type or is out of range, or a template has wrong placeholders.
    """
    _check_types(config)
    _check_json(config)
    if config.output_dir is not None and Path(config.output_dir).is_file():
        raise ValueError(f"`output_dir={config.output_dir!r}` is a file. Name a folder, which may be a new one.")
    for name, choices in _choices().items():
        if getattr(config, name) not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(map(str, choices))}; got {getattr(config, name)!r}.")
    if config.distillation_kernels == "triton" and find_spec("triton") is None:
        raise ValueError(
            "`distillation_kernels='triton'` needs the package triton, which is not installed. torch's CUDA builds "
            "bring it along: install one, or set `distillation_kernels='torch'`."
        )
    _check_coefficient(config)
    for words, (holds, names) in _RANGES.items():
        if wrong := [name for name in names if not holds(getattr(config, name))]:
            raise ValueError(f"`{wrong[0]}` must be {words}, got {getattr(config, wrong[0])}.")
    if not 0.0 <= config.contrastive_gate < 1.0:
        raise ValueError(
            f"`contrastive_gate` must be in [0, 1), got {config.contrastive_gate}: no total variation exceeds 1. To "
            "disable the contrast set `contrastive_coef=0`."
        )
    _check_sampling(config)
    if not math.isfinite(config.success_reward_threshold):
        raise ValueError(
            f"`success_reward_threshold={config.success_reward_threshold}` is reached by no rollout or by all: set "
            "the lowest reward of a success. For no demonstrations set `use_successful_as_teacher=False`."
        )
    if unknown := [cause for cause in config.stop_causes if cause not in get_args(StopCause)]:
        raise ValueError(
            f"`credit_stop_on` must name alarms out of {', '.join(get_args(StopCause))}, joined by `|`; got "
            f"{unknown[0]!r}."
        )
    for name, placeholders in TEMPLATE_PLACEHOLDERS.items():
        if getattr(config, name) is not None:
            check_template(name, getattr(config, name), placeholders)


@functools.cache
def _choices() -> dict[str, tuple[object, ...]]:
    """Values of each option that has a `Literal` type, and of `_CHOICES_OF_TRL`."""
    choices, types = dict(_CHOICES_OF_TRL), get_type_hints(CreditConfig)
    for name in CreditConfig.__annotations__:
        for kind in (types[name], *get_args(types[name])):  # `Literal[…]`, or a part of `Literal[…] | None`
            if get_origin(kind) is Literal:
                choices[name] = get_args(kind) if kind is types[name] else (None, *get_args(kind))
    return choices


def _check_generation(config: CreditConfig) -> None:
    """Check `generation_kwargs`, of which transformers ignores unknown names."""
    kwargs = config.generation_kwargs if isinstance(config.generation_kwargs, dict) else {}
    if kwargs.get("temperature", config.temperature) != config.temperature:
        raise ValueError(
            f"`generation_kwargs` has the temperature {kwargs['temperature']}, but the loss uses `temperature="
            f"{config.temperature}`. Set `temperature` instead."
        )
    if kwargs.get("do_sample", True) is not True:
        raise ValueError(
            "`generation_kwargs` has `do_sample=False`, so that all rollouts of a group are equal. Remove it."
        )
    if kwargs.get("num_return_sequences", 1) != 1:
        raise ValueError(
            f"`generation_kwargs` has `num_return_sequences={kwargs['num_return_sequences']}`. Set `num_generations`, "
            "the rollouts of a prompt, instead."
        )
    known = GenerationConfig().to_dict()
    for name in () if config.use_vllm else kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f" Did you mean `{near[0]}`?" if near else ""
            raise ValueError(f"`generation_kwargs` has `{name}`, which `GenerationConfig` does not know.{advice}")


def _check_sampling(config: CreditConfig) -> None:
    """Check options of rollouts and optimizer that TRL passes on unchecked."""
    if not config.temperature > 0.0:
        raise ValueError(
            f"`temperature={config.temperature}` must be above 0: rollouts are sampled, and the loss divides the "
            "logits by it."
        )
    if not 0.0 < config.top_p <= 1.0:
        raise ValueError(f"`top_p` must be in (0, 1], got {config.top_p}. 1.0 is no limit.")
    if config.top_k < 0:
        raise ValueError(
            f"`top_k` must be at least 0, got {config.top_k}. 0 is no limit, where vLLM and verl have -1."
        )
    if config.learning_rate < 0.0:
        raise ValueError(f"`learning_rate` must be at least 0, got {config.learning_rate}. The paper's is 1e-6.")
    _check_generation(config)
    template = config.chat_template_kwargs if isinstance(config.chat_template_kwargs, dict) else {}
    for name, value in template.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise ValueError(
                f"`chat_template_kwargs` has the text {value!r} for {name!r}, which every template takes for true. "
                f"Write {value.lower()} without quotes."
            )


_KINDS = {
    "bool": (bool, "True or False"),
    "int": (numbers.Integral, "a whole number"),
    "float": (numbers.Real, "a number"),
}


def _check_types(config: CreditConfig) -> None:
    """Check the types of switches and numbers, so that the error names the option."""
    for own in takewhile(lambda one: one is not GRPOConfig, type(config).__mro__):
        for name, declared in vars(own).get("__annotations__", {}).items():
            kind, _, otherwise = str(declared).partition(" | ")
            value = getattr(config, name)
            if kind not in _KINDS or (value is None and otherwise == "None"):
                continue
            wanted, words = _KINDS[kind]
            if isinstance(value, bool) != (kind == "bool") or not isinstance(value, wanted):
                raise ValueError(f"`{name}` must be {words}, got {value!r}.{_without_quotes(value)}")
    for one in fields(config):
        kinds, value = re.findall(r"\w+", str(one.type)), getattr(config, one.name)
        words = [_KINDS[kind][1] for kind in kinds if kind in _KINDS]
        if value is None and one.name in _never_none():
            raise ValueError(f"`{one.name}` must be {words[0]}, got None. Its default is {one.default!r}.")
        fix = _without_quotes(value)
        if fix and words and "str" not in kinds:  # transformers would fail later, or take "false" for true
            raise ValueError(f"`{one.name}` is the text {value!r} instead of {words[0]}.{fix}")
        if isinstance(value, float) and "int" in kinds and "float" not in kinds:  # fails in the first step, if at all
            raise ValueError(f"`{one.name}` must be a whole number, got {value!r}.")


@functools.cache
def _never_none() -> set[str]:
    """Switches and numbers that may not be None; a command line's parser removes None from the types of the fields.

    transformers takes None for `gradient_checkpointing`, whose name is deprecated there.
    """
    kinds = get_type_hints(CreditConfig)
    return {name for name, kind in kinds.items() if kind in (bool, int, float)} - {"gradient_checkpointing"}


def _without_quotes(value: object) -> str:
    """How to write a number or a switch that is given as text; an empty string for other values."""
    if not isinstance(value, str):
        return ""
    try:
        meant = None if value.lower() in ("true", "false") else float(value)
    except ValueError:
        return ""
    if meant is None or "e" not in value.lower():
        return " Remove the quotes."
    return f" In YAML a number with an exponent needs a decimal point: write {meant:.1e}."


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
    """Check options that the command line gives as JSON text; transformers' own error does not name them."""
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
                f"`{name}` must be a JSON object such as '{{\"name\": false}}', got {value!r}{why}. Use double "
                "quotes, true, false and null."
            )


def check_combinations(config: CreditConfig) -> None:
    """Check combinations of options.

    Raises:
        ValueError: a combination cannot train, or an option would have no effect.
    """
    if config.enable_jit_checkpoint:
        raise ValueError(
            "`enable_jit_checkpoint=True` saves inside a step, where weights, teacher and generation batch do not "
            "match, so that a resumed run differs. Set it to False and save often (`save_steps`)."
        )
    _check_limits(config)
    _check_use(config)
    if config.dynamic_sampling_rounds:
        _check_dynamic_sampling(config)
    if config.distillation_weight == 0.0:
        return
    _check_teacher(config)
    _check_effects(config)
    if config.use_transformers_continuous_batching:
        raise ValueError(
            "`use_transformers_continuous_batching=True` (or `use_transformers_paged`) casts the whole model at each "
            "rollout, with the teacher's adapter, which would round its average away. Set `use_vllm=True` for fast "
            "rollouts, or `use_transformers_continuous_batching=False`."
        )
    _check_support(config)
    if config.contrasts:
        _check_contrast(config)
    if config.teacher_hint == "foreign":
        _check_batch_has_other_problems(config)
    has_privileged = config.use_successful_as_teacher or config.include_environment_feedback
    if config.teacher_prompt == "privileged" and not has_privileged:
        raise ValueError(
            "The teacher would have no privileged context: set `include_environment_feedback=True` or "
            "`use_successful_as_teacher=True`."
        )
    reads_feedback = config.include_environment_feedback or config.teacher_prompt == "student"
    if config.num_generations == 1 and not reads_feedback:
        raise ValueError(
            "`num_generations=1` gives no other rollout to demonstrate with, and `include_environment_feedback=False` "
            "ignores feedback, so no sample has a teacher. Set `include_environment_feedback=True`, or more "
            "generations."
        )
    if config._is_pure_distillation:
        _check_policy_terms_are_off(config)


def _check_support(config: CreditConfig) -> None:
    support, is_single = config.distillation_support, config.distillation_topk == 1
    if support == "sampled" and config.distillation_alpha != 1.0:
        raise ValueError(
            "`distillation_support='sampled'` scores the sampled token only, which estimates the reverse KL: it "
            f"needs `distillation_alpha=1`, got {config.distillation_alpha}."
        )
    if "topk" in support and is_single and config.distillation_tail == "renormalize":
        raise ValueError(
            "`distillation_topk=1` with `distillation_tail='renormalize'` conditions on one token, whose probability "
            "is then 1, so the loss is 0. Increase `distillation_topk`, or set `distillation_tail='bucket'`."
        )


def _check_limits(config: CreditConfig) -> None:
    """Compare limits of the engine and of collectives with what the run needs."""
    context = config.vllm_max_model_length
    if config.use_vllm and config.vllm_mode == "colocate" and context and config.max_completion_length >= context:
        raise ValueError(
            f"`max_completion_length={config.max_completion_length}` leaves no token of "
            f"`vllm_max_model_length={context}` for the prompt. Set `vllm_max_model_length` to the longest "
            "prompt and the longest completion together."
        )
    if config.world_size > 1 and config.verifier_timeout and config.verifier_timeout >= config.ddp_timeout:
        raise ValueError(
            f"`verifier_timeout={config.verifier_timeout:g}` s is not below `ddp_timeout={config.ddp_timeout}` s: "
            "while one process waits for its verifier, the collectives of the others time out and end the run. Lower "
            f"`verifier_timeout`, or set `ddp_timeout` to {2 * int(config.verifier_timeout)}."
        )


def _check_use(config: CreditConfig) -> None:
    """Check the use of the credit and the quantity that weights its tokens."""
    use, weight = config.credit_use, config.credit_weight
    if use != "distill" and config.distillation_weight == 0.0:
        raise ValueError(
            f"`credit_use={use!r}` with `distillation_weight=0` has no credit to use. Set `distillation_weight` above "
            "0, or `credit_use='distill'` for GRPO."
        )
    if use != "distill" and config.reward_weights is not None and not any(config.reward_weights):
        raise ValueError(
            f"`credit_use={use!r}` needs the verifier's rewards, but `reward_weights` are all 0. Set one above 0, or "
            "`credit_use='distill'`, which needs none."
        )
    allowed = {"distill": (None,), "modulate": (None, "delta_v", "s"), "route": (None, "entropy")}[use]
    if weight not in allowed:
        fixes = {"delta_v": "modulate", "s": "modulate", "entropy": "route"}
        raise ValueError(
            f"`credit_weight={weight!r}` has no meaning for `credit_use={use!r}`. Set `credit_use={fixes[weight]!r}`, "
            "or `credit_weight=None`."
        )
    if weight == "entropy" and config.distillation_support in ("full", "student_topk"):
        raise ValueError(
            "`credit_weight='entropy'` reads the stored entropy of the teacher, and `distillation_support="
            f"{config.distillation_support!r}` stores none. Set `distillation_support='teacher_topk'`."
        )
    if weight == "s" and config.contrastive_coef == 0.0:
        raise ValueError(
            "`credit_weight='s'` needs contrasts, but `contrastive_coef=0`. Leave `contrastive_coef` at its default "
            "(λ itself is not used), or set `credit_weight='delta_v'`."
        )


def _check_dynamic_sampling(config: CreditConfig) -> None:
    local = config.per_device_train_batch_size * config.steps_per_generation
    if local % config.num_generations:
        raise ValueError(
            f"`dynamic_sampling_rounds` replaces whole groups of a process, but its {local} rollouts "
            f"(`per_device_train_batch_size` · `steps_per_generation`) are no multiple of `num_generations="
            f"{config.num_generations}`. Change one of them, or set `dynamic_sampling_rounds=0`."
        )
    if config._is_pure_distillation and config.teacher_prompt == "student":
        raise ValueError(
            "`dynamic_sampling_rounds` replaces groups without a teacher, and with `teacher_prompt='student'` every "
            "sample has one. Set `dynamic_sampling_rounds=0`."
        )


def _check_teacher(config: CreditConfig) -> None:
    """Check the teacher's model and prompt."""
    name, kind = config.teacher_model_name_or_path, config.teacher_model_kind
    if kind == "model" and name is None:
        raise ValueError("`teacher_model_kind='model'` needs `teacher_model_name_or_path`, the model that teaches.")
    if kind != "model" and name is not None:
        raise ValueError(
            f"`teacher_model_name_or_path={name!r}` names another model, but `teacher_model_kind={kind!r}` makes the "
            "teacher from the policy. Set `teacher_model_kind='model'`, or remove the name."
        )
    if "revision" in (config.teacher_model_init_kwargs or {}):
        raise ValueError("`teacher_model_init_kwargs` has `revision`. Set `teacher_model_revision` instead.")
    if config.teacher_sync_steps is not None and kind in ("live", "base"):
        raise ValueError(
            f"`teacher_sync_steps={config.teacher_sync_steps}` has no effect with `teacher_model_kind={kind!r}`, "
            "which has no average. Set `teacher_model_kind='ema'`, or remove it."
        )
    if config.teacher_rehearsal:
        _check_rehearsal(config)
    is_own_target = config.teacher_prompt == "student" and kind == "live" and not config.contrasts
    if is_own_target and config.credit_use == "distill":
        raise ValueError(
            "`teacher_prompt='student'` with `teacher_model_kind='live'` makes the policy its own target, so nothing "
            "is learned. Set `teacher_prompt='privileged'` or another teacher."
        )


def _check_rehearsal(config: CreditConfig) -> None:
    problem = None
    if not config._is_pure_distillation:
        problem = "replaces whole updates by distillation: set `distillation_weight=1` and `credit_use='distill'`"
    elif config.distillation_support in ("full", "student_topk"):
        problem = "needs stored scores: set `distillation_support='teacher_topk'`"
    elif config.teacher_prompt == "student":
        problem = "keeps what the policy says with z, and `teacher_prompt='student'` has no z"
    elif config.teacher_is_frozen:
        problem = f"keeps the policy a teacher, and `teacher_model_kind={config.teacher_model_kind!r}` never changes"
    if problem is not None:
        raise ValueError(f"`teacher_rehearsal={config.teacher_rehearsal}` {problem}. Or set `teacher_rehearsal=0`.")


@dataclass(frozen=True)
class Neutral:
    """Options that one setting leaves without effect. `allowed` are values that are accepted besides the default."""

    setting: str
    holds: Callable[[CreditConfig], bool]
    options: tuple[str, ...]
    allowed: tuple[object, ...] = ()


_TARGET = ("contrastive_form", "contrastive_gate")
_DRAWS = ("contrastive_count", "contrastive_source", "contrastive_baseline", "contrastive_swap")
# Options of the privileged context and of the prompt that contains it.
PRIVILEGED_OPTIONS = (
    *("teacher_hint", "include_environment_feedback", "environment_feedback_only_without_solution"),
    *("use_successful_as_teacher", "dont_reprompt_on_self_success", "teacher_context"),
    *("remove_thinking_from_demonstration", "max_reprompt_len", "reprompt_style", *TEMPLATE_PLACEHOLDERS),
)

# Each is an error at construction.
NEUTRAL = (
    Neutral(
        "`credit_use='modulate'`",
        lambda c: c.credit_use == "modulate",
        (
            *("distillation_alpha", "distillation_support", "distillation_topk", "distillation_tail"),
            *("distillation_is_clip", *_TARGET),
        ),
    ),
    Neutral("`credit_use='modulate'`", lambda c: c.credit_use == "modulate", ("contrastive_coef",), (0.0,)),
    Neutral(
        "`contrastive_swap='self'`",
        lambda c: c.contrastive_swap == "self" and c.contrasts,
        ("contrastive_count", "contrastive_source", "contrastive_baseline"),
    ),
    Neutral("`credit_weight='delta_v'`", lambda c: c.token_weight == "delta_v", _DRAWS),
    Neutral(
        "`credit_use` other than `'modulate'`",
        lambda c: c.credit_use != "modulate",
        ("credit_weight_form", "credit_weight_clip", "credit_weight_norm"),
    ),
    Neutral("`credit_weight=None`", lambda c: c.token_weight is None, ("credit_weight_temperature",)),
    Neutral(
        "`teacher_model_kind` other than `'model'`",
        lambda c: c.teacher_model_kind != "model",
        ("teacher_model_revision", "teacher_model_init_kwargs", "teacher_adapter_name_or_path"),
    ),
    Neutral(
        "`teacher_model_kind='model'`",
        lambda c: c.teacher_model_kind == "model",
        ("teacher_update_rate", "teacher_sync_steps"),
    ),
    Neutral(
        "`teacher_model_kind` other than `'trust_region'`",
        lambda c: c.teacher_model_kind != "trust_region",
        ("teacher_trust_weight", "teacher_trust_kl"),
    ),
    Neutral("`teacher_prompt='student'`", lambda c: c.teacher_prompt == "student", PRIVILEGED_OPTIONS),
    Neutral(
        "`teacher_prompt='student'`, which has no z,",
        lambda c: c.teacher_prompt == "student" and c.contrasts,
        ("contrastive_swap",),
        ("self",),
    ),
    Neutral(
        "`contrastive_source='wrong_feedback'`",
        lambda c: c.contrastive_source == "wrong_feedback" and c.contrasts,
        ("contrastive_swap",),
    ),
)


def _check_effects(config: CreditConfig) -> None:
    """Raise for options that another one leaves without effect."""
    for rule in NEUTRAL:
        if not rule.holds(config):
            continue
        for name in rule.options:
            value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
            if value != default and value not in rule.allowed:
                raise ValueError(
                    f"`{name}={value!r}` has no effect with {rule.setting}. Leave it at its default, {default!r}, or "
                    "change that setting."
                )
    if config.update_batch_tokens is not None and (config.credit_use != "distill" or config.distillation_weight < 1.0):
        raise ValueError(
            "`update_batch_tokens` divides the micro-batches of the distillation loss, and this run has GRPO's loss "
            "too. Remove it and lower `per_device_train_batch_size`, or set `distillation_weight=1` and "
            "`credit_use='distill'`."
        )
    if "fidelity" in config.stop_causes and config.credit_use != "distill":
        raise ValueError(
            f"`credit_stop_on='fidelity'` needs the distillation loss of successes and failures, which `credit_use="
            f"{config.credit_use!r}` does not compute. Remove it from `credit_stop_on`."
        )
    if "fidelity" in config.stop_causes and config.teacher_is_frozen:
        raise ValueError(
            "`credit_stop_on='fidelity'` stops when the teacher unlearns to read feedback, which a frozen teacher "
            f"(`teacher_model_kind={config.teacher_model_kind!r}`) cannot. Remove it from `credit_stop_on`."
        )


def _check_contrast(config: CreditConfig) -> None:
    if config.contrastive_swap == "hint" and config.contrastive_source != "batch":
        raise ValueError(
            "`contrastive_swap='hint'` uses privileged contexts of other rollouts of the batch: set "
            "`contrastive_source='batch'`."
        )
    if config.contrastive_source == "none" and config.contrastive_count != 1:
        raise ValueError(
            "`contrastive_source='none'` has one contrast, the prompt without its question: set "
            f"`contrastive_count=1`, got {config.contrastive_count}."
        )
    if config.contrastive_source == "wrong_feedback" and config.teacher_prompt == "student":
        raise ValueError(
            "`contrastive_source='wrong_feedback'` exchanges the privileged context, and `teacher_prompt='student'` "
            "has none. Set `teacher_prompt='privileged'`, or `contrastive_source='batch'`."
        )
    if config.contrastive_source == "wrong_feedback" and config.num_generations == 1:
        raise ValueError(
            "`contrastive_source='wrong_feedback'` reads failed rollouts of the same prompt, and `num_generations=1` "
            "samples no other. Set more generations, or `contrastive_source='batch'`."
        )
    if config.contrastive_source in _FROM_BATCH and config.contrastive_swap != "self":
        _check_batch_has_other_problems(config)


def _check_batch_has_other_problems(config: CreditConfig) -> None:
    if config.generation_batch_size // config.num_generations < 2:
        raise ValueError(
            f"A generation batch of {config.generation_batch_size} rollouts with `num_generations="
            f"{config.num_generations}` holds one prompt, so there is no contrast prompt. Increase "
            "`per_device_train_batch_size`, `gradient_accumulation_steps` or `generation_batch_size`, set "
            "`contrastive_source='dataset'` or `'none'`, or set `contrastive_coef=0` (SDPO)."
        )


def _check_policy_terms_are_off(config: CreditConfig) -> None:
    """Raise for options of GRPO's loss at `distillation_weight=1`, which does not compute that loss."""
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
    if config.loss_type == "luspo":
        del off["importance_sampling_level"]  # TRL asks for "sequence" there
    for name, neutral in off.items():
        if getattr(config, name) != neutral:
            raise ValueError(
                f"`{name}={getattr(config, name)}` is an option of GRPO's loss, which `distillation_weight=1` does "
                f"not compute. Lower `distillation_weight`, or set `{name}={neutral!r}`."
                + (" `beta` of GKD is `distillation_alpha`." if name == "beta" else "")
            )


def check_template(name: str, template: str, placeholders: tuple[str, ...]) -> None:
    """Check that a template has each of its placeholders once and no other.

    Raises:
        ValueError: it has not; the message calls it `name`.
    """
    try:
        found = [field_name for _, field_name, _, _ in string.Formatter().parse(template) if field_name is not None]
    except ValueError as error:
        raise ValueError(
            f"`{name}` is not a format string ({error}); write literal braces as {{{{ and }}}}."
        ) from None
    if missing := [p for p in placeholders if p not in found]:
        raise ValueError(f"`{name}` lacks {', '.join('{' + p + '}' for p in missing)}: {template!r}.")
    if sorted(found) != sorted(placeholders):
        raise ValueError(
            f"`{name}` must have each of {', '.join('{' + p + '}' for p in placeholders)} once and no other "
            f"placeholder: {template!r}."
        )
