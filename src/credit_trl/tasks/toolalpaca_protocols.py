"""Two protocols that compare a response's tool calls with the golden ones.

**field**, SDPO's published verifier, for comparable numbers: the names after `Action:` are compared as a multiset, and
the inputs after `Action Input:` are merged into one dict and compared by Python's `==`. An input ends at its first
`}`, so a nested object counts as no input. The assignment of inputs to calls and the order of calls are ignored; `1`,
`1.0` and `true` are equal.

**strict** parses the calls: a call is an `Action:` line followed by `Action Input:` with one whole JSON object (nested
objects allowed, duplicate keys not). Calls are compared one by one and in order, and `true` is not `1`. A golden call
marked `[Optional]` may be present or absent. Calls before the last `</think>` do not count.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.completions import answer_part

OPTIONAL = "[Optional]"
MAX_SHOWN = 500  # characters of the response that feedback repeats

_CALL = re.compile(r"Action:[ \t]*(\w+)(\s*Action Input:\s*)(?=\{)")
_STYLES: tuple[dict[str, Any], ...] = ({}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4})


@dataclass(frozen=True)
class GoldenCall:
    """One expected call. `readable` is false if the record's input is not a JSON object; `input` is then {}."""

    action: str
    input: dict[str, Any]
    readable: bool = True


def golden_calls(answer: str | list[dict[str, Any]]) -> list[GoldenCall]:
    """Parse the `answer` of a row: a list of `{"Action": text, "Action_Input": text or object}` or its JSON text."""
    try:
        calls = json.loads(answer) if isinstance(answer, str) else answer
    except (ValueError, RecursionError) as error:
        raise ValueError(f"A ToolAlpaca answer must be the JSON text of a list of calls: {error}") from error
    if not isinstance(calls, list):
        raise ValueError(f"A ToolAlpaca answer must be a list of calls, got {type(calls).__name__}.")
    return [_golden_call(call, place) for place, call in enumerate(calls)]


def _golden_call(call: Any, place: int) -> GoldenCall:
    if not isinstance(call, dict) or not isinstance(call.get("Action"), str):
        raise ValueError(f"Call {place} is not an object with the text `Action`.")
    given = call.get("Action_Input")
    if not isinstance(given, str | dict):
        raise ValueError(f"Call {place} has no `Action_Input` that is a JSON object or its text.")
    parsed = given if isinstance(given, dict) else _json_or_none(given)
    readable = isinstance(parsed, dict)
    return GoldenCall(call["Action"], parsed if readable else {}, readable)


# ---- field protocol ----


def grade_by_field(response: str, golden: Sequence[GoldenCall]) -> Verdict:
    """Grade by the field protocol: names as a multiset and merged inputs must match."""
    actions = re.findall(r"Action:\s*(\w+)", response)
    blocks = re.findall(r"Action Input:\s*(\{[^}]*\})", response[: response.rfind("}") + 1])  # cut: linear time
    merged = _merged_inputs(map(_json_or_none, blocks))
    expected_actions, expected_merged = [call.action for call in golden], _merged_inputs(call.input for call in golden)
    mismatches = []
    if Counter(actions) != Counter(expected_actions):
        mismatches.append(_mismatch("Actions", _names(actions), _names(expected_actions)))
    if merged != expected_merged:
        mismatches.append(_mismatch("Action inputs", _as_json(merged), _as_json(expected_merged)))
    return _verdict(response, golden, mismatches, bool(actions))


