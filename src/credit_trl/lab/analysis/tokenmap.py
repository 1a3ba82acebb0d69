"""Token maps: the credit of every token of a response, in the paper's symbols, as JSON, and summed over classes.

`map_response` runs the models. R_t is computed as in the run's loss, by `CreditFormula`; every other quantity is a
property of `ScoredTokens` and one function of `objective.py`. `lab.report` shows maps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from pandas import DataFrame
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import Rollout, rollout_contexts
from credit_trl.lab.analysis.token_classes import Classify, default_classes
from credit_trl.lab.analysis.tokentext import TokenText, token_texts, visible
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, CreditLogps, RolloutContexts, credit_logps
from credit_trl.run_directory import write_atomically
from credit_trl.tasks.escaping import markdown_table, pluralized, table_cell

# Quantities of a map and their symbols, the default one first; `CreditFormula.meanings` explains them.
QUANTITIES = {
    "centred": "R_t − mean",
    "advantage": "R_t",
    "specific": "S_t",
    "delta_v": "ΔV_t",
    "generic": "Ĝ_t",
    "student_logps": "log π_θ",
}


@dataclass(frozen=True)
class ScoredTokens:
    """Scores of tokens v in nats; the shape (T, ...) is (T,) or (T, A)."""

    ids: Int[Tensor, "T ..."]
    student_logps: Float[Tensor, "T ..."]  # log π_θ(v | x, y_<t)
    teacher_logps: Float[Tensor, "T ..."]  # f = log π_ref(v | x, y_<t, z)
    contrast_logps: Float[Tensor, "C T ..."]  # g_k = log π_ref(v | x'_k, y_<t, z); C may be 0
    advantage: Float[Tensor, "T ..."]  # R_t(v) as in the run's loss (Eq. 8)
    policy_mean: Float[Tensor, "T ..."]  # mean of R_t under the policy at the position
    formula: CreditFormula  # λ, form and support of R_t
    # (T, A) scores of the most likely tokens under student or teacher, in descending order; None of the alternatives
    alternatives: ScoredTokens | None = None

    @property
    def centred(self) -> Float[Tensor, "T ..."]:
        """R_t(v) minus the policy's mean: the sign of the update of log π_θ(v)."""
        return self.advantage - self.policy_mean

    @property
    def delta_v(self) -> Float[Tensor, "T ..."]:
        """ΔV_t = r_t(v), Eq. 3."""
        return objective.self_distillation_reward(self.teacher_logps, self.student_logps)

    @property
    def generic(self) -> Float[Tensor, "T ..."]:
        """Ĝ_t(v), Eq. 6; NaN without contrast prompts."""
        return objective.input_generic(self.contrast_logps)

    @property
    def specific(self) -> Float[Tensor, "T ..."]:
        """Ŝ_t(v), Eq. 6; NaN without contrast prompts."""
        return objective.input_specific(self.teacher_logps, self.contrast_logps)


_TENSORS = [field.name for field in fields(ScoredTokens) if field.name not in ("formula", "alternatives")]


@dataclass(frozen=True)
class TokenMap:
    """Scores of one response under one checkpoint, with the texts to show."""

    response: Rollout
    checkpoint: str  # name
    tokens: list[TokenText]  # texts of the T tokens
    classes: list[str]  # token class of each
    scores: ScoredTokens
    alternatives: list[list[str]]  # (T, A), texts

    def values(self, quantity: str) -> Float[Tensor, " T"]:
        """Values of one of `QUANTITIES`."""
        return getattr(self.scores, quantity)


