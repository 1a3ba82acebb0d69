from __future__ import annotations

import base64
import collections
import contextlib
import json
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.tasks import lcb_cases
from credit_trl.tasks.lcb_cases import answer_of, decode_cases, parse_answer


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


CASES = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]

# ---- the hub's encoding ----


@given(
    cases=st.lists(st.fixed_dictionaries({"input": st.text(), "output": st.text()}), max_size=3),
    protocol=st.integers(0, pickle.HIGHEST_PROTOCOL),
)
def test_packed_tests_round_trip(cases, protocol):
    text = json.dumps(cases, ensure_ascii=False)
    assert decode_cases(packed(pickle.dumps(text, protocol))) == cases


def test_long_packed_tests_round_trip():
    cases = [{"input": "é" * 300_000, "output": "x"}]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert decode_cases(packed(pickle.dumps(json.dumps(cases, ensure_ascii=False), protocol))) == cases


def test_plain_json_is_decoded():
    assert decode_cases(json.dumps(CASES)) == CASES


class Boom:
    def __reduce__(self):
        return (print, ("executed",))


REFUSED = {
    "a call": pickle.dumps(Boom()),
    "a call in a list": pickle.dumps([Boom()]),
    "a call before the text": pickle.dumps(Boom(), 0)[:-1] + pickle.dumps(json.dumps(CASES), 0),
    "a global": pickle.dumps(collections.OrderedDict),
    "a list instead of its text": pickle.dumps(CASES),
    "bytes": pickle.dumps(json.dumps(CASES).encode()),
    "two texts": pickle.dumps("[]")[:-1] + pickle.dumps("[]"),
    "a number": pickle.dumps(3),
    "nothing": pickle.dumps(None),
    "cut off": pickle.dumps(json.dumps(CASES))[:-5],
    "no pickle": b"[]",
    "empty": b"",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent object": b"Pmodule\n.",
    "a text that is no JSON": pickle.dumps("not json"),
    "a text that is no list": pickle.dumps('{"input": "1"}'),
    "nested a hundred thousand deep": pickle.dumps("[" * 100_000),
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_other_pickles_raise_and_are_not_executed(data, capfd):
    with pytest.raises(ValueError, match=r"\S"):
        decode_cases(packed(data))
    assert "executed" not in capfd.readouterr().out


@given(data=st.binary(max_size=200))
def test_any_packed_bytes_give_a_list_or_value_error(data):
    with contextlib.suppress(ValueError):
        assert isinstance(decode_cases(packed(data)), list)


@given(text=st.text(max_size=100))
def test_any_text_gives_a_list_or_value_error(text):
    with contextlib.suppress(ValueError):
        assert isinstance(decode_cases(text), list)


def test_module_does_not_import_pickle():
    assert not hasattr(lcb_cases, "pickle")


def test_oversized_packed_tests_raise(monkeypatch):
    monkeypatch.setattr(lcb_cases, "LARGEST", 1_000_000)
    with pytest.raises(ValueError, match="unpacks to more than 1000000 bytes"):
        decode_cases(packed(pickle.dumps(json.dumps([" " * 2_000_000]))))


def test_truncated_packed_tests_raise():
    whole = zlib.compress(pickle.dumps(json.dumps(CASES)))
    with pytest.raises(ValueError, match="cut off"):
        decode_cases(base64.b64encode(whole[:-6]).decode())


# ---- the answer ----

ANSWER = {"inputs": ["1"], "outputs": ["2"], "testtype": "stdin", "fn_name": "", "time_limit": 6.0}
FUNCTIONAL = ANSWER | {"inputs": ["1\n[2]"], "testtype": "functional", "fn_name": "f"}


def test_parse_answer_reads_text_and_objects():
    cases = parse_answer(json.dumps(ANSWER))
    assert (len(cases), cases.fn_name, cases.time_limit) == (1, None, 6.0)
    assert parse_answer(ANSWER) == cases
    assert parse_answer(json.dumps(FUNCTIONAL)).arguments == ["[1, [2]]"]


def test_answer_of_round_trips():
    answer = answer_of([{"input": "1\n2", "output": "[3]", "testtype": "functional"}] * 2, "f", 2.0)
    cases = parse_answer(answer)
    assert (cases.inputs, cases.outputs, cases.fn_name) == (("1\n2",) * 2, ("[3]",) * 2, "f")


MALFORMED = [  # (answer, what the message names)
    ("no json", "JSON text"),
    (None, "got None"),
    ([], "is an object"),
    (ANSWER | {"inputs": "1"}, "`inputs`"),
    (ANSWER | {"outputs": [2]}, "`outputs`"),
    (ANSWER | {"outputs": []}, "the same length"),
    (ANSWER | {"inputs": [], "outputs": []}, "1 or more"),
    (ANSWER | {"time_limit": None}, "`time_limit`"),
    (ANSWER | {"time_limit": True}, "`time_limit`"),
    (ANSWER | {"time_limit": 0}, "`time_limit`"),
    (ANSWER | {"testtype": "code"}, "`testtype`"),
    (FUNCTIONAL | {"fn_name": ""}, "`fn_name`"),
    (FUNCTIONAL | {"fn_name": "a.b"}, "`fn_name`"),
    (FUNCTIONAL | {"inputs": ["1], [2"]}, "test 0 is not JSON"),
    (FUNCTIONAL | {"outputs": ["two"]}, "test 0 is not JSON"),
]


@pytest.mark.parametrize(("answer", "named"), MALFORMED)
def test_malformed_answer_raises(answer, named):
    with pytest.raises(ValueError, match=named):
        parse_answer(answer)
