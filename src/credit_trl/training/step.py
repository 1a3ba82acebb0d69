"""The stages after a rollout, without a trainer: contexts, scores of the teacher, and the loss of the policy.

rollout ──► contexts ──► teacher ──► loss
y, verdict   x,z | x',z    hidden      f, Ĝ, R_t, gradient
            └───────── prepare ─────┘└─ loss ─┘
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.gather import build_contexts
from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.loss.credit_loss import CreditLoss, LossTokens, MicroBatchLoss, credit_loss
from credit_trl.loss.head import LMHead, lm_head
from credit_trl.loss.projection import TokenPolicy, token_policy
from credit_trl.loss.sampling import PolicyLogps, SamplingDistribution, sampling_logps
from credit_trl.loss.scores import Scores, SupportConfig, score_completions
from credit_trl.loss.token_weight import TokenCredit, TokenWeight, weigh_tokens, weighted_tensors
from credit_trl.rollout.batch import GenerationBatch, loss_mask
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.packing import cannot_pack, enable_packing
from credit_trl.teacher.passes import PolicySequences, chosen_sequences, policy_states
from credit_trl.teacher.sharding import run_in_wrapped_forward
from credit_trl.training.metrics import micro_batch_fidelity
from credit_trl.training.micro_batches import take_rows
from credit_trl.training.weights import nonfinite_samples
from credit_trl.trl_compat import identity


class PolicyPass(NamedTuple):
    """What the policy's forward pass returns."""

    output: Any  # of the function of hidden states and head
    tokens_read: int  # of the pass, padding included
    aux_loss: Float[Tensor, ""] | None  # load-balancing loss of a mixture of experts


class PolicyLoss(NamedTuple):
    """The loss of a pass."""

    terms: CreditLoss
    engine_logps: Float[Tensor, " N"] | None  # of `LossTokens`, over the whole vocabulary


