"""Columns of the credit in TRL's table of completions (`log_completions`).

TRL keeps the samples of the latest generation batch in `_logs`. At every log it writes them to the console, to
`<output_dir>/completions/`, and to trackio and wandb. `CompletionTable` adds columns to the same `_logs`, and writes
the rows to TensorBoard, which TRL does not. Training and evaluation have a table each, whose logs take the place of
`_logs`: an evaluation may be smaller than a generation batch, and may lie inside one.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Int
from torch import Tensor
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import CallbackHandler

from credit_trl.contexts.tokens import TokenContexts
from credit_trl.loss.distillation import MicroBatchLoss
from credit_trl.rollout.batch import GenerationBatch, Prompt

# Means over a completion's tokens that carry loss, at the sampled tokens, in nats.
MEANS = ("delta_v_mean", "s_mean", "advantage_mean")
_DIGITS = 4
TENSORBOARD_TAG = "completions"


class CompletionTable:
    """Adds feedback, teacher prompt and mean credit of each completion to TRL's table.

    Columns, besides TRL's:

    - `feedback`: the dataset's and the verdict's; empty where there is none;
    - `teacher_prompt`: (x, z) as the teacher reads it, with control tokens; empty without a teacher;
    - `with_demonstration`, `with_contrast`: whether z has a demonstration, and whether there is a contrast prompt;
    - `delta_v_mean`, `s_mean`, `advantage_mean`: ΔV_t, S_t and R_t in nats, means over the tokens; 0 without a
      teacher, and S_t is 0 without a contrast.

    The means exist after a sample's update, where the loss distils. A table that is logged inside a generation batch
    has the rows so far.

    Args:
        logs: TRL's `_logs`, which this changes in place.
        means_follow: whether updates give the means, as the distillation loss does; else rows are complete at once.
        rounds: rounds of dynamic sampling. TRL adds the rollouts of each; the table has those of the generation batch.
    """

    def __init__(self, logs: dict[str, Any], accelerator: Accelerator, means_follow: bool, rounds: int = 0) -> None:
        self.logs = logs
        self._accelerator = accelerator
        self._means_follow = means_follow
        self._size = logs["prompt"].maxlen
        self._logged: set[str] = set()  # columns of the reward functions
        self._rows = self._tabulated = 0  # rows that TRL has added, and those up to the last generation batch
        self.has_ended = False  # an evaluation; its rows stay until the next one
        self._means: dict[int, list[float]] = {}
        self._has_means: list[bool] = []
        if rounds:
            column = partial(deque, maxlen=(1 + rounds) * self._size)
            logs |= {name: defaultdict(column) if name in ("rewards", "extra") else column() for name in logs}

    def fill(self, pending: dict[str, list[Any]], size: int) -> None:
        """Fill columns that this call of the reward functions has not logged, as one that failed, with None.

        Args:
            pending: the columns that it has logged, which this changes in place.
            size: number of local rollouts.
        """
        self._logged |= pending.keys()
        for name in self._logged - pending.keys():
            pending[name] = [None] * size

    def number(self, batch: GenerationBatch) -> Int[Tensor, " B"]:
        """Numbers of the local rollouts that TRL has just added to its logs."""
        first, self._rows = self._rows + batch.first, self._rows + len(batch.rewards)
        return torch.arange(first, first + len(batch.prompts), device=self._accelerator.device)

    def add(
        self,
        batch: GenerationBatch,
        rows: Int[Tensor, " B"],
        contexts: Sequence[TokenContexts] | None,
        decode: Callable[[list[list[int]]], list[str]],
    ) -> Int[Tensor, " B"]:
        """Add the columns of a generation batch, after TRL has added its own. Every process must call it.

        Args:
            rows: numbers of its local samples, see `number`.
            contexts: contexts of the local samples; None without a teacher.
            decode: token ids to texts.

        Returns:
            Numbers of the local samples in the table, for `observe`.
        """
        columns: dict[str, list[Any]] = {"feedback": [_feedback(batch, i) for i in range(len(batch.prompts))]}
        if contexts is not None:
            columns["teacher_prompt"] = decode([c.teacher or [] for c in contexts])
            columns["with_demonstration"] = [c.privileged.demonstration is not None for c in contexts]
            columns["with_contrast"] = [len(c.contrasts) > 0 for c in contexts]
        if self._means_follow:
            columns |= {name: [0.0] * len(batch.prompts) for name in MEANS}
        added = len(self.logs["prompt"])
        for name, column in self.logs["extra"].items():
            if name not in columns:  # a reward function's, which begins with this batch
                column.extendleft([None] * (added - len(column)))
        earlier = self._drop_replaced(gather_object(rows.tolist()))
        for name, values in columns.items():
            column = self.logs["extra"][name]
            values = [*list(column)[len(column) - earlier :], *gather_object(values)]
            column.clear()
            column.extend(values[-self._size :])
        kept = self._has_means[len(self._has_means) - earlier :]
        self._has_means = [*kept, *[not self._means_follow] * len(batch.rewards)][-self._size :]
        first = self._rows - len(batch.rewards) + batch.first
        return torch.arange(first, first + len(batch.prompts), device=self._accelerator.device)

    def _drop_replaced(self, rows: list[int]) -> int:
        """Keep TRL's rows of this generation batch, in its order, after those of earlier ones; return their number."""
        added = len(self.logs["prompt"])
        earlier = range(max(added - (self._rows - self._tabulated), 0))
        kept = [*earlier, *(added - self._rows + row for row in rows)][-self._size :]
        if kept != list(range(added)):
            columns = {**self.logs["rewards"], **self.logs["extra"]} | self.logs
            for column in columns.values():
                if isinstance(column, deque) and len(column) == added:
                    values = [column[position] for position in kept]
                    column.clear()
                    column.extend(values)
        self._tabulated = self._rows
        return max(len(kept) - len(rows), 0)  # the batch of an evaluation may be larger than the table

    def observe(self, rows: Int[Tensor, " B"] | None, loss: MicroBatchLoss) -> None:
        """Store the means of a micro-batch's samples; `rows` is None in a batch that was saved without a table."""
        if rows is None:
            return
        terms = loss.terms
        f, generic = terms.teacher_token_logps, terms.generic_token_logps
        specific = (f - generic).where(loss.contrasted, torch.zeros_like(f))
        values = torch.stack([f - terms.token_logps, specific, terms.advantages], dim=1).float()
        sums = values.new_zeros(len(rows), len(MEANS)).index_add_(0, loss.samples, values)
        tokens = torch.bincount(loss.samples, minlength=len(rows)).clamp(min=1)
        self._means |= zip(rows.tolist(), (sums / tokens[:, None]).tolist(), strict=True)

    def updated(self) -> dict[str, Any]:
        """The logs with the rows that have their means, conversations as text. Every process must call it."""
        gathered = gather_object(list(self._means.items()))
        self._means.clear()
        dropped = self._rows - len(self._has_means)  # rows of earlier generation batches
        for row, means in gathered:
            if row >= dropped:
                self._has_means[row - dropped] = True
                for name, value in zip(MEANS, means, strict=True):
                    self.logs["extra"][name][row - dropped] = round(value, _DIGITS)
        table = _select(self.logs, [i for i, has_means in enumerate(self._has_means) if has_means])
        return table | {name: [_text(one) for one in table[name]] for name in ("prompt", "completion")}

    def clear(self) -> None:
        """Drop the rows of an evaluation that has ended."""
        self.has_ended = False
        for column in ({**self.logs["rewards"], **self.logs["extra"]} | self.logs).values():
            if isinstance(column, deque):
                column.clear()
        self._has_means.clear()

    def write_tensorboard(self, table: dict[str, Any], handler: CallbackHandler, step: int) -> None:
        """Write the result of `updated` to TensorBoard as text, where the run reports to it."""
        for callback in handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                callback.tb_writer.add_text(TENSORBOARD_TAG, _html(table), step)


