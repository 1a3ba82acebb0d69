"""Frame rate: how often responses open as no response of the base without feedback does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence


def new_openings(base: Iterable[str], responses: Sequence[str], opening: Callable[[str], str]) -> list[bool]:
    """Whether each response has an opening that no response of the base to prompts without feedback has.

    `opening` gives the beginning of a response in a normal form, such as `tool_choice.opening`; empty for none.
    """
    known = {opening(text) for text in base} | {""}
    return [opening(text) not in known for text in responses]


def frame_rate(base: Sequence[str], responses: Sequence[str], opening: Callable[[str], str]) -> float:
    """Fraction of responses with an opening that no response of the base has, in [0, 1]."""
    return sum(new_openings(base, responses, opening)) / max(1, len(responses))


def own_frame_rate(base: Sequence[str], opening: Callable[[str], str]) -> float:
    """Fraction of the base's responses whose opening no other of them has: the frame rate that chance gives."""
    counts = Counter(map(opening, base))
    return sum(counts[found] == 1 for found in map(opening, base) if found) / max(1, len(base))


def common_openings(
    base: Sequence[str], responses: Sequence[str], opening: Callable[[str], str], count: int = 5
) -> list[tuple[str, int]]:
    """The most frequent of the openings that no response of the base has, with their numbers."""
    framed = new_openings(base, responses, opening)
    found = [opening(text) for text, is_new in zip(responses, framed, strict=True) if is_new]
    return Counter(found).most_common(count)
