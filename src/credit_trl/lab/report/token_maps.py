"""Token maps for the page: what it shows of each response, and the scale of its colours."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    maps = [token_map for path in dict.fromkeys([*paths[:1], *paths[-1:]]) for token_map in read_maps(path)]
    return list({(token_map.response.identifier, token_map.checkpoint): token_map for token_map in maps}.values())


def maps_section(maps: Sequence[TokenMap]) -> dict[str, Any]:
    """What the page reads of the maps, as JSON.

    Responses that are shown first have a low reward, since their wrong tokens have a negative R_t; then those with
    more checkpoints. The summaries are of the responses that all checkpoints score.
    """
    checkpoints = list(dict.fromkeys(m.checkpoint for m in maps))
    scales = group_scales(maps)
    by_response: dict[str, list[TokenMap]] = {}
    for token_map in maps:
        by_response.setdefault(token_map.response.identifier, []).append(token_map)
    shared = [
        m for response_maps in by_response.values() if len(response_maps) == len(checkpoints) for m in response_maps
    ] or maps
    ordered = sorted(
        by_response.values(), key=lambda response_maps: (-len(response_maps), _reward(response_maps[0].response))
    )
    return {
        "quantities": [{"key": key, "symbol": symbol} for key, symbol in QUANTITIES.items()],
        "checkpoints": [visible(name) for name in checkpoints],
        "responses": [
            {
                **_described(response_maps[0]),
                "scales": scales[response_maps[0].response.group],
                "maps": [next((_values(m) for m in response_maps if m.checkpoint == c), None) for c in checkpoints],
            }
            for response_maps in ordered
        ],
        "summaries": [
            summarize_maps([m for m in shared if m.checkpoint == c]).reset_index(names="name").to_dict("records")
            for c in checkpoints
        ],
    }


def group_scales(maps: Sequence[TokenMap]) -> dict[str, dict[str, float]]:
    """Scale of the colours: `{group: {quantity: magnitude in nats of the full colour}}`.

    It is the `SATURATION` quantile of the magnitudes over all responses of a group and all compared checkpoints.
    """
    groups: dict[str, list[TokenMap]] = {}
    for token_map in maps:
        groups.setdefault(token_map.response.group, []).append(token_map)
    return {
        group: {q: _magnitude([m.values(q) for m in group_maps]) for q in QUANTITIES}
        for group, group_maps in groups.items()
    }


def _magnitude(values: list[Float[Tensor, " T"]]) -> float:
    """The `SATURATION` quantile of the finite magnitudes; the largest, then 1, where it is 0."""
    joined = torch.cat(values).double().abs()
    joined = joined[joined.isfinite()]
    if not len(joined):
        return 1.0
    return float(np.quantile(joined.numpy(), SATURATION)) or joined.max().item() or 1.0


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
    return "\n".join(
        part if isinstance(part, str) else str(part.get("text") or json.dumps(part, default=str))
        for part in parts
        if isinstance(part, str) or part.get("type") != "image"  # shown as a picture
    )


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