def _feedback(batch: GenerationBatch, sample: int) -> str:
    by_turn = batch.feedback_by_turn[sample] or {}
    parts = [batch.feedback[sample], *(f"turn {turn}: {text}" for turn, text in sorted(by_turn.items()))]
    return "\n".join(part for part in parts if part is not None)


def _select(logs: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The logs with some rows; columns without any row stay empty."""
    return {
        name: _select(column, rows) if isinstance(column, dict) else [column[i] for i in rows] if column else []
        for name, column in logs.items()
    }


def _html(table: dict[str, Any]) -> str:
    """A table as one line of HTML, which TensorBoard's Markdown leaves as it is and its sanitizer admits.

    Markdown would load images that completions and feedback name, and renders long cells slowly.
    """
    columns = {"prompt": table["prompt"], "completion": table["completion"]}
    columns |= {**table["rewards"], **table["extra"], "advantage": table["advantages"]}
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in zip(*columns.values(), strict=True))
    names = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: Prompt | float) -> str:
    return f"<td>{'<br>'.join(html.escape(line) for line in _text(value).splitlines())}</td>"


def _text(value: Prompt | float) -> str:
    """Text of a prompt, a completion or a number; dashboards show the messages of a conversation as `[object]`."""
    if isinstance(value, list):
        is_answer = len(value) == 1 and value[0].get("role") == "assistant"
        return "\n".join(("" if is_answer else f"{turn.get('role')}: ") + _content(turn) for turn in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _content(message: dict[str, Any]) -> str:
    """Text of a message, then its tool calls as JSON; `[image]` in the place of other content."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text", f"[{part.get('type')}]") for part in content]
    if message.get("tool_calls"):
        parts.append(json.dumps(message["tool_calls"], default=str))
    return " ".join(filter(None, parts))
