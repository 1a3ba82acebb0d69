"""Algorithm 1 by plain forward passes over single sequences, every logit, in fp64, without the package's loss.

`step_problem` is a small generation batch; `naive_loss` is the loss of a `CreditStep` on it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from credit_trl import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.rollout.batch import GenerationBatch
from credit_trl.teacher.models import make_teacher
from credit_trl.training.step import CreditStep
from tiny import build_model

LENGTHS = (3, 5, 2, 6, 4, 1, 5, 3)


@dataclass
class Problem:
    """A step with its policy, and a generation batch of four prompts with two completions each."""

    step: CreditStep
    policy: nn.Module
    batch: GenerationBatch
    tensors: dict[str, Tensor]
    contexts: list[TokenContexts]

    def rows(self, rows: list[int]) -> dict[str, Tensor]:
        """Tensors of some samples."""
        return {name: x[rows] if x.ndim else x for name, x in self.tensors.items()}


def move(parameters: Any, scale: float = 0.05) -> None:
    """Move the teacher away from the policy, so that the two cannot be confused."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in parameters:
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def step_problem(
    tokenizer: PreTrainedTokenizerFast, config: CreditConfig, lora: bool = False, samples=range(8), **options
) -> Problem:
    """The problem of a configuration, with the samples of one process; `options` are those of `CreditStep`."""
    policy = build_model(tokenizer, dtype=torch.float64)
    if lora:
        policy = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    teacher = make_teacher(config.teacher_model_kind, policy)
    if config.teacher_model_kind != "live":
        move(teacher.named_weights().values())
    policy.train()
    step = CreditStep(config, ContextBuilder(tokenizer, config), teacher, **options)
    prompts = [[{"role": "user", "content": f"{i // 2}+{7 * (i // 2)}="}] for i in range(8)]
    generator = torch.Generator().manual_seed(3)
    completions = [torch.randint(32, 200, (n,), generator=generator).tolist() for n in LENGTHS]
    feedback = ["low", None, "high", None, "odd", "even", None, None]
    prompts, completions = [prompts[i] for i in samples], [completions[i] for i in samples]
    batch = GenerationBatch(
        rows=[{"prompt": prompt} for prompt in prompts],
        prompts=prompts,
        completion_ids=completions,
        rewards=[1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
        verdict_feedback=[feedback[i] for i in samples],
        first=samples[0],
        group_size=2,
    )
    encoded = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
    tensors = padded(encoded, "prompt", pads_left=True) | padded(completions, "completion")
    tensors["advantages"] = torch.linspace(-1, 1, len(samples), dtype=torch.float64)
    tensors["num_items_in_batch"] = torch.tensor(float(sum(LENGTHS)))
    contexts = step.build_contexts(batch)
    return Problem(step, policy, batch, tensors | step.prepare(batch, tensors), contexts)


def padded(sequences: list[list[int]], name: str, pads_left: bool = False) -> dict[str, Tensor]:
    """TRL's ids and mask of some sequences."""
    width = max(map(len, sequences)) + 1  # a column that is padding in all rows
    ids, mask = torch.zeros(len(sequences), width, dtype=torch.long), torch.zeros(len(sequences), width).long()
    for i, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if pads_left else slice(0, len(sequence))
        ids[i, place], mask[i, place] = torch.tensor(sequence), 1
    return {f"{name}_ids": ids, f"{name}_mask": mask}


def logps(model: nn.Module, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Tensor:
    """(t, V) log-probabilities of one completion under one prompt: the plainest forward pass."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def buckets(values: Tensor, support: Tensor, tail: str) -> Tensor:
    """Log-probabilities of the support, with the rest as a bucket or conditional on the support."""
    support_values = values.gather(-1, support)
    if support.shape[-1] == values.shape[-1]:
        return support_values
    if tail == "renormalize":
        return support_values.log_softmax(-1)
    outside = values.scatter(-1, support, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([support_values, outside], -1)


def divergence(log_p: Tensor, a: Tensor, alpha: float) -> Tensor:
    """(t,) loss of tokens from p and the target a of the paper."""
    log_q = a.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if alpha == 1.0:
        return (p * (log_p - a)).sum(-1)
    if alpha == 0.0:
        return (q * (log_q - log_p)).sum(-1)
    log_m = ((1 - alpha) * p + alpha * q).log()
    return ((1 - alpha) * p * (log_p - log_m) + alpha * q * (log_q - log_m)).sum(-1)


def naive_token_losses(problem: Problem, teacher: nn.Module, sample: int) -> Tensor:
    """(t,) losses of one sample: lines 2 to 7 of Algorithm 1."""
    config, sample_contexts = problem.step.config, problem.contexts[sample]
    completion = problem.batch.completion_ids[sample]
    prompt_mask = problem.tensors["prompt_mask"][sample].bool()
    prompt = problem.tensors["prompt_ids"][sample][prompt_mask].tolist()
    p = logps(problem.policy, prompt, completion, config.temperature)
    if sample_contexts.teacher is None:
        return p.new_zeros(len(completion))
    with problem.step.teacher.active(), torch.no_grad():
        f = logps(teacher, sample_contexts.teacher, completion, config.temperature)
        g = [logps(teacher, ids, completion, config.temperature) for ids in sample_contexts.contrasts]
    tokens = torch.tensor(completion)[:, None]
    if config.distillation_support == "sampled":
        advantage = (f - config.contrastive_coef * sum(g) / len(g) - p).gather(-1, tokens).detach()
        return -(advantage * p.gather(-1, tokens)).squeeze(-1)
    size = p.shape[-1] if config.distillation_topk is None else config.distillation_topk
    support, tail = f.topk(size).indices, config.distillation_tail
    target = buckets(f, support, tail)
    if g:
        generic = sum(buckets(x, support, tail) for x in g) / len(g)
        moved = target - generic if config.contrastive_form == "guide" else -generic
        target = target + config.contrastive_coef * moved
    if tail == "renormalize" and size < p.shape[-1]:
        target = target.log_softmax(-1)
    return divergence(buckets(p, support, tail), target, config.distillation_alpha)


def naive_loss(
    problem: Problem, teacher: nn.Module, rows: list[int] | None = None, over_tokens: bool = False
) -> Tensor:
    """Mean over samples of the mean over tokens, as `loss_type="grpo"`; or over all tokens, as `"dapo"`."""
    rows = list(range(len(LENGTHS))) if rows is None else rows
    losses = [naive_token_losses(problem, teacher, i) for i in rows]
    return torch.cat(losses).mean() if over_tokens else torch.stack([loss.mean() for loss in losses]).mean()


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the trained parameters of a loss."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    computed = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: g for name, g in zip(trained, computed, strict=True) if g is not None}


def scoring_model(problem: Problem) -> nn.Module:
    """The module of the teacher; for LoRA the policy, whose adapter `Teacher.active` switches."""
    with problem.step.teacher.active() as model:
        return model
