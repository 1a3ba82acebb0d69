"""Every knob of CREDIT, its range and its symbol in the paper, checked where it is set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trl import GRPOConfig

from credit_trl import validation
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
            C ≥ 1: other questions per sample. Each costs one more forward pass of the reference.
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
            (`"student_topk"`, SDPO's code), all (`"full"`) or the realised token only (`"sampled"`, α = 1).
        distillation_topk (`int`, *optional*, defaults to `20`):
            K_v. The paper uses 20 on LiveCodeBench, 100 elsewhere.
        distillation_tail (`"bucket"` or `"renormalize"`, *optional*, defaults to `"bucket"`):
            What happens to the mass outside a top-K support: one more bucket, or conditioning on the support. Doing
            neither collapses, so it is not offered.
        distillation_is_clip (`float`, *optional*, defaults to `2.0`):
            Upper bound on the importance ratio π_θ / π_rollout of the realised token that multiplies its loss when a
            generation batch is used for more than one update. `None`: no ratio.
        distillation_chunk_size (`int`, *optional*):
            Tokens whose vocabulary row lives at the same time. `None` chooses.
        distillation_kernels (`"torch"` or `"triton"`, *optional*, defaults to `"torch"`):
            What finishes, sums and differentiates rows of logits on a GPU: torch in many passes over memory, or
            Triton in one each. `"torch"` is the default because nothing has been measured on a GPU: `"triton"` agrees
            with it in Triton's interpreter on a CPU, and what it saves is a count of bytes (docs/performance.md). It
            needs a GPU, and the package triton, which torch's CUDA builds bring along.
        scoring_batch_tokens (`int`, *optional*, defaults to `16384`):
            Tokens in one forward pass of the reference, padding included; independent of the micro-batch.
        scoring_packed (`bool`, *optional*, defaults to `False`):
            Sequences one after the other instead of side by side: no padding at all. Needs an attention
            implementation with variable lengths (FlashAttention, FlexAttention).

        > The reference π_ref

        teacher_model_kind (`"ema"`, `"live"` or `"base"`, *optional*, defaults to `"ema"`):
            An exponential moving average of the policy, the policy itself, or the initial policy.
        teacher_update_rate (`float`, *optional*, defaults to `0.01`):
            In (0, 1]: `teacher ← (1 − rate) · teacher + rate · student`.
        teacher_sync_steps (`int`, *optional*):
            Optimizer steps between two updates of the EMA. `None`: one update a generation batch.
        teacher_offload (`bool`, *optional*, defaults to `False`):
            Keep the reference's copy in main memory between scoring phases. For full fine-tuning without sharding.

        > The teacher's context: what the reference reads besides the prompt

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
        default=16384, metadata={"help": "Tokens in one forward pass of the reference, padding included."}
    )
    scoring_packed: bool = field(
        default=False, metadata={"help": "Score without padding; needs attention with variable lengths."}
    )

    teacher_model_kind: Literal["ema", "live", "base"] = field(
        default="ema", metadata={"help": "The reference: an average of the policy, the policy, or the initial policy."}
    )
    teacher_update_rate: float = field(default=0.01, metadata={"help": "Update rate of the EMA reference."})
    teacher_sync_steps: int | None = field(
        default=None,
        metadata={"help": "Optimizer steps between two updates of the EMA; None for one a generation batch."},
    )
    teacher_offload: bool = field(
        default=False, metadata={"help": "Keep the reference's copy in main memory between scoring phases."}
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
        validation.check_values(self)
        self._settle_teacher_context()
        try:
            super().__post_init__()
        except ValueError as error:
            if "bf16" not in str(error):
                raise
            raise ValueError(f"{error} On a machine without a GPU set `use_cpu=True` and `bf16=False`.") from error
        validation.check_combinations(self)  # reads the sizes of batches, which TRL settles

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