@dataclass(eq=False, repr=False)
class CreditStep:
    """From a generation batch to the loss of its micro-batches. Every process must call each method.

    The defaults of `processes` and `reduce` serve one process. Models that read packed rows get another attention.

    Attributes:
        packed: whether the policy reads packed rows; False also where `cannot_pack(policy)`.
        teacher_packed: whether the teacher does.
        serves_grpo: whether `loss` also returns what GRPO's loss reads, from the same pass of the policy.

    Raises:
        ValueError: the support is larger than the vocabulary, the teacher cannot read packed rows with `packed=True`,
            or a token weight would read conditional log-probabilities.
    """

    config: CreditConfig  # options of contexts, scores and loss
    context_builder: ContextBuilder  # encodes (x, z) and the contrast prompts
    teacher: Teacher  # π_ref, which knows the policy
    # From a causal LM, policy or teacher, to its `LMHead` at the rollout's temperature; by default `lm_head`.
    head: Callable[[nn.Module], LMHead] | None = None
    processes: int = 1
    reduce: Callable[[Tensor], Tensor] = identity  # sums a tensor over processes
    token_weight: TokenWeight | None = None  # weighs the tokens of each generation batch, see `loss.token_weight`
    router_loss: bool = False  # whether the load-balancing loss of a mixture of experts is computed
    sampling: SamplingDistribution | None = None  # of the engine; by default that of the configuration

    def __post_init__(self) -> None:
        config = self.config
        teacher = self.teacher
        if self.head is None:
            self.head = partial(lm_head, temperature=config.temperature)
        self.support = SupportConfig(config.distillation_support, config.distillation_topk, config.distillation_tail)
        if config.distillation_weight > 0.0 or self.token_weight is not None:
            self.support = self.support.resolved(teacher.vocabulary_size)
        if self.token_weight is not None and self.support.tail == "renormalize":
            raise ValueError(
                "`distillation_tail='renormalize'` conditions f and Ĝ on the support, so that a `token_weight` would "
                "compare them with other log-probabilities. Set `distillation_tail='bucket'`."
            )
        self.engine_role = engine_role(config)
        if self.sampling is None:
            self.sampling = SamplingDistribution.from_config(config)
        may_have_images = self.context_builder.reader is not None
        self.packed, self.teacher_packed = choose_packing(config.packed, teacher, may_have_images)
        self.serves_grpo = self.packed and 0.0 < config.distillation_weight < 1.0
        self._enable_packing()

    def _enable_packing(self) -> None:
        """Exchange the attention of the models that read packed rows."""
        if self.teacher_packed:
            for model in self.teacher.models():
                enable_packing(model)
        if self.packed:
            enable_packing(self.teacher.student)

    def build_contexts(self, batch: GenerationBatch) -> list[TokenContexts]:
        """Teacher and contrast contexts of the local samples."""
        return build_contexts(batch, self.context_builder)

    @torch.no_grad()
    def prepare(
        self, batch: GenerationBatch, tensors: dict[str, Any], contexts: Sequence[TokenContexts] | None = None
    ) -> dict[str, Tensor]:
        """Score a generation batch under the teacher.

        Args:
            batch: its prompts, completions, rewards and feedback.
            tensors: TRL's tensors of the batch: `prompt_ids` and `prompt_mask` (B, P), padded on the left,
                `completion_ids` and `completion_mask` (B, T), padded on the right. For a token weight also
                `advantages` (B,).
            contexts: of `build_contexts`; None builds them.

        Returns:
            Tensors to add to `tensors`, to shuffle and to split with them: `teacher_mask` and `contrast_mask` (B,),
            and the fields of `Scores` (B, T, …). With a token weight also `token_weight` (B, T) of the distillation
            loss, or GRPO's `advantages` (B, T), weighted.
        """
        contexts = self.build_contexts(batch) if contexts is None else contexts
        device = tensors["completion_ids"].device
        has_teacher = torch.tensor([context.teacher is not None for context in contexts], device=device)
        has_contrast = torch.tensor([len(context.contrasts) > 0 for context in contexts], device=device)
        mask = loss_mask(tensors) & has_teacher[:, None]
        completions = CompletionBatch(tensors["completion_ids"], tensors["completion_mask"], mask)
        prepared = {"teacher_mask": has_teacher, "contrast_mask": has_contrast}
        prepared |= score_completions(
            self.teacher,
            contexts,
            completions,
            self.support,
            self.head,
            batch_tokens=self.config.scoring_batch_tokens,
            packed=self.teacher_packed,
        )
        if self.token_weight is not None:
            credit = self._token_credit(batch, tensors | prepared, mask)
            weights = weigh_tokens(self.token_weight, credit)
            prepared |= weighted_tensors(weights, credit.advantages, self.config.distillation_weight)
        return prepared

    def _token_credit(self, batch: GenerationBatch, tensors: dict[str, Any], mask: Bool[Tensor, "B T"]) -> TokenCredit:
        """Credit of the sampled tokens of a scored generation batch."""
        policy_logps = tensors.get("old_per_token_logps")
        if policy_logps is None:
            size = self.config.per_device_train_batch_size
            policy_logps = self.policy_logps(self.teacher.student, tensors, size)
        teacher_logps = tensors["teacher_token_logps"]
        generic_logps = tensors["generic_token_logps"]
        specific = objective.specific_part(teacher_logps, generic_logps)
        has_contrast = tensors["contrast_mask"][:, None]
        rewards = [batch.rewards[sample] for sample in batch.indices]
        return TokenCredit(
            teacher_logps=teacher_logps,
            generic_logps=generic_logps,
            specific=specific.masked_fill(~has_contrast, 0.0),
            delta_v=objective.self_distillation_reward(teacher_logps, policy_logps.to(teacher_logps.dtype)),
            entropy=tensors["teacher_entropy"],
            advantages=tensors["advantages"],
            rewards=torch.tensor(rewards, device=mask.device),
            mask=mask,
            reduce=self.reduce,
        )

    def loss(self, model: nn.Module, inputs: dict[str, Any], accumulation: float = 1.0) -> MicroBatchLoss:
        """Loss of one micro-batch, with tokens or without.

        `model` is the policy as it is wrapped for distributed training, `inputs` TRL's micro-batch with the tensors of
        `prepare`. `accumulation` counts the micro-batches of the optimizer step; it is 1 in evaluation.
        """
        mask = loss_mask(inputs) & inputs["teacher_mask"][:, None]
        # GRPO's loss reads all tokens; those outside the mask have weight 0.
        sequences = chosen_sequences(inputs, inputs["completion_mask"].bool() if self.serves_grpo else mask)
        has_contrast = inputs["contrast_mask"][sequences.rows]
        engine_logps = sequences.pick(inputs.get("sampling_per_token_logps")) if self.engine_role else None
        weights = self.loss_shares(model, inputs, accumulation)
        if "token_weight" in inputs:
            weights = weights * inputs["token_weight"]
        weights = weights.masked_fill(~mask, 0.0)
        old_logps = sequences.pick(inputs.get("old_per_token_logps"))
        tokens = LossTokens(
            ids=sequences.pick(inputs["completion_ids"]),
            weights=sequences.pick(weights),
            contrastive_coef=has_contrast.to(weights.dtype) * self.config.contrastive_coef,
            old_logps=engine_logps if self.engine_role == "old" else old_logps,
            engine_logps=engine_logps if self.engine_role == "correction" else None,
        )
        result = self._policy_loss(model, inputs, sequences, tokens)
        terms, moved_logps = result.output
        samples = sequences.rows
        token_weights = tokens.weights
        policy = None
        if self.serves_grpo:
            logps, entropies = sequences.scatter(terms.policy_logps), sequences.scatter(terms.entropy)
            policy = TokenPolicy(logps, entropies, result.aux_loss)
            scored = sequences.pick(mask).nonzero().squeeze(-1)
            terms = terms.detached_rows(scored)
            samples = samples[scored]
            token_weights = token_weights[scored]
            has_contrast = has_contrast[scored]
        delta_v = objective.self_distillation_reward(terms.teacher_token_logps, terms.token_logps)
        return MicroBatchLoss(
            terms=terms,
            contrasted=has_contrast,
            fidelity=micro_batch_fidelity(inputs.get("success_weights"), mask, samples, delta_v),
            nonfinite=nonfinite_samples(terms.token_loss, token_weights, samples, len(mask)),
            aux_loss=result.aux_loss,
            tokens_read=result.tokens_read,
            valid=sum(len(ids) for ids in sequences.ids),
            engine_logps=engine_logps if moved_logps is None else moved_logps,
            policy=policy,
        )

    def policy_tokens(self, model: nn.Module, inputs: dict[str, Any]) -> TokenPolicy:
        """What GRPO's loss reads of the policy, with gradients; arguments as those of `policy_logps`."""
        sequences = chosen_sequences(inputs, inputs["completion_mask"].bool())
        ids = sequences.pick(inputs["completion_ids"])

        def loss(hidden: Float[Tensor, "N H"], head: LMHead) -> TokenPolicy:
            return token_policy(hidden, head, ids)

        policy, _, aux_loss = self._forward(model, sequences, loss, self.router_loss)
        return TokenPolicy(sequences.scatter(policy.logps), sequences.scatter(policy.entropies), aux_loss)

    def _policy_loss(
        self, model: nn.Module, inputs: dict[str, Any], sequences: PolicySequences, tokens: LossTokens
    ) -> PolicyPass:
        """Run the policy over a micro-batch, and form its loss."""
        scores = Scores(*[sequences.pick(inputs[name]) for name in Scores._fields])
        scores = scores._replace(support_ids=scores.support_ids.long())

        def loss(hidden: Float[Tensor, "N H"], head: LMHead) -> PolicyLoss:
            engine_logps = tokens.engine_logps
            if engine_logps is not None and not self.sampling.is_policy:
                ids = tokens.ids.unsqueeze(-1)
                logps = sampling_logps(head.detached(), hidden.detach(), ids, self.sampling)
                engine_logps = engine_logps + (logps.full - logps.sampled)
            moved_tokens = tokens._replace(engine_logps=engine_logps)
            terms = credit_loss(hidden, head, moved_tokens, scores, self.support, self.config, self.serves_grpo)
            return PolicyLoss(terms, engine_logps)

        return self._forward(model, sequences, loss, self.router_loss)

    def _forward(
        self, model: nn.Module, sequences: PolicySequences, loss: Callable[[Tensor, LMHead], Any], router_loss: bool
    ) -> PolicyPass:
        """Run the policy over a micro-batch, and a function of its hidden states and head, which is gathered.

        Both inside the wrapper's forward, so that DDP and FSDP see that backbone and head are used.
        """
        policy = self.teacher.unwrapped(model)

        def forward(_chosen: Int[Tensor, " N"]) -> PolicyPass:
            with self.teacher.mixed_precision():
                states = policy_states(policy, sequences, packed=self.packed, router_loss=router_loss)
            output = loss(states.hidden, self.head(policy).gathered())
            return PolicyPass(output, states.tokens_read, states.aux_loss)

        return run_in_wrapped_forward(model, policy, forward, sequences.chosen)

    def loss_shares(self, model: nn.Module, inputs: dict[str, Any], accumulation: float) -> Float[Tensor, "B T"]:
        """Share of each token in the loss of a micro-batch, by GRPO's reduction of the same `loss_type`.

        Tokens of samples without a teacher count in the divisors, as in SDPO's code. The shares are fp32, or fp64 for
        a policy in fp64. Arguments are those of `loss`, of which `importance_sampling_ratio` is optional, and
        `num_items_in_batch`, the tokens of the generation batch on all processes, by default of the micro-batch.

        Raises:
            ValueError: unknown loss type.
        """
        loss_type = self.config.loss_type
        mask = loss_mask(inputs).to(torch.promote_types(self.teacher.student.dtype, torch.float32))
        if loss_type in ("grpo", "sapo"):
            shares = mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / len(mask) / accumulation
        elif loss_type == "bnpo":
            shares = mask / mask.sum().clamp(min=1.0) / accumulation
        elif loss_type == "dr_grpo":
            shares = mask / (len(mask) * self.config.max_completion_length) / accumulation
        elif loss_type == "luspo":
            shares = mask / len(mask) / accumulation
        elif loss_type in ("dapo", "cispo", "vespo"):
            tokens = inputs.get("num_items_in_batch", mask.sum()).clamp(min=1.0) / self.processes
            steps = self.config.steps_per_generation if model.training else 1
            shares = mask / (tokens * accumulation / steps)
        else:
            raise ValueError(f"Unknown `loss_type` {loss_type!r}.")
        if "importance_sampling_ratio" in inputs:
            shares = shares * inputs["importance_sampling_ratio"]
        return shares

    def policy_logps(self, model: nn.Module, inputs: dict[str, Any], size: int | None = None) -> Float[Tensor, "B T"]:
        """Log-probabilities of the completion tokens under the policy, over the whole vocabulary; 0 on padding.

        `model` is the policy as it is wrapped for distributed training. One pass has at most `size` samples, which are
        of similar lengths.
        """
        return self.policy_and_sampling_logps(model, inputs, size).full

    @torch.no_grad()
    def policy_and_sampling_logps(
        self, model: nn.Module, inputs: dict[str, Any], size: int | None = None
    ) -> PolicyLogps:
        """(B, T) `policy_logps`, and from the same pass those of the distribution that the engine samples from."""
        lengths = inputs["prompt_mask"].sum(dim=1) + inputs["completion_mask"].sum(dim=1)
        if size is not None and size < len(lengths):
            order = lengths.argsort(descending=True, stable=True)
            passes = []
            for rows in order.split(size):
                passes.append(self.policy_and_sampling_logps(model, take_rows(inputs, rows.tolist())))
            restored = order.argsort()
            full = torch.cat([logps.full for logps in passes])
            sampled = torch.cat([logps.sampled for logps in passes])
            return PolicyLogps(full[restored], sampled[restored])
        mask = inputs["completion_mask"].bool()
        sequences = chosen_sequences(inputs, mask)
        ids = sequences.pick(inputs["completion_ids"]).unsqueeze(-1)

        def read(hidden: Float[Tensor, "N H"], head: LMHead) -> PolicyLogps:
            return sampling_logps(head.detached(), hidden, ids, self.sampling)

        logps = self._forward(model, sequences, read, router_loss=False).output
        return PolicyLogps(sequences.scatter(logps.full), sequences.scatter(logps.sampled))


