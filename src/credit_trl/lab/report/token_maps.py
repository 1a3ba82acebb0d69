"""Token maps for the page: what it shows of each response, and the scale of its colours."""

import json
import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from credit_trl.contexts.prompts import Prompt, user_text
from credit_trl.lab.analysis.responses import Rollout, feedback_text
from credit_trl.lab.analysis.tokenmap import QUANTITIES, TokenMap, read_maps, scores_record, summarize_maps
from credit_trl.lab.analysis.tokentext import visible
from credit_trl.run_directory import MAPS_FOLDER

# Quantile of a group's magnitudes at which colours saturate. A lower one hides the change of large values in training.
SATURATION = 0.99


def read_run_maps(folder: Path) -> list[TokenMap]:
    """Maps of the first and the last step of a run; without these, in the first and last file of `credit_maps/`."""
    files = sorted((folder / MAPS_FOLDER).glob("*.json"))
    paths = [path for path in files if path.name.startswith("step-")] or files
    maps: dict[tuple[str, str], TokenMap] = {}
    for path in dict.fromkeys([*paths[:1], *paths[-1:]]):
        for token_map in read_maps(path):
            maps[token_map.response.identifier, token_map.checkpoint] = token_map
    return list(maps.values())


def maps_section(maps: Sequence[TokenMap]) -> dict[str, Any]:
    """What the page reads of the maps, as JSON.

    Responses with more checkpoints come first, then those with more to see at one token, see `headline_token`. The
    summaries are of the responses that all checkpoints score.
    """
    checkpoints = list(dict.fromkeys(m.checkpoint for m in maps))
    scales = group_scales(maps)
    by_response: dict[str, list[TokenMap]] = {}
    for token_map in maps:
        by_response.setdefault(token_map.response.identifier, []).append(token_map)
    shared: list[TokenMap] = []
    entries = []
    for response_maps in by_response.values():
        if len(response_maps) == len(checkpoints):
            shared += response_maps
        by_checkpoint = dict.fromkeys(checkpoints) | {m.checkpoint: _values(m) for m in response_maps}
        headline = headline_token(response_maps)
        entry = _described(response_maps[0]) | {
            "scales": scales[response_maps[0].response.group],
            "maps": list(by_checkpoint.values()),
            "headline": {"index": headline.index, "pair": headline.pair},
        }
        entries.append((-len(response_maps), -headline.size, entry))
    entries.sort(key=lambda item: item[:2])
    return {
        "quantities": [{"key": key, "symbol": symbol} for key, symbol in QUANTITIES.items()],
        "checkpoints": list(map(visible, checkpoints)),
        "responses": list(map(itemgetter(2), entries)),
        "summaries": [_summary(shared or maps, checkpoint) for checkpoint in checkpoints],
    }


def _summary(maps: Sequence[TokenMap], checkpoint: str) -> list[dict[str, Any]]:
    """Shares and means of the token classes under a checkpoint."""
    summary = summarize_maps([m for m in maps if m.checkpoint == checkpoint])
    return summary.reset_index(names="name").to_dict("records")


class HeadlineToken(NamedTuple):
    """The token of a response at which there is most to see."""

    index: int
    size: float  # by which responses are ordered, in nats
    pair: int | None  # index of the alternative that the teacher prefers there; None where it is the sampled token


