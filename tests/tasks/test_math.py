from __future__ import annotations

import importlib.util
import itertools
import json
import time
from pathlib import Path

import pytest

from credit_trl import Verdict
from credit_trl.tasks import load_task
from credit_trl.tasks import math as math_task

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None or importlib.util.find_spec("pebble") is None,
    reason="needs math-verify and pebble (pip install 'credit-trl[math]')",
)
CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "math.jsonl").open(encoding="utf-8")]


def grades(pairs):
    """Rewards of boxed answers, graded as one batch."""
    completions = [rf"\boxed{{{given}}}" for _, given in pairs]
    return [verdict.reward for verdict in math_task.reward(completions, [gold for gold, _ in pairs])]


@needs_math_verify
def test_answers_that_were_graded_wrong_are_graded_right():
    completions = [case.get("response") or rf"\boxed{{{case['answer']}}}" for case in CASES]
    verdicts = math_task.reward(completions, [case["gold"] for case in CASES])
    wrong = [case for case, verdict in zip(CASES, verdicts, strict=True) if verdict.reward != case["want"]]
    assert wrong == []


# ruff: noqa: E501
# Lists of pairwise different answers.
DIFFERENT = {
    "letters": ["R - r", "r - R", "R + r", "0", "R", "r", "2R", "2r", "Rr", "R^2", "r^2", r"\frac{R}{r}", r"\frac{r}{R}"],
    "small": [*(f"{digit}e-{power}" for digit in (3, 4) for power in (7, 8, 20)), "0", *(f"10^{{-{n}}}" for n in range(20, 26))],
    "numbers": [*map(str, range(-3, 12)), "0.5", "0.51", "0.3333", r"\frac13", r"\sqrt2", r"\pi", "e", "3.14", "1000000", "1000001"],
    "large": ["10^{100}", "10^{100}+1", "10^{100}-1", "2^{100}", "2^{101}", "100!", "100!+1"],
    "words": ["east", "seat", "teas", "no", "on", "yes", "AB", "BA", "IV", "VI", "ABCD", "DCBA", "not possible"],
    "units": [rf"{n}\text{{ {unit}}}" for n in (7, 8) for unit in ("cm", "m", "km", "s", "kg", "cm/s")],
    "powers of units": [r"7\text{ cm}", r"7\text{ cm}^2", r"7\text{ cm}^3", r"7\text{ m}^2"],
    "times": [f"{hour}:{minute}" for hour in (1, 2, 5, 10) for minute in ("15", "30", "45")],
    "daytime": [rf"{hour}:30 \text{{ {half}.m.}}" for hour in (1, 2, 3) for half in "ap"],
    "ratios": ["2:3", "3:2", "1:3", "2:3:4", "2:3:5", "1:1"],
    "lists": ["1, 2", "1, 3", "1, 2, 3", "1", "2", "12", "1, 2, 2", "-1, 2", "1, -2"],
    "tuples": ["(1,2)", "(2,1)", "[1,2]", "[1,2)", "(1,2]", "(1,2,3)", r"\{1,2\}", "(1,3)"],
    "ellipses": [r"1, 2, \ldots, 100", r"1, 3, \ldots, 99", "100", r"1, 2, \ldots, n", r"1, 3, \ldots, 2n-1", "1, 2"],
    "mixed numbers": ["1 3/4", "1", "1 1/4", "13/4", "2 3/4", r"3\frac{3}{4}", "3/4", "-1 3/4"],
    "conditions": [rf"5 \text{{ if }} n \text{{ is {kind}}}" for kind in ("odd", "even", "prime")] + ["5", "n"],
    "relations": ["x^2+5=0", "x^2-5=0", "8 \\to 7", "x=7", "x=8", "y=9", "x>7", r"x \ge 7", "x<7", r"x \ne 7"],
    "intervals": ["0<x<8", r"0 \le x < 8", r"0 < x \le 8", r"[0,8]", "x<8", "x>0", r"(0,8) \cup (9,10)", "x<0 \\text{ or } x>8"],
    "congruences": [rf"x \equiv {r} \pmod{{{m}}}" for m in (5, 7, 9) for r in (1, 2, 3)],
    "bases": ["1010_2", "1010_3", "1011_2", "1010_{10}"],
    "matrices": [rf"\begin{{pmatrix}}{a}&{b}\\{b}&{a}\end{{pmatrix}}" for a in (0, 1, 2) for b in (0, 1, 3)]
    + [r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"],
    "polynomials": [f"{a}x^2+{b}x+{c}" for a in (2, 3) for b in (2, 5) for c in (1, 4)] + ["x", "-x", "|x|", r"\sqrt{x^2}+1"],
    "functions": [rf"\{f} {x}" for f in ("sin", "cos", "tan", "ln") for x in ("x", "2x", r"\frac{x}{2}")] + [r"\sin(2)x"],
    "roots": [rf"{a}\sqrt{{{b}}}" for a in (2, 3, 5) for b in (2, 3, 7)] + [r"\sqrt[3]{2}", r"\pm\sqrt{2}", r"\pm 2"],
    "operations": [r"\int_0^1 x\,dx", r"\int_0^1 x^2\,dx", r"\frac12", r"\frac13", r"\sum_{i=1}^3 i", "6", r"\frac{d}{dx}x^2", "2x"],
    "percent": [r"50\%", r"5\%", r"0.05\%", "0.06", r"60\%"],
    "complex": ["1+i", "1-i", "-1+i", "2i", "i", r"e^{i\pi/4}", r"e^{i\pi/3}", "I"],
    "repeating": [r"0.\overline{3}", "0.3", r"0.\overline{27}", r"0.2\overline{7}", r"0.\overline{7}"],
    "powers of i": ['i', '-i', '2i', 'i^2', '1', 'i^3+1'],
    "indices": ['x_1', 'x_2', 'x_{12}', 'x_{1}2', 'x', 'x_1^2'],
    "powers of functions": ['\\sin^2 x', '\\sin x^2', '\\sin(x)', '\\sin^{-1} x', '\\frac{1}{\\sin x}', '\\arcsin x+1'],
    "exponents": ['2^{10}', '210', '2^1 0', '20', '2^{1}0', '1024+1'],
    "counted things": ['3\\text{ apples}', '3\\text{ oranges}', '4\\text{ apples}', '3\\text{ more than }x'],
    "choices": ['A', 'B', 'C', 'D', 'A, B', 'A, C', 'B, C', 'A, B, C', 'AB', 'BC', '\\text{A or B or D}'],
    "quotients": ['\\frac{a}{b}', '\\frac{b}{a}', 'ab', 'a/b/c', 'a', '\\frac{a}{b+c}'],
    "points": ['(2,3), (4,5)', '(2,4), (3,5)', '(2,3)', '(3,2), (5,4)', '\\{2,3,4,5\\}', '(2,3) \\cup (4,5)'],
    "logarithms": ['\\log 2', '\\log 3', '\\log_2 3', '\\log_3 2', '\\ln 5', '\\log 5+1'],
    "clock": ['5:15 p.m.', '5:15 a.m.', '5:15', '5:51', '17:15'],
    "durations": ['2 \\text{ hours } 30 \\text{ minutes}', '2 \\text{ hours } 3 \\text{ minutes}', '30 \\text{ hours } 2 \\text{ minutes}', '2 \\text{ minutes } 30 \\text{ seconds}', '2.3', '230'],
    "infinite and undefined": ['\\infty', '-\\infty', '0', '\\text{undefined}', '\\text{DNE}', '\\frac{1}{0}', '\\emptyset', '\\{0\\}'],
    "thousands": ['1000', '100', '1,00', '10,00', '1,000,000', '1 000 000 000'],
    "combinatorics": ['n', 'n+1', '2n', 'n^2', '\\binom{n}{2}', 'n!', '2^n', '\\frac{n(n-1)}{3}'],
    "angles": ['90^\\circ', '45^\\circ', '\\frac{\\pi}{2}', '180^\\circ', '60\\text{ degrees}'],
    "joined numbers": ['3 \\text{ or } 4', '3 \\text{ and } 5', '3', '4', '34', '3 \\text{ to } 4', '3-4', '3/4'],
    "segments and angles": ['\\triangle ABC', '\\triangle ABD', '\\angle ABC', '\\angle ACB', 'ABC', 'BCA', '\\overline{AB}', '\\overline{BA}'],
    "equations and lines": ['2x+3y=5', '3x+2y=5', '2x+3y=6', '2x-3y=5', 'y=2x', 'x=2y', 'y>2x', 'y<2x'],
    "lengths": ['10\\text{ cm}', '10\\text{ cm}^2', '10\\text{ mm}', '10\\text{ dm}', '10 kg', '10 km'],
    "exponentials": ['e^x', 'e^{-x}', 'e^{2x}', 'x^e', 'ex', 'e+x'],
    "money": ['\\$5', '\\$50', '5\\text{ cents}'],
    "domains": ['x\\in\\mathbb{R}', 'x\\in\\mathbb{Z}', 'x>0', '\\mathbb{Q}', 'x \\ne 0'],
    "residues": ['2 \\pmod 3', '2 \\pmod 5', '1 \\pmod 3', 'x^2 \\equiv 1 \\pmod 3'],
    "primes": ["a'", 'a', "a''", "f'(x)", 'f(x)'],
    "repeated items": ['1, 1, 2', '1, 2', '1, 2, 2', '\\{1,2,3\\}'],
    "factors": ['(x-1)(x-2)', '(x-1)(x+2)', '(x-1)^2', '(x-1)', 'x-1, x-3'],
    "bases of ten": ['12_{10}', '12_8', '10', '12_{16}'],
    "ratios and numbers": ['2:1', '1:2', '2', '1/2', '2:1:1'],
}  # fmt: skip
EQUAL = {
    "fractions": [r"\frac34", r"\dfrac{3}{4}", "3/4", "0.75", r"\tfrac 34", r"\frac{6}{8}", "$0.75$", "**3/4**"],
    "pi": [r"\frac{\pi}{3}", "pi/3", r"\pi/3", "π/3", r"\dfrac{\pi}{3}", r"\frac13\pi", r"\frac{1}{3}*pi"],
    "square": ["x^2", "x**2", "x^{2}", r"x \cdot x", "x*x", "$x^2$", r"\color{red}{x^2}"],
    "interval": ["(0, 8.5)", "0 < x < 8.5", r"x \in (0, 8.5)", r"0 < x < \frac{17}{2}", r"\left(0, 8.5\right)", "8.5 > x > 0"],
    "ray": [r"(-\infty, 4)", "x<4", "4 > x", r"x \in (-\infty, 4)", "(-∞, 4)"],
    "union": [r"x<1 \text{ or } x>2", r"(-\infty,1) \cup (2,\infty)", r"(2,\infty) \cup (-\infty, 1)", "x<1 or x>2", "x > 2 or x < 1"],
    "number": ["1000", "1,000", r"1\,000", "1000.", "10^3", "1e3", "1{,}000", r"\text{1000}", "`1000`", r"x = 1000", "f(3)=1000"],
    "mixed": ["1 3/4", r"\frac{7}{4}", r"1\frac{3}{4}", "1.75", "7/4"],
    "roots": [r"5\sqrt{3}", r"5\sqrt3", r"5\sqrt(3)", "5√3", r"\sqrt{75}", "5*sqrt(3)"],
    "list": ["1, 2", "2, 1", r"1 \text{ and } 2", "1 and 2", r"\{1,2\}", r"x = 1, 2", r"x=1 \text{ or } x=2"],
    "polynomial": ["(x+1)^2", "x^2+2x+1", "1+2x+x^2", "(x+1)(x+1)", "(1+x)**2"],
    "signs": [r"\pm 2", "2, -2", "-2, 2", r"x = \pm 2"],
    "ratio": ["2:3", "4:6", "2 : 3"],
    "exponential": ["e^{9} - 1", "exp(9) - 1", r"\exp(9)-1", "-1+e^9"],
    "scientific": [r"1.6 \times 10^{-19}", r"1.60 \times 10^{-19}", r"1.6 \cdot 10^{-19}", "1.6e-19", r"16 \times 10^{-20}"],
    "matrix": [r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix}\frac22\\2\end{pmatrix}"],
    "words": ["yes", "Yes", r"\text{yes}", r"\text{Yes}", r"\textbf{yes}"],
    "products": ["2ab", "2ba", r"2 a b", r"2a \cdot b", r"a \cdot 2b"],
    "congruence": [r"x \equiv 3 \pmod{7}", r"3 \pmod 7", "x ≡ 3 (mod 7)", r"n \equiv 3 \pmod{7}"],
    "line": ["y = 2x+3", "2x - y + 3 = 0", "y - 2x = 3", "2x+3=y"],
}  # fmt: skip


@needs_math_verify
@pytest.mark.timeout(300)
def test_no_two_different_answers_are_equal():
    pairs = [pair for answers in DIFFERENT.values() for pair in itertools.permutations(answers, 2)]
    heads = dict.fromkeys(answers[0] for answers in DIFFERENT.values())
    pairs += [(one, other) for one, other in itertools.permutations(heads, 2)]
    assert len(pairs) >= 1_500
    assert [pair for pair, reward in zip(pairs, grades(pairs), strict=True) if reward] == []


@needs_math_verify
@pytest.mark.timeout(300)
def test_at_most_five_percent_of_equal_answers_are_missed():
    pairs = [pair for answers in EQUAL.values() for pair in itertools.permutations(answers, 2)]
    assert len(pairs) >= 300
    missed = [pair for pair, reward in zip(pairs, grades(pairs), strict=True) if not reward]
    assert len(missed) <= 0.05 * len(pairs), missed


BOXES = [
    (r"so \boxed{7}.", "7"),
    (r"\boxed{1} or \boxed{2}", "2"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{a \boxed{b} c}", "b"),
    (r"\boxed {7}", "7"),
    (r"\fbox{19}", "19"),
    (r"so $\boxed 19$.", "19"),
    (r"\(x = \boxed 2\).", "2"),
    (r"\boxed{\begin{pmatrix}1\\{2}\end{pmatrix}}", r"\begin{pmatrix}1\\{2}\end{pmatrix}"),
    (r"\boxed{}", ""),
    (r"\boxed{7", None),
    (r"\boxed{1} and \boxed{2", None),
    ("7", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "box"), BOXES)
def test_last_box_is_found_with_balanced_braces(text, box):
    assert math_task.last_boxed(text) == box


@needs_math_verify
def test_feedback_names_missing_box_and_truncation():
    wrong, unboxed, cut = math_task.reward([r"\boxed{8}", "it is 8", "let us"], ["7"] * 3, [False, False, True])
    assert wrong == Verdict(0.0, "Correct answer: 7", {"answer_format": 1.0})
    assert unboxed == Verdict(0.0, f"{math_task.NO_BOX} Correct answer: 7", {"answer_format": 0.0})
    assert cut == Verdict(0.0, f"{math_task.TRUNCATED} Correct answer: 7", {"answer_format": 0.0})


@needs_math_verify
@pytest.mark.timeout(300)
def test_expensive_answers_fail_and_the_pool_survives():
    verdicts = math_task.reward([r"\boxed{3^{300000000}+1}", r"\boxed{\frac{6}{2}}"], ["3"] * 2)
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0]
    assert verdicts[0].metrics == {"answer_format": 1.0, "comparison_failed": 1.0}


@needs_math_verify
def test_process_that_died_is_started_again():
    assert math_task.verify(r"\boxed{0.5}", "1/2").reward == 1.0
    math_task._COMPARER._process.kill()
    math_task._COMPARER._process.wait()
    assert math_task.verify(r"\boxed{0.25}", "1/4").reward == 1.0


@needs_math_verify
def test_comparisons_after_the_deadline_are_undecided():
    verdicts = math_task.reward([r"\boxed{0.5}", r"\boxed{1/2}", "no answer"], ["1/2"] * 3, deadline=0.0)
    assert [verdict.reward for verdict in verdicts] == [None, 1.0, 0.0]
    assert verdicts[0].metrics == {"undecided": 1.0}


MEGABYTES = [
    "x" * 1_000_000 + r"\boxed{7}",
    r"\boxed{" * 140_000,
    r"\boxed{" + "(" * 1_000_000 + "}",
    r"\boxed{" + "{" * 500_000 + "}" * 500_001,
    r"\boxed{8}" * 110_000 + r"\boxed{7}",
    "\\" * 1_000_000,
    " " * 10_000_000,
    r"\boxed{" + "1+" * 500_000 + "1}",
]


@pytest.mark.parametrize("response", MEGABYTES, ids=range(len(MEGABYTES)))
def test_a_megabyte_is_graded_in_a_second_of_processor_time(response):
    start = time.process_time()
    math_task.verify(response, "7")
    assert time.process_time() - start < 1.0


def test_64_megabytes_are_graded_in_four_seconds_of_processor_time():
    start = time.process_time()
    math_task.reward(MEGABYTES * 8, ["7"] * 64)
    assert time.process_time() - start < 4.0  # two seconds on two workers


@pytest.mark.parametrize("answer", [None, "", " ", 7])
def test_gold_answer_that_is_no_text_raises(answer):
    with pytest.raises(ValueError, match="A math answer must be a text"):
        math_task.verify(r"\boxed{7}", answer)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"problem": "1+1?", "answer": "2"}, "2"),
        ({"question": "1+1?", "answer": "One and one is two.\n#### 2"}, "2"),
        ({"problem": "1+1?", "solution": "We add: $\\boxed{2}$."}, "2"),
        ({"problem": "1+1?", "solution": "We add.", "answer": "2"}, "2"),
        ({"prompt": [{"role": "user", "content": "1+1?"}], "solution": "2"}, "2"),
        ({"problem": "1+1?", "answer": 2}, "2"),
    ],
)
def test_common_record_forms_are_read(write_jsonl, row, answer):
    built = load_task("math").build("train", write_jsonl([row]))[0]
    assert built["prompt"] == [{"role": "user", "content": f"1+1?\n\n{math_task.INSTRUCTION}"}]
    assert (built["answer"], built["task"], built["id"]) == (answer, "math", "math-1")


@pytest.mark.parametrize(
    "row",
    [
        {"answer": "2"},
        {"problem": "q"},
        {"problem": " ", "answer": "2"},
        {"prompt": [{"role": "assistant", "content": "a"}], "answer": "2"},
        {"problem": "q", "answer": ""},
        {"problem": "q", "solution": "We add.\n\nThen we are done."},
    ],
)
def test_malformed_row_raises_with_file_and_row(write_jsonl, row):
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1, field"):
        load_task("math").build("train", write_jsonl([row]))


def test_folder_has_one_file_per_split(tmp_path, write_jsonl):
    write_jsonl([{"problem": "q", "answer": "1"}], "data/test.jsonl")
    write_jsonl([{"problem": "q", "answer": "1"}] * 2, "data/train.jsonl")
    assert len(math_task.build("train", tmp_path / "data")) == 2
    assert len(math_task.build("train", hub=str(tmp_path / "data"))) == 2
    with pytest.raises(FileNotFoundError, match=r"0 files named validation .*test\.jsonl, train\.jsonl"):
        math_task.build("validation", tmp_path / "data")
