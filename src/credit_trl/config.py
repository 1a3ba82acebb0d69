"""`CreditConfig`: every option with its range, its symbol in the paper and its checks."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import string
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
import yaml
from trl import GRPOConfig

from credit_trl.mistakes import check_option_type, check_rewards_and_loggers, refusal, refuse_unknown
from credit_trl.objective import Form

# TRL uses transformers' old names, which a user cannot change.
warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)


_HERE = Path(__file__).parent
PAPER: dict[str, Any] = yaml.safe_load((_HERE / "paper.yaml").read_text("utf-8"))


def _described(config: type) -> type:
    """The dataclass with help of its options from the docstring, and an initializer that refuses unknown options."""
    described = re.findall(r"^ {8}([a-z_, ]+) \(.+\):\n((?: {12}.+\n)+)", config.__doc__ or "", re.MULTILINE)
    for names, text in described:
        for name in names.split(", "):
            config.__dataclass_fields__[name].metadata = {"help": " ".join(text.split())}
    initialize = config.__init__

    @functools.wraps(initialize)
    def checked(self: CreditConfig, *args: Any, **options: Any) -> None:
        names = [field.name for field in self.__dataclass_fields__.values() if field.init]
        refuse_unknown(type(self).__name__, "option", options, names)
        initialize(self, *args, **options)

    config.__init__ = checked
    return config


@_described
@dataclass
class CreditConfig(GRPOConfig):
    r"""
    Configuration of [`CreditTrainer`]: TRL's [`~trl.GRPOConfig`] and the options of the credit.

    GRPO, SDPO and CREDIT are one trainer that differs only in the advantage: `distillation_weight=0` is GRPO,
    `contrastive_coef=0` is SDPO. Options of TRL's `SDPOConfig` keep their names. Options of the credit default to the
    paper's LiveCodeBench column, with a frozen teacher, others to TRL's values; `CreditConfig.paper` gives a column.

    Without an accelerator `bf16` is off by default. With a distillation loss a generation batch holds at least 8
    prompts and an evaluation batch 2 where no size is set. `vllm_importance_sampling_mode` is `"token_truncate"` with
    the bound 2.0: one ratio for a completion of thousands of tokens is far from 1 by rounding alone.

    Parameters:
        > The contrast

        contrastive_coef (`float`, *optional*, defaults to `0.1`):
            λ, the weight of the input-generic baseline Ĝ that is subtracted from the teacher (Eq. 8), in [0, 1]; any
            λ ≥ 0 for `contrastive_form="guide"`. The paper finds 0.05 to 0.1 best, and a collapse of S_t towards 0.5.
        contrastive_form (`"subtract"` or `"guide"`, *optional*, defaults to `"subtract"`):
            Form of the target: the paper's `f − λ Ĝ`, or `f + λ (f − Ĝ)`, which equals the teacher at positions where
            teacher and contrast agree. λ = 1 of `"guide"` is λ = 0.5 of `"subtract"` without its flattening.
        contrastive_count (`int`, *optional*, defaults to `1`):
            C ≥ 1: contrast prompts per sample. Each costs one forward pass of the teacher.
        contrastive_source (`str`, *optional*, defaults to `"batch"`):
            Source of the contrast prompts: the global generation batch (`"batch"`, the paper), with one draw for a
            group; the whole `"dataset"`, for batches with few prompts; the same prompt with `"other_images"` or
            `"without_images"`; or a function of your own, `"module:function"`.

        > The distillation loss

        distillation_weight (`float`, *optional*, defaults to `1.0`):
            w in [0, 1]: `(1 − w) · GRPO loss + w · distillation loss`. 0 is GRPO.
        distillation_alpha (`float`, *optional*, defaults to `1.0`):
            α in [0, 1]: 1 reverse KL (Algorithm 1), 0 forward KL, 0.5 Jensen-Shannon.
        distillation_support (`str`, *optional*, defaults to `"teacher_topk"`):
            Tokens of the vocabulary that carry the loss: the teacher's K most likely (the paper), or the sampled token
            only (`"sampled"`, α = 1). In Python SDPO's `distillation_mode` is taken too: `"topk_logits"`,
            `"sampled_token"`, or `"full_logits"` for K = `None`.
        distillation_topk (`int`, *optional*, defaults to `20`):
            K_v. The paper uses 20 on LiveCodeBench, 100 elsewhere. `None`: the whole vocabulary.
        distillation_tail (`"bucket"` or `"renormalize"`, *optional*, defaults to `"bucket"`):
            Treatment of the probability outside a top-K support: one more bucket, or conditioning on the support.
            Doing neither collapses and is not supported.
        distillation_is_clip (`float`, *optional*, defaults to `2.0`):
            Upper bound on the importance ratio π_θ / π_rollout of the sampled token, which multiplies its loss when a
            generation batch is used for more than one update. `None`: no ratio. With vLLM, π_rollout is the engine's
            where `vllm_importance_sampling_correction=False`.
        scoring_batch_tokens (`int`, *optional*, defaults to `16384`):
            Maximum number of tokens in one forward pass of the teacher, padding included; independent of the
            micro-batch.
        packed (`bool`, *optional*):
            Concatenate sequences in the passes of student and teacher instead of padding them. Needs an attention
            implementation with variable lengths (FlashAttention, FlexAttention) or PyTorch's (`"sdpa"`), which reads a
            prompt that several sequences share once. `None`: where student and teacher can and are no
            vision-language models, as images need padded rows. With `True` a student that cannot pads, with one
            warning, if its teacher is another model that can; else it is an error. GRPO's part of a mixture reads the
            pass of the distillation. At `distillation_weight=0` rows are packed with `True` only, and a model that
            cannot takes TRL's path, with a warning.

        > The teacher π_ref

        teacher_model_kind (`str`, *optional*, defaults to `"base"`, or `"ema"` if one of its two options is set):
            The teacher: the initial policy (`"base"`), an exponential moving average of the policy (`"ema"`, the
            paper's), the policy itself (`"live"`), or the `"model"` that the options `teacher_model_…` name.
        teacher_model_name_or_path (`str`, *optional*):
            Name or path of a causal LM with the policy's vocabulary, such as a larger or a fine-tuned model. A
            checkpoint stores its name and revision, not its weights.
        teacher_model_init_kwargs (`dict`, *optional*):
            Keyword arguments of its `from_pretrained`, such as `revision`, `dtype`, `attn_implementation` or
            `quantization_config`. The dtype defaults to that of its files. It is sharded as the policy is.
        teacher_prompt (`"privileged"` or `"student"`, *optional*, defaults to `"privileged"`):
            Prompt of the teacher: (x, z), or the student's own x. With `"student"` every sample has a teacher, and
            `teacher_model_kind="model"` is plain on-policy distillation (TRL's `DistillationTrainer`).
        teacher_update_rate (`float`, *optional*):
            Rate of `"ema"`, in (0, 1], `None` for 0.01: `teacher ← (1 − rate) · teacher + rate · student`.
        teacher_sync_steps (`int`, *optional*):
            Optimizer steps between updates of the EMA. `None`: one update per generation batch.

        > The privileged context z

        include_environment_feedback (`bool`, *optional*, defaults to `True`):
            Whether `Verdict.feedback` and the column `privileged_context` reach the teacher.
        environment_feedback_only_without_solution (`bool`, *optional*, defaults to `False`):
            Use feedback only where the group has no successful rollout (SDPO's code).
        use_successful_as_teacher (`bool`, *optional*, defaults to `True`):
            Whether the teacher reads a successful rollout of the same group as a demonstration.
        success_reward_threshold (`float`, *optional*):
            Lowest reward of a successful rollout. `None`: 1 where rewards are 0 and 1. In a generation batch with a
            reward above 1, or with few rewards of 0 and 1, no rollout is successful, with a warning.
        dont_reprompt_on_self_success (`bool`, *optional*, defaults to `True`):
            Whether a rollout may not be its own demonstration.
        teacher_context (`str`, *optional*, defaults to `"solution"`):
            Part of a demonstration that the teacher reads: `"solution"` without the thinking, `"think"` alone, or
            `"think+solution"`. The paper finds the first stable; the second collapses.
        max_reprompt_len (`int`, *optional*, defaults to `10240`):
            Maximum number of tokens of a teacher or contrast prompt. A longer one loses the middle of its feedback,
            then of its demonstration; the prompt and the generation prompt are never cut. Feedback on single turns
            has as many tokens again.
        reprompt_template, solution_template, feedback_template (`str`, *optional*):
            Templates of the teacher's user turn, by default those of the paper's appendix. Placeholders:
            `{prompt}{solution}{feedback}`, `{successful_previous_attempt}`, `{feedback_raw}`.

        > Errors

        on_verifier_error (`"raise"` or `"skip"`, *optional*, defaults to `"raise"`):
            Policy for a reward function that raises or exceeds `verifier_timeout`: end the run, or mask the rollouts
            of that call in the loss; `credit/frac_verifier_skipped` logs their share.
        verifier_timeout (`float`, *optional*):
            Maximum seconds of one call of a reward function (all rollouts of one process); later results are ignored.
            With a limit the function runs in its own thread, where time-outs by signals inside it are refused; under
            `credit_trl.in_process` they work. `None`: no limit.
        on_nonfinite (`"raise"` or `"skip"`, *optional*, defaults to `"raise"`):
            Policy for an update whose loss or gradient is NaN or infinite: end the run before the optimizer's step,
            or skip the update; `credit/frac_skipped_updates` logs their share.

    Raises:
        ValueError: at construction, where a value is out of range or a combination cannot train.
    """

    is_sized: ClassVar[bool] = False  # whether a batch size was given; set at construction
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]  # noqa: RUF012, as in TRL

    per_device_train_batch_size: int | None = None  # resolved to TRL's 8, as the next three to the values above
    per_device_eval_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    vllm_importance_sampling_mode: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = None
    vllm_importance_sampling_clip_max: float | None = -1.0  # resolved to 2.0 or TRL's 3.0; None is no bound, as in TRL

    contrastive_coef: float = 0.1
    contrastive_form: Form = "subtract"
    contrastive_count: int = 1
    contrastive_source: str = "batch"

    distillation_weight: float = 1.0
    distillation_alpha: float = 1.0
    distillation_support: Literal["teacher_topk", "sampled"] = "teacher_topk"
    distillation_topk: int | None = 20
    distillation_tail: Literal["bucket", "renormalize"] = "bucket"
    distillation_is_clip: float | None = 2.0
    scoring_batch_tokens: int = 16384
    packed: bool | None = None

    teacher_model_kind: Literal["base", "ema", "live", "model"] | None = None
    teacher_model_name_or_path: str | None = None
    teacher_model_init_kwargs: dict[str, Any] | str | None = None
    teacher_prompt: Literal["privileged", "student"] = "privileged"
    teacher_update_rate: float | None = None
    teacher_sync_steps: int | None = None

    include_environment_feedback: bool = True
    environment_feedback_only_without_solution: bool = False
    use_successful_as_teacher: bool = True
    success_reward_threshold: float | None = None
    dont_reprompt_on_self_success: bool = True
    teacher_context: Literal["solution", "think", "think+solution"] = "solution"
    max_reprompt_len: int = 10240
    reprompt_template: str = "{prompt}\n{solution}{feedback}\nNow solve this problem step by step."
    solution_template: str = "\nCorrect solution:\n{successful_previous_attempt}\n"
    feedback_template: str = "\nPrevious assessment:\n{feedback_raw}\n"

    on_verifier_error: Literal["raise", "skip"] = "raise"
    verifier_timeout: float | None = None
    on_nonfinite: Literal["raise", "skip"] = "raise"

    distillation_mode: InitVar[Literal["sampled_token", "topk_logits", "full_logits"] | None] = None  # of `SDPOConfig`

    _sdpo_mode: ClassVar[str | None] = None  # `distillation_mode`, which a subclass's `__post_init__` does not pass on

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a subclass define `__post_init__(self)`, as for a dataclass without `InitVar`."""
        super().__init_subclass__(**kwargs)
        post_init = vars(cls).get("__post_init__")
        if post_init is None or len(inspect.signature(post_init).parameters) > 1:
            return

        @functools.wraps(post_init)
        def without_mode(self: CreditConfig, distillation_mode: str | None = None) -> None:
            if distillation_mode is not None:
                self._sdpo_mode = distillation_mode
            post_init(self)

        cls.__post_init__ = without_mode

    def __post_init__(self, distillation_mode: str | None = None) -> None:  # noqa: RUF033, subclasses pass nothing
        distillation_mode = distillation_mode or self._sdpo_mode
        if distillation_mode is not None:
            modes = {"sampled_token": "sampled", "topk_logits": "teacher_topk", "full_logits": "teacher_topk"}
            self.distillation_support = modes.get(distillation_mode, distillation_mode)
            self.distillation_topk = None if distillation_mode == "full_logits" else self.distillation_topk
        _check_values(self)  # own options first: TRL checks the machine, and its error would hide theirs
        _resolve_defaults(self)
        try:
            super().__post_init__()
        except ValueError as error:
            cause = next((cause for words, cause in _TRL_ERRORS.items() if words in str(error)), None)
            if cause is None:
                raise
            rollouts = self.per_device_train_batch_size * self.world_size if cause == "not_divisible" else None
            raise refusal(cause, c=self, rollouts=rollouts) from error
        if self.distillation_weight > 0.0:
            check_combinations(self)  # uses batch sizes that TRL has resolved

    def to_dict(self) -> dict[str, Any]:
        """Options for logs. Access tokens in loading options are masked, as transformers masks those outside."""
        return {name: _without_tokens(value) for name, value in super().to_dict().items()}

    @contextmanager
    def masked_tokens(self) -> Iterator[None]:
        """Mask the access tokens in loading options while the block pickles the options."""
        options = {name: value for name, value in vars(self).items() if isinstance(value, dict)}
        vars(self).update({name: _without_tokens(value) for name, value in options.items()})
        try:
            yield
        finally:
            vars(self).update(options)

    @classmethod
    def paper(cls, benchmark: str, output_dir: str, **overrides: Any) -> CreditConfig:
        """The paper's hyperparameters (Table 3) for a benchmark.

        Micro-batches have two rollouts a process, and accumulation makes the paper's number of optimizer steps of a
        generation batch of 256 rollouts: four on LiveCodeBench, one elsewhere.

        Args:
            benchmark: `"livecodebench"`, `"sciknoweval"` or `"toolalpaca"`.
            output_dir: the run directory.
            overrides: options with other values.

        Raises:
            ValueError: there is no such benchmark, or an option is refused.
        """
        columns = PAPER["benchmarks"]
        if benchmark not in columns:
            raise ValueError(f"`benchmark` must be one of {', '.join(columns)}; got {benchmark!r}.")
        options = PAPER["options"] | columns[benchmark] | {"output_dir": output_dir} | overrides
        steps = 4 if benchmark == "livecodebench" else 1
        passes = options["generation_batch_size"] // (options["per_device_train_batch_size"] * _processes())
        return cls(**{"gradient_accumulation_steps": max(1, passes // steps)} | options)

    @property
    def contrasts(self) -> bool:
        """Whether contrasts are used: λ is not 0."""
        return self.contrastive_coef != 0.0


def _without_tokens(value: Any) -> Any:
    """A value with the access tokens masked that dictionaries in it hold."""
    if isinstance(value, list):
        return list(map(_without_tokens, value))
    if not isinstance(value, dict):
        return value
    masked = {name: _without_tokens(entry) for name, entry in value.items()}
    return masked | {name: "<TOKEN>" for name in _TOKEN_NAMES & value.keys() if value[name]}


# Arguments of `from_pretrained` and of the hub's functions that hold an access token.
_TOKEN_NAMES = {"token", "use_auth_token", "auth_token", "hf_token", "hub_token"}
_BATCH_SIZES = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size"),
    "steps_per_generation",
)
# Prompts of a generation batch where none of them is set.
_DEFAULT_PROMPTS = 8


# Words of errors of TRL and transformers -> their cause in `refused.yaml`, which says what to do.
_TRL_ERRORS = {"bf16/gpu": "no_bf16", "divisible by the global batch size": "not_divisible"}


def _processes() -> int:
    """Processes of the run, as the launcher sets them; TRL knows them only after construction."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _accumulation(config: CreditConfig, prompts: int) -> int:
    """Fewest accumulation steps with whole groups and at least this many prompts."""
    rollouts = config.per_device_train_batch_size * _processes()
    steps = config.num_generations // math.gcd(config.num_generations, rollouts)  # of whole groups
    return steps * math.ceil(prompts * config.num_generations / (rollouts * steps))


def _fit_eval_batch(config: CreditConfig, distills: bool) -> None:
    """Set whole groups of rollouts as an evaluation batch, where no size is set; of two prompts if it `distills`."""
    if not config.is_eval_sized:
        group = config.num_generations_eval or config.num_generations
        step = group // math.gcd(group, _processes())  # of whole groups
        fewest = max(GRPOConfig.per_device_eval_batch_size, 2 * group / _processes() if distills else 1)
        config.per_device_eval_batch_size = step * math.ceil(fewest / step)


def fit_batch(config: CreditConfig, rows: int | None) -> None:
    """Set at most as many prompts in a generation batch as there are rows (None: many), where no batch size is set.

    An evaluation batch has two prompts: the configuration does not know of a `token_weight`, with which GRPO distils.
    """
    _fit_eval_batch(config, distills=True)
    if config.is_sized:
        return
    if rows is None:
        rows = _DEFAULT_PROMPTS
    prompts = min(rows, _DEFAULT_PROMPTS)
    largest = GRPOConfig.per_device_train_batch_size
    config.per_device_train_batch_size = largest
    if rows < _DEFAULT_PROMPTS:
        rollouts = prompts * config.num_generations
        sizes = [size for size in range(1, largest + 1) if rollouts % (size * config.world_size) == 0]
        config.per_device_train_batch_size = max(sizes, default=largest)
    config.gradient_accumulation_steps = config.steps_per_generation = _accumulation(config, prompts)
    rollouts = config.per_device_train_batch_size * config.world_size
    config.generation_batch_size = rollouts * config.steps_per_generation


def _resolve_defaults(config: CreditConfig) -> None:
    """Set options whose default depends on others or on the machine."""
    distills = config.distillation_weight > 0.0
    config.is_sized = any(getattr(config, name) is not None for name in _BATCH_SIZES)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(config, name) is None:
            setattr(config, name, getattr(GRPOConfig, name))
    if distills and not config.is_sized:
        config.gradient_accumulation_steps = _accumulation(config, _DEFAULT_PROMPTS)
    config.is_eval_sized = config.per_device_eval_batch_size is not None
    _fit_eval_batch(config, distills)
    has_average = (config.teacher_update_rate, config.teacher_sync_steps) != (None, None)
    config.teacher_model_kind = config.teacher_model_kind or ("ema" if has_average else "base")
    config.teacher_update_rate = config.teacher_update_rate or 0.01
    has_mode = config.vllm_importance_sampling_mode is not None
    if config.vllm_importance_sampling_clip_max == -1.0:
        bound = GRPOConfig.vllm_importance_sampling_clip_max
        config.vllm_importance_sampling_clip_max = 2.0 if distills and not has_mode else bound
    if not has_mode:
        bounds = (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
        by_token = "token_mask" if bounds == (None, None) else "token_truncate"  # which needs a bound
        config.vllm_importance_sampling_mode = by_token if distills else "sequence_mask"
    if config.packed is None and config.neftune_noise_alpha is not None:
        config.packed = False
    if config.report_to is None:  # `null` in YAML
        config.report_to = "none"
    if config.bf16 is None and (config.use_cpu or not torch.accelerator.is_available()):
        config.bf16 = False


_PLACEHOLDERS = {
    "reprompt_template": ["prompt", "solution", "feedback"],
    "solution_template": ["successful_previous_attempt"],
    "feedback_template": ["feedback_raw"],
}

# Range in words -> its test, and the options that are in it.
_RANGES: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "in [0, 1]": (lambda x: 0.0 <= x <= 1.0, ("distillation_weight", "distillation_alpha")),
    "in (0, 1]": (lambda x: 0.0 < x <= 1.0, ("top_p",)),
    "in (0, 1] or None": (lambda x: 0.0 < x <= 1.0, ("teacher_update_rate",)),
    "above 0": (lambda x: x > 0.0, ("temperature", "num_train_epochs", "logging_steps", "save_steps")),
    "finite and at least 0": (
        lambda x: 0.0 <= x < math.inf,
        ("contrastive_coef", "learning_rate", "weight_decay", "warmup_steps"),
    ),
    "an integer of at least 1, or -1 for no limit": (
        lambda x: isinstance(x, Integral) and (x >= 1 or x == -1),
        ("max_steps",),
    ),
    "finite or None": (math.isfinite, ("success_reward_threshold",)),
    "positive or None": (lambda x: 0.0 < x < math.inf, ("distillation_is_clip", "verifier_timeout")),
    "an integer of at least 1": (
        lambda x: isinstance(x, Integral) and x >= 1,
        ("contrastive_count", "max_reprompt_len", "scoring_batch_tokens", "num_iterations", "num_generations"),
    ),
    "an integer of at least 1 or None": (
        lambda x: isinstance(x, Integral) and x >= 1,
        ("distillation_topk", "teacher_sync_steps", "max_completion_length", "save_total_limit", *_BATCH_SIZES),
    ),
}

# Options of GRPO's loss, which `distillation_weight=1` does not compute. TRL's defaults have no effect.
_POLICY_LOSS = (
    "beta entropy_coef use_adaptive_entropy top_entropy_quantile off_policy_mask_threshold importance_sampling_level "
    "delta epsilon_high".split()
)


def _check_values(config: CreditConfig) -> None:
    """Check each option by itself.

    Raises:
        ValueError: a value is out of range, or a template has wrong placeholders.
    """
    annotations = get_type_hints(CreditConfig)
    for name, kind in annotations.items():
        is_optional = type(None) in get_args(kind)
        kind = get_args(kind)[0] if is_optional else kind
        value = getattr(config, name)
        if get_origin(kind) is Literal and value not in get_args(kind) and not (is_optional and value is None):
            choices = ", ".join(map(str, get_args(kind)))
            raise ValueError(f"`{name}` must be one of {choices}; got {value!r}.")
    for words, (is_in_range, names) in _RANGES.items():
        for name in names:
            value = getattr(config, name)
            is_valid = "None" in words if value is None else not isinstance(value, str) and is_in_range(value)
            if not is_valid:
                raise ValueError(f"`{name}` must be {words}, got {value!r}.")
    for name, kind in annotations.items():
        check_option_type(name, getattr(config, name, None), {kind, *get_args(kind)})
    check_rewards_and_loggers(config)
    if config.contrastive_form == "subtract" and config.contrastive_coef > 1.0:
        raise refusal("large_coef", c=config)
    compiles = config.torch_compile or config.torch_compile_backend or config.torch_compile_mode
    # Before transformers tells accelerate by the environment.
    if compiles and (config.distillation_weight > 0.0 or config.packed):
        raise refusal("torch_compile")
    if config.packed and config.neftune_noise_alpha is not None:
        raise refusal("neftune")
    if config.packed and config.use_transformers_continuous_batching:
        raise refusal("continuous_batching")
    for name, placeholders in _PLACEHOLDERS.items():
        template = getattr(config, name)
        try:
            fields_of_template = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
        except ValueError:  # no format string
            fields_of_template = []
        if sorted(fields_of_template) != sorted(placeholders):
            raise ValueError(
                f"`{name}` must have each of {', '.join('{' + p + '}' for p in placeholders)} once, no other "
                f"placeholder, and literal braces as {{{{ and }}}}; got {template!r}."
            )


def check_combinations(config: CreditConfig) -> None:
    """Raise a `ValueError` where a teacher cannot score with these options, or an option would have no effect."""
    for name, is_refused in _REFUSED.items():
        if is_refused(config):
            raise refusal(name, c=config)
    policy = [name for name in _POLICY_LOSS if getattr(config, name) != getattr(GRPOConfig, name)]
    if config.loss_type == "luspo" and "importance_sampling_level" in policy:
        policy.remove("importance_sampling_level")  # TRL asks for "sequence" there
    if config.distillation_weight == 1.0 and policy:
        raise refusal("policy_loss", name=policy[0])


# Combination that is refused, by its name in `refused.yaml` -> whether a configuration has it.
_REFUSED: dict[str, Callable[[CreditConfig], bool]] = {
    "continuous_batching": lambda c: c.use_transformers_continuous_batching,
    "teacher_model": lambda c: (c.teacher_model_name_or_path is not None) != (c.teacher_model_kind == "model"),
    "own_target": lambda c: c.teacher_prompt == "student" and c.teacher_model_kind == "live" and not c.contrasts,
    "one_prompt": lambda c: (
        c.contrasts and c.contrastive_source == "batch" and c.generation_batch_size < 2 * c.num_generations
    ),
    "no_length": lambda c: c.max_completion_length is None,
    "jit_checkpoint": lambda c: c.enable_jit_checkpoint,
    "temperature": lambda c: (c.generation_kwargs or {}).get("temperature", c.temperature) != c.temperature,
    "sampled_alpha": lambda c: c.distillation_support == "sampled" and c.distillation_alpha != 1.0,
    "one_conditional": lambda c: c.distillation_tail == "renormalize" and c.distillation_topk == 1,
}