def score_response(
    checkpoint: Checkpoint,
    contexts: RolloutContexts,
    token_ids: Sequence[int],
    formula: CreditFormula,
    *,
    alternatives: int = 5,
) -> ScoredTokens:
    """Score y in two backbone passes, one of the student and a batched one of the teacher.

    Returns:
        Scores on the CPU, and at each position those of the A = `alternatives` likeliest tokens, which may include
        the sampled one.
    """
    parts: list[dict[str, Tensor]] = []
    for rows, logps in credit_logps(checkpoint, contexts, token_ids, formula.temperature):
        sampled = torch.tensor(token_ids[rows], device=logps.student.device)[:, None]
        likeliest = torch.maximum(logps.student, logps.teacher)
        top = likeliest.topk(min(alternatives, likeliest.shape[-1]), dim=-1).indices
        ids = torch.cat([sampled, top], dim=-1)
        parts.append(gather_scores(logps, ids, formula))
    joined = joined_scores(parts, dim=-2)
    candidates = ScoredTokens(**{name: values[..., 1:] for name, values in joined.items()}, formula=formula)
    sampled_scores = {name: values[..., 0] for name, values in joined.items()}
    return ScoredTokens(**sampled_scores, formula=formula, alternatives=candidates)


def joined_scores(parts: Sequence[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    """The tensors of parts of a response, joined along the dimension of its tokens."""
    joined = {}
    for name in parts[0]:
        joined[name] = torch.cat([part[name] for part in parts], dim=dim)
    return joined


def gather_scores(logps: CreditLogps, ids: Int[Tensor, "n A"], formula: CreditFormula) -> dict[str, Tensor]:
    """Tensors of `ScoredTokens` for A tokens at n positions, on the CPU."""
    scores = {
        "ids": ids,
        "student_logps": logps.student.gather(-1, ids),
        "teacher_logps": logps.teacher.gather(-1, ids),
        "contrast_logps": logps.contrasts.gather(-1, ids.expand(len(logps.contrasts), -1, -1)),
        "advantage": formula.advantages(logps, ids),
        "policy_mean": formula.policy_mean(logps)[:, None].expand(ids.shape),
    }
    return {name: values.cpu() for name, values in scores.items()}


def map_response(
    checkpoint: Checkpoint,
    response: Rollout,
    config: CreditConfig,
    *,
    alternatives: int = 5,
    classify: Classify | None = None,
    contexts: RolloutContexts | None = None,
) -> TokenMap:
    """Map one response under one checkpoint.

    Args:
        checkpoint: π_θ and π_ref.
        response: it needs a privileged context, and contrast prompts for S_t.
        config: configuration of the run: λ, the formula of R_t, the temperature and the templates.
        alternatives: number of alternatives at each position.
        classify: token classes; None takes `token_classes.default_classes`.
        contexts: prompts of the response as this checkpoint reads them; None builds them.

    Raises:
        ValueError: the response is empty or has no teacher.
    """
    if not response.token_ids:
        raise ValueError(f"Response {response.identifier!r} is empty.")
    contexts = contexts or rollout_contexts(response, config, checkpoint)
    formula = CreditFormula.from_config(config)
    scores = score_response(checkpoint, contexts, response.token_ids, formula, alternatives=alternatives)
    tokens = token_texts(checkpoint.tokenizer, response.token_ids)
    distinct, places = scores.alternatives.ids.unique(return_inverse=True)
    texts = [token_texts(checkpoint.tokenizer, [i])[0].text for i in distinct.tolist()]
    if contexts.images:  # their tensors are not stored
        response = replace(response, contexts=replace(contexts, images=()))
    return TokenMap(
        response,
        checkpoint.name,
        tokens,
        (classify or default_classes)(response, tokens),
        scores,
        np.array(texts, dtype=object)[places].tolist(),
    )


def write_maps(maps: Sequence[TokenMap], path: str | Path) -> None:
    """Write maps as JSON, with as many digits as restore the same floats. NaN and infinities are strings."""
    records = list(map(_record, maps))
    write_atomically(path, json.dumps(records, separators=(",", ":")))


def read_maps(path: str | Path) -> list[TokenMap]:
    """Read the maps that `write_maps` wrote, in the same order. Texts pass through `visible`.

    Raises:
        ValueError: the file does not hold token maps.
    """
    try:
        records = json.loads(Path(path).read_text("utf-8"))
        return [_token_map(record) for record in records]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} holds no token maps ({problem}). Map the run again.") from error


def scores_record(scores: ScoredTokens, names: Iterable[str]) -> dict[str, Any]:
    """Attributes of scores for JSON, rounded to as many digits as restore the same float."""
    digits = 17 if scores.student_logps.dtype == torch.float64 else 9
    return {name: _rounded(getattr(scores, name).tolist(), digits) for name in names}


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    if isinstance(value, int):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)


