"""Frame rates that each arm's target has at the first token of a response, before anything is trained.

    python examples/smollm/frames.py                  # the base of the study
    python examples/smollm/frames.py --setting default   # the base of the shipped command

A response begins with its call or with an opening ("The correct answer is B."). Openings and the right tool are a
branch: an opening suits every prompt, a tool suits few. δ is how much feedback raises the log-odds of an opening
against the right tool, s how much they rise further under another prompt; `docs/theory.md` has λ_c = δ/(δ+s). With a
frozen teacher the student moves to the target, so the target's probability of an opening is the predicted share of
responses with an opening. Support, tail bucket and target are those of the trainer's defaults. An opening is a first
token of a sampled response, to a prompt with feedback, that has words before its call.

With a teacher that follows the policy the target moves on, so its first distance from the student gives the sign and
the order of the drifts, not their ends.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from study import ARMS, SETTINGS
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from credit_trl import CreditConfig
from credit_trl.cli.quickstart_tasks import quickstart_task
from credit_trl.cli.tool_choice_base import mixed_precision, with_feedback
from credit_trl.objective import add_tail_bucket, credit_target, renormalize
from credit_trl.tasks import tool_choice
from credit_trl.tasks.printable import markdown_table

CONTRASTS = 4  # targets with one contrast prompt each, whose probabilities are averaged
REPEATS = 4  # sampled responses to each prompt with feedback, among which openings are found
PREDICTED = ("sdpo", "credit-0.05", "credit-0.1", "credit-0.2", "credit-0.5", "guide", "temper-only")


@dataclass(frozen=True)
class FirstToken:
    """Log-probabilities of the first token of a response over the vocabulary V, for N prompts.

    Args:
        student: (N, V), log p(· | x).
        teacher: (N, V), f = log p(· | x, z).
        contrasts: (C, N, V), g_k = log p(· | x'_k, z) with x' another of the prompts.
        right: (N,) id of the first token of the right call.
        openings: ids of the first tokens of openings.
    """

    student: Tensor
    teacher: Tensor
    contrasts: Tensor
    right: Tensor
    openings: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="average")
    parser.add_argument("--task", default="tool_choice", help="tool_choice:stated for feedback that states the call")
    parser.add_argument("--prompts", type=int, default=96, help="training prompts, with one response each")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer = SETTINGS[args.setting].task.load("plain")
    kind = args.task.partition(":")[2] or "letter"
    first = measure_first_tokens(model.eval(), tokenizer, args.prompts, kind)
    print(report(first))


@torch.no_grad()
def measure_first_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, kind: str
) -> FirstToken:
    """First tokens with the feedback on one sampled response to each of `count` training prompts."""
    defaults = {**quickstart_task("smollm2").defaults, "bf16": False}
    config = CreditConfig("unused", **defaults)
    rows = tool_choice.build("train", rows_per_tool=-(-count // len(tool_choice.TOOLS))).to_list()[:count]
    prompts = [row["prompt"] for row in rows]
    texts = sample_responses(model, tokenizer, prompts)
    feedback = [
        tool_choice.verify(text, row["answer"], feedback=kind).feedback for text, row in zip(texts, rows, strict=True)
    ]

    def read(own: Sequence[list[dict[str, str]]]) -> list[list[dict[str, str]]]:
        return [with_feedback(prompt, text, config) for prompt, text in zip(own, feedback, strict=True)]

    shifts = [1 + k * (count - 1) // CONTRASTS for k in range(CONTRASTS)]
    others = [read(prompts[shift:] + prompts[:shift]) for shift in shifts]
    return FirstToken(
        first_logps(model, tokenizer, prompts),
        first_logps(model, tokenizer, read(prompts)),
        torch.stack([first_logps(model, tokenizer, turns) for turns in others]),
        torch.tensor([tokenizer(f"{row['tool']}(", add_special_tokens=False)["input_ids"][0] for row in rows]),
        opening_tokens(tokenizer, sample_responses(model, tokenizer, read(prompts) * REPEATS)),
    )


def _encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[dict[str, str]]]) -> dict[str, Tensor]:
    texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in prompts]
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)


def sample_responses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[dict[str, str]]]
) -> list[str]:
    """One response to each prompt at temperature 1."""
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 24}
    torch.manual_seed(0)
    batch = _encode(tokenizer, prompts)
    with mixed_precision(model.device.type):
        ids = model.generate(**batch, **sampling)[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def first_logps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[dict[str, str]]]
) -> Tensor:
    """(N, V) log-probabilities of the first token of a response."""
    parts = []
    for start in range(0, len(prompts), 16):
        batch = _encode(tokenizer, prompts[start : start + 16])
        with mixed_precision(model.device.type):
            parts.append(model(**batch, logits_to_keep=1).logits[:, -1].float().log_softmax(-1))
    return torch.cat(parts)


def opening_tokens(tokenizer: PreTrainedTokenizerBase, responses: Sequence[str]) -> list[int]:
    """Ids of the first tokens of responses with words before their call, but for those that begin a tool's name."""
    opened = [text for text in responses if tool_choice.opening(text)]
    calls = [f"{tool}(" for tool in tool_choice.TOOLS]
    first, of_calls = (
        {tokenizer(t, add_special_tokens=False)["input_ids"][0] for t in texts} for texts in (opened, calls)
    )
    return sorted(first - of_calls)


@dataclass(frozen=True)
class Support:
    """The teacher's K likeliest tokens of N prompts, and all others as one bucket.

    Args:
        ids: (N, K) token ids.
        is_opening, is_right: (N, K + 1) which tokens begin an opening or the right call; the rest is neither.
    """

    ids: Tensor
    is_opening: Tensor
    is_right: Tensor

    @classmethod
    def of(cls, first: FirstToken, topk: int = 20) -> Support:
        ids = first.teacher.topk(topk, dim=-1).indices
        rest = torch.zeros(len(ids), 1, dtype=torch.bool)
        is_opening = torch.isin(ids, torch.tensor(first.openings))
        return cls(ids, torch.cat([is_opening, rest], -1), torch.cat([ids == first.right[:, None], rest], -1))

    def buckets(self, logps: Tensor) -> Tensor:
        """(…, N, K + 1) log-probabilities from (…, N, V)."""
        ids = self.ids.expand(*logps.shape[:-1], -1)
        outside = logps.scatter(-1, ids, -torch.inf).logsumexp(-1)
        return add_tail_bucket(logps.gather(-1, ids), outside)

    def openings(self, logps: Tensor) -> Tensor:
        """(…, N) probability of an opening, from buckets."""
        return (logps.exp() * self.is_opening).sum(-1)

    def log_odds(self, logps: Tensor) -> Tensor:
        """(…, N) log-odds of an opening against the right call, from buckets; NaN where one is not in the support."""
        opening, right = (
            logps.masked_fill(~own, -torch.inf).logsumexp(-1) for own in (self.is_opening, self.is_right)
        )
        return (opening - right).where(opening.isfinite() & right.isfinite(), torch.nan)


def arm_targets(first: FirstToken, support: Support, options: dict[str, object]) -> Tensor:
    """(C, N, K + 1) normalised target of an arm under each of the contrast prompts."""
    contrasts = first.teacher[None] if options.get("contrastive_swap") == "self" else first.contrasts
    coef, form = float(options["contrastive_coef"]), options.get("contrastive_form", "subtract")
    teacher = support.buckets(first.teacher)
    return renormalize(credit_target(teacher, support.buckets(contrasts), coef, form))


def end_log_odds(first: FirstToken, support: Support, coef: float) -> Tensor:
    """(N,) log-odds of all openings against the right call at the fixed point of subtract under a live teacher.

    The odds of the openings add up (`docs/theory.md`, several generic tokens). NaN for a prompt without a branch.
    """
    student, teacher = support.buckets(first.student), support.buckets(first.teacher)
    contrast = support.buckets(first.contrasts).mean(0)

    def against_right(values: Tensor) -> Tensor:
        return values - values.where(support.is_right, 0.0).sum(-1, keepdim=True)

    delta, s = against_right(teacher - student), against_right(contrast - teacher)
    ends = (delta * (1 - coef) / coef - s).masked_fill(~support.is_opening, -torch.inf).logsumexp(-1)
    return ends.where(support.log_odds(teacher).isfinite(), torch.nan)


def end_median(first: FirstToken, support: Support, options: dict[str, object]) -> float | None:
    """Median over prompts of `end_log_odds`, in nats; None for an arm that has no such fixed point."""
    coef = float(options["contrastive_coef"])
    if coef == 0.0 or "contrastive_swap" in options or "contrastive_form" in options:
        return None
    return end_log_odds(first, support, coef).nanmedian().item()


def critical_coef(first: FirstToken, support: Support) -> list[float]:
    """λ above which all openings together lose, for each prompt with a branch; infinite where none below 1 does."""
    grid = [step / 100 for step in range(1, 101)]
    ends = torch.stack([end_log_odds(first, support, coef) for coef in grid])
    ends = ends[:, ends[0].isfinite()]
    winning = (ends >= 0).sum(0).tolist()
    return [math.inf if count == len(grid) else grid[count] for count in winning]


def report(first: FirstToken) -> str:
    """δ, s and λ_c at the first token, and the predicted share of openings of each arm."""
    support = Support.of(first)
    student, teacher, others = map(support.buckets, (first.student, first.teacher, first.contrasts))
    start = support.log_odds(student)
    has_branch = start.isfinite()
    delta = (support.log_odds(teacher) - start)[has_branch]
    s = (support.log_odds(others).mean(0) - support.log_odds(teacher))[has_branch]
    rising = [d / (d + t) for d, t in zip(delta.tolist(), s.tolist(), strict=True) if d > 0 and t > 0]
    quartiles = {name: statistics.quantiles(own, n=4) for name, own in (("δ", delta.tolist()), ("s", s.tolist()))}
    lines = [
        f"{name}, nats: median {middle:.2f} [{low:.2f}, {high:.2f}]" for name, (low, middle, high) in quartiles.items()
    ]
    share = f"δ and s above 0 for {len(rising)} of {len(delta)} prompts"
    lines.append(f"{share}; λ_c there: median {statistics.median(rising):.2f}" if rising else share)
    if together := critical_coef(first, support):
        lines.append(f"λ_c of all openings together: median {statistics.median(together):.2f}")
    rows = [("no feedback", support.openings(student).mean().item(), None, None)]
    rows += [("another prompt, same feedback", support.openings(others).mean().item(), None, None)]
    for arm in PREDICTED:
        targets = arm_targets(first, support, ARMS[arm])
        push = (support.log_odds(targets).mean(0) - start)[has_branch].median().item()
        rows.append((arm, support.openings(targets).mean().item(), push, end_median(first, support, ARMS[arm])))
    cells = [
        (name, f"{100 * share:.1f}", *(("" if own is None else f"{own:+.2f}") for own in rest))
        for name, share, *rest in rows
    ]
    table = markdown_table(("distribution", "openings, %", "first drift, nats", "fixed point, nats"), cells)
    return "\n".join([*lines, "", table])


if __name__ == "__main__":
    main()
