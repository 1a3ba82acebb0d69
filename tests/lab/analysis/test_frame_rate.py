"""Frame rate: openings that the base has under feedback only."""

from __future__ import annotations

import pytest

from credit_trl.lab.analysis.frame_rate import common_openings, frame_rate, new_openings, own_frame_rate

BASE = ["weather(Oslo)", "Sure: call(Emma)", "Sure: call(Ben)", "Well, order(pizza)"]


def first_word(text: str) -> str:
    word = text.split()[0]
    return "" if "(" in word else word


def test_openings_of_the_base_and_bare_calls_are_not_frames():
    responses = ["Sure: x", "weather(Cairo)", "Apologies: x", "Apologies: y", "Right: x"]
    assert new_openings(BASE, responses, first_word) == [False, False, True, True, True]
    assert frame_rate(BASE, responses, first_word) == pytest.approx(3 / 5)
    assert common_openings(BASE, responses, first_word) == [("Apologies:", 2), ("Right:", 1)]


def test_own_rate_leaves_each_response_of_the_base_out():
    expected = sum(new_openings(BASE[:i] + BASE[i + 1 :], [text], first_word)[0] for i, text in enumerate(BASE))
    assert own_frame_rate(BASE, first_word) == expected / len(BASE) == 1 / 4


def test_no_responses_have_rate_zero():
    assert (frame_rate([], [], first_word), own_frame_rate([], first_word)) == (0.0, 0.0)