def headline_token(maps: Sequence[TokenMap]) -> HeadlineToken:
    """The token whose probability changed most between the first and the last of a response's maps.

    Of a single map it is the token that lies furthest below the one that the teacher prefers there, in R_t − mean, or
    has the lowest R_t − mean where the teacher prefers all sampled tokens.
    """
    scores = maps[0].scores
    ids = scores.alternatives.ids
    preferred = scores.alternatives.teacher_logps.argmax(dim=1, keepdim=True)
    is_other = ids.gather(1, preferred).squeeze(1) != scores.ids
    gaps = scores.alternatives.centred.gather(1, preferred).squeeze(1) - scores.centred
    gaps = torch.where(is_other & ~gaps.isnan(), gaps, -math.inf)
    if len(maps) > 1:
        sizes = (maps[-1].scores.student_logps - scores.student_logps).abs()
    elif bool((gaps > -math.inf).any()):
        sizes = gaps
    else:
        sizes = -scores.centred
    sizes = torch.where(sizes.isnan(), -math.inf, sizes)
    index = int(sizes.argmax())
    pair = int(preferred[index]) if bool(is_other[index]) else None
    return HeadlineToken(index, float(sizes[index]), pair)


def group_scales(maps: Sequence[TokenMap]) -> dict[str, dict[str, float]]:
    """Scale of the colours: `{group: {quantity: magnitude in nats of the full colour}}`.

    It is the `SATURATION` quantile of the magnitudes over all responses of a group and all compared checkpoints.
    """
    groups: dict[str, list[TokenMap]] = {}
    for token_map in maps:
        groups.setdefault(token_map.response.group, []).append(token_map)
    scales: dict[str, dict[str, float]] = {}
    for group, group_maps in groups.items():
        scales[group] = {}
        for quantity in QUANTITIES:
            values = [m.values(quantity) for m in group_maps]
            scales[group][quantity] = _magnitude(values)
    return scales


def _magnitude(values: list[Float[Tensor, " T"]]) -> float:
    """The `SATURATION` quantile of the finite magnitudes; the largest, then 1, where it is 0."""
    joined = torch.cat(values).double().abs()
    joined = joined[joined.isfinite()]
    if not len(joined):
        return 1.0
    quantile = float(np.quantile(joined.numpy(), SATURATION))
    return quantile or joined.max().item() or 1.0


def _reward(response: Rollout) -> float:
    is_known = response.reward is not None and math.isfinite(response.reward)
    return float(response.reward) if is_known else math.inf


def _described(token_map: TokenMap) -> dict[str, Any]:
    """A response and its tokens."""
    response = token_map.response
    z = response.privileged
    return {
        "id": visible(response.identifier),
        "prompt": turns(response.prompt),
        "feedback": feedback_text(response),
        "demonstration": None if z.demonstration is None else visible(z.demonstration),
        "images": response.images,
        "contrasts": [visible(user_text(prompt)) for prompt in response.contrasts],
        "reward": None if math.isinf(_reward(response)) else _reward(response),
        "ids": list(response.token_ids),
        "tokens": [token.text for token in token_map.tokens],
        "special": [int(token.special) for token in token_map.tokens],
        "characters": {i: t.character for i, t in enumerate(token_map.tokens) if t.character is not None},
        "classes": token_map.classes,
    }


def turns(prompt: Prompt) -> list[dict[str, str]]:
    """Role and visible text of each turn; tool calls and other parts that are not text are shown as JSON."""
    if isinstance(prompt, str):
        return [{"role": "prompt", "text": visible(prompt)}]
    return [{"role": visible(str(t.get("role"))), "text": visible(_content(t))} for t in prompt]


def _content(turn: dict[str, Any]) -> str:
    content = turn.get("content")
    parts = [content] if isinstance(content, str | dict) else list(content or ())
    parts += turn.get("tool_calls") or ()
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part.get("type") != "image":  # shown as a picture
            texts.append(str(part.get("text") or json.dumps(part, default=str)))
    return "\n".join(texts)


def _values(token_map: TokenMap) -> dict[str, Any]:
    alternatives = token_map.scores.alternatives
    formula = token_map.scores.formula
    return {
        "formula": formula.text,
        "meanings": formula.meanings(),
        **scores_record(token_map.scores, (*QUANTITIES, "teacher_logps")),
        "alternatives": {
            "tokens": token_map.alternatives,
            **scores_record(alternatives, ("ids", "student_logps", "teacher_logps", "specific", "centred")),
        },
    }
