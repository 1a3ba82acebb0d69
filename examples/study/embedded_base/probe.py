"""Ability of a model on the embedded task by group of cues: sampled accuracy, format and shortcut rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from credit_trl.evaluation import Evaluation, evaluate
from credit_trl.tasks import quickstart
from embedded_base.curriculum import teacher_prompt

# A response in the format has 24 to 26 tokens with its end of turn.
MAX_RESPONSE_TOKENS = 32


def probe(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    *,
    feedback: bool = False,
    dataset: Dataset | None = None,
    k: int = 4,
    **options: Any,
) -> Evaluation:
    """avg@k at temperature 1 by group: `result.groups["unknown"].mean`, `result.group_metrics["unknown"]["format"]`.

    Args:
        model: the base, or anything that `evaluate` takes.
        tokenizer: tokenizer of the model.
        feedback: whether prompts contain the task's feedback, as in the self-teacher's contexts.
        dataset: rows of `quickstart.build`, by default the test split.
        k: samples per prompt.
        **options: further arguments of `evaluate`.
    """
    rows = list(quickstart.build("test") if dataset is None else dataset)
    if feedback:
        rows = [{**row, "prompt": teacher_prompt(row["prompt"], feedback=_feedback(row))} for row in rows]
    defaults = {"temperature": 1.0, "top_p": 1.0, "max_completion_length": MAX_RESPONSE_TOKENS, "batch_size": 288}
    return evaluate(
        model, quickstart.TASK, k, dataset=rows, tokenizer=tokenizer, group_by="group", **(defaults | options)
    )


def _feedback(row: dict[str, Any]) -> str | None:
    return quickstart.verify("", row["answer"]).feedback


def format_probes(results: Sequence[tuple[str, Evaluation]]) -> str:
    """Table with a line per group and result: accuracy with a 95 % interval, format and shortcut rate, in percent."""
    lines = [f"{'':<26}{'group':<10}{'accuracy':>9}  {'95 % CI':<13}{'format':>7}{'shortcut':>10}"]
    for title, result in results:
        for group in quickstart.GROUPS:
            if group in result.groups:
                accuracy, metrics = result.groups[group], result.group_metrics[group]
                interval = f"{100 * accuracy.low:.1f}–{100 * accuracy.high:.1f}"
                lines.append(
                    f"{title:<26}{group:<10}{100 * accuracy.mean:>9.1f}  {interval:<13}"
                    f"{100 * metrics['format']:>7.1f}{100 * metrics['shortcut']:>10.1f}"
                )
                title = ""
    return "\n".join(lines)