def _merged_inputs(inputs: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for one in inputs:
        merged.update(one or {})
    return merged


# ---- strict protocol ----


def grade_strictly(response: str, golden: Sequence[GoldenCall]) -> Verdict:
    """Grade by the strict protocol: calls one by one and in order; optional golden calls may be absent."""
    answer = answer_part(response)
    calls, start = strict_calls(answer), len(response) - len(answer)
    expected = [(call.action, call.input) for call in golden]
    if _same_sequence(calls, expected):
        return _verdict(response, golden, [], bool(calls), start)
    mismatches = []
    names, expected_names = [name for name, _ in calls], [name for name, _ in expected]
    if not _same_sequence(names, expected_names):
        mismatches.append(_mismatch("Actions", _names(names), _names(expected_names)))
    inputs, expected_inputs = [given for _, given in calls], [given for _, given in expected]
    if not mismatches or not _same(inputs, expected_inputs):
        mismatches.append(_mismatch("Action inputs", _as_json(inputs), _as_json(expected_inputs)))
    return _verdict(response, golden, mismatches, bool(calls), start)


def strict_calls(response: str) -> list[tuple[str, dict[str, Any] | None]]:
    """Calls of a response in order: name and input, which is `None` if missing or not a JSON object."""
    calls, position = [], 0
    decoder = json.JSONDecoder(object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
    action, following = re.compile(r"^[ \t]*Action:([^\r\n]*)", re.MULTILINE), re.compile(r"\s*Action Input:\s*")
    while match := action.search(response, position):
        position, given = match.end(), None
        if label := following.match(response, position):
            position = label.end()
            try:
                given, position = decoder.raw_decode(response, position)
            except (ValueError, RecursionError):
                given = None
        calls.append((match[1].strip(), given if isinstance(given, dict) else None))
    return calls


def _same_sequence(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether the items found are the expected ones, each optional one present or absent."""
    matched = {0}  # possible numbers of found items that match the expected items so far
    for item in expected:
        head, optional = _without_mark(item)
        made = {count + 1 for count in matched if count < len(found) and _same(found[count], head)}
        matched = made | matched if optional else made
    return len(found) in matched


def _without_mark(item: Any) -> tuple[Any, bool]:
    name = item if isinstance(item, str) else item[0]
    bare = name.removeprefix(OPTIONAL)
    return (bare if isinstance(item, str) else (bare, *item[1:])), bare != name


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON values: objects and arrays by member, numbers by value, `true` is not `1`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# ---- both protocols ----


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _names(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"


def _as_json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "(nested too deeply to show)"
    return text.encode("utf-8", "replace").decode("utf-8")  # tokenizers reject lone surrogates


def _mismatch(what: str, predicted: str, expected: str) -> str:
    shown = predicted if len(predicted) <= MAX_SHOWN else f"{predicted[:MAX_SHOWN]}..."
    return f"{what} mismatch: predicted {shown}, expected {expected}"


def _verdict(
    response: str, golden: Sequence[GoldenCall], mismatches: Sequence[str], has_call: bool, start: int = 0
) -> Verdict:
    return Verdict(
        reward=float(not mismatches),
        feedback="; ".join(mismatches) or None,
        metrics={"answer_format": float(has_call)},
        corrected=corrected_response(response, golden, start) if mismatches else None,
    )


def corrected_response(response: str, golden: Sequence[GoldenCall], start: int = 0) -> str | None:
    """The response with the golden call in place of its own, and JSON in the same style and order.

    None unless both have exactly one call, with a JSON object in one of the usual styles. Text before `start` is kept
    and its calls are not counted.
    """
    call = _CALL.search(response, start)
    if call is None or response.count("Action:", start) != 1 or response.count("Action Input:", start) != 1:
        return None
    if len(golden) != 1 or not golden[0].readable or golden[0].action.startswith(OPTIONAL):
        return None
    (wanted,) = golden
    try:
        given, end = json.JSONDecoder().raw_decode(response, call.end())
        ordered = {name: wanted.input[name] for name in given if name in wanted.input} | wanted.input
        for style in _STYLES:
            if json.dumps(given, ensure_ascii=False, **style) == response[call.end() : end]:
                right = f"{wanted.action}{call[2]}{json.dumps(ordered, ensure_ascii=False, **style)}"
                corrected = f"{response[: call.start(1)]}{right}{response[end:]}"
                return corrected.encode("utf-8", "replace").decode("utf-8")
    except (ValueError, RecursionError):
        pass
    return None


GRADE_BY: dict[str, Callable[[str, Sequence[GoldenCall]], Verdict]] = {
    "field": grade_by_field,
    "strict": grade_strictly,
}