def _record(token_map: TokenMap) -> dict[str, Any]:
    scores = token_map.scores
    return {
        "response": asdict(token_map.response),
        "checkpoint": token_map.checkpoint,
        "tokens": [asdict(token) for token in token_map.tokens],
        "classes": token_map.classes,
        "formula": asdict(scores.formula),
        "dtype": str(scores.student_logps.dtype).removeprefix("torch."),
        "scores": scores_record(scores, _TENSORS),
        "alternatives": {"texts": token_map.alternatives, "scores": scores_record(scores.alternatives, _TENSORS)},
    }


def _token_map(record: dict[str, Any]) -> TokenMap:
    formula = CreditFormula(**record["formula"])
    dtype = {"float32": torch.float32, "float64": torch.float64}[record["dtype"]]
    length = len(record["classes"])
    stored = record["alternatives"]
    count = len(stored["texts"][0])
    tensors_of_alternatives = _tensors(stored["scores"], (length, count), dtype)
    alternatives = ScoredTokens(**tensors_of_alternatives, formula=formula)
    tensors = _tensors(record["scores"], (length,), dtype)
    scores = ScoredTokens(**tensors, formula=formula, alternatives=alternatives)
    tokens = []
    for token in record["tokens"]:
        character = token["character"] and visible(token["character"])
        tokens.append(TokenText(visible(token["text"]), character, token["special"]))
    return TokenMap(
        Rollout.from_json(record["response"]),
        visible(record["checkpoint"]),
        tokens,
        list(map(visible, record["classes"])),
        scores,
        np.vectorize(visible, otypes=[object])(stored["texts"]).tolist(),
    )


def _tensors(scores: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Fields of `ScoredTokens`; `contrast_logps` has one more dimension."""
    tensors = {}
    for name in _TENSORS:
        size = (len(scores[name]), *shape) if name == "contrast_logps" else shape
        values = torch.from_numpy(np.array(scores[name], dtype=np.float64).reshape(size))
        tensors[name] = values.to(torch.int64 if name == "ids" else dtype)
    return tensors


def summarize_maps(maps: Sequence[TokenMap]) -> DataFrame:
    """One row for each token class, the largest share of |S| first. Maps without contrast prompts are skipped.

    `ΔV_t = S_t + (Ĝ_t − log π_θ)`, Eq. 7: the first part depends on the question, the second does not.

    The index is the class. Columns are `tokens`, their number; the shares `of_tokens`, `of_delta_v` and `of_specific`
    of the sums of tokens, |ΔV| and |S|; and the means `delta_v` and `specific` in nats.
    """
    rows = [
        row
        for m in maps
        if len(m.scores.contrast_logps)
        for row in zip(m.classes, m.scores.delta_v.tolist(), m.scores.specific.tolist(), strict=True)
    ]
    tokens = DataFrame(rows, columns=["class", "delta_v", "specific"])
    by_class = tokens.pop("class")
    tokens = tokens.astype(float)
    sums = tokens.abs().assign(tokens=1.0).groupby(by_class).sum()
    shares = (sums / sums.sum().replace(0.0, 1.0)).add_prefix("of_")
    means = tokens.groupby(by_class).mean()
    summary = means.join(shares).assign(tokens=by_class.value_counts())
    return summary.sort_values("of_specific", ascending=False)


def format_summary(summary: DataFrame) -> str:
    """Markdown table of the summary."""
    columns = ("token class", "tokens", "share of tokens", "of \\|ΔV\\|", "of \\|S\\|", "mean ΔV", "mean S")
    rows = []
    for name, row in summary.iterrows():
        shares = row[["of_tokens", "of_delta_v", "of_specific"]].map("{:.3f}".format)
        means = row[["delta_v", "specific"]].map("{:+.3f}".format)
        rows.append([table_cell(str(name)), f"{row['tokens']:.0f}", *shares, *means])
    return f"{pluralized(int(summary['tokens'].sum()), 'token')}\n\n{markdown_table(columns, rows)}\n"