def choose_packing(packed: bool | None, teacher: Teacher, may_have_images: bool) -> tuple[bool, bool]:
    """Whether the policy and whether the teacher read packed rows.

    The option `packed` decides for the teacher, and None packs both where both can and no prompt has images.
    """
    can_pack = cannot_pack(teacher.student) is None
    if packed is not None:
        return packed and can_pack, packed
    packs = can_pack and not may_have_images and all(cannot_pack(model) is None for model in teacher.models())
    return packs, packs


def engine_role(config: CreditConfig) -> Literal["correction", "old"] | None:
    """How the loss uses the log-probabilities that a vLLM engine reported.

    `"correction"`: to correct for the engine, where one optimizer step uses the whole generation batch, so that the
    policy of the step is that of the rollout. `"old"`: in place of those of the policy at rollout time, where several
    steps use it and TRL's correction is off. None: a correction is TRL's, from a pass of the policy before the loss.
    Where options of sampling change the distribution, what the engine reported is first moved to the whole vocabulary.
    """
    if not config.use_vllm or config.distillation_weight < 1.0:
        return None
    is_on_policy = config.gradient_accumulation_steps % (config.steps_per_generation * config.num_iterations) == 0
    if not config.vllm_importance_sampling_correction:
        return None if is_on_policy else "old"
    return "correction" if is_on_policy and config.vllm_importance_sampling_mode.startswith("token") else None
