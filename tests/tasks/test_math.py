from __future__ import annotations

import builtins
import importlib.util
import resource
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl import Verdict
from credit_trl.tasks import load_task, math_worker
from credit_trl.tasks import math as math_task
from credit_trl.tasks.records import RowError

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify (pip install 'credit-trl[math]')"
)


@pytest.fixture(autouse=True)
def _long_time_limit(monkeypatch):
    """On a busy machine an equal answer must not exceed the processor time."""
    monkeypatch.setattr(math_worker, "SECONDS", 30.0)


# ---- the answer's box ----


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{a \boxed{b} c}", "b"),
        ("\\boxed{1\n2}", "1\n2"),
        (r"\boxed{7", None),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed 7", None),
        (r"\boxed{\begin{pmatrix}1\\{2}\end{pmatrix}}", r"\begin{pmatrix}1\\{2}\end{pmatrix}"),
        (r"\boxed{42\\}", r"42\\"),
        (r"\boxed{1\\\{2\}}", r"1\\\{2\}"),
        (r"\boxed {7}", "7"),
        ("\\boxed{1} then \\boxed\n{2}", "2"),
        ("7", None),
        ("", None),
    ],
)
def test_last_boxed_returns_balanced_content(text, box):
    assert math_task.last_boxed(text) == box


BALANCED = st.recursive(
    st.text(alphabet="ab1 ^_", max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(lambda x: f"{{{''.join(x)}}}"),
)


@given(before=st.text(), content=BALANCED, after=st.text(alphabet="{} ab"))
def test_last_boxed_ignores_surrounding_text(before, content, after):
    assert math_task.last_boxed(f"{before.replace('boxed', '')}\\boxed{{{content}}}{after}") == content.strip()


# ---- the verifier ----

ADVERSARIAL = {  # reason: (response, gold, reward)
    "right": (r"so \boxed{7}", "7", 1),
    "wrong": (r"so \boxed{8}", "7", 0),
    "the last box counts, right": (r"\boxed{8} no \boxed{7}", "7", 1),
    "the last box counts, wrong": (r"\boxed{7} no \boxed{8}", "7", 0),
    "unboxed": ("The answer is 7", "7", 0),
    "an unclosed box after a right one": (r"\boxed{7} and \boxed{7", "7", 0),
    "fraction not reduced": (r"\boxed{\frac{14}{2}}", "7", 1),
    "dfrac": (r"\boxed{\dfrac{1}{2}}", r"\frac12", 1),
    "decimal for a fraction": (r"\boxed{0.5}", r"\frac{1}{2}", 1),
    "rounded too early": (r"\boxed{0.33333}", r"\frac{1}{3}", 0),
    "an expression to be computed": (r"\boxed{2 \cdot 3 + 1}", "7", 1),
    "a polynomial expanded": (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    "a polynomial that differs": (r"\boxed{x^2+2x+2}", "(x+1)^2", 0),
    "thousands separator": (r"\boxed{1,000}", "1000", 1),
    "leading zero": (r"\boxed{07}", "7", 1),
    "plus sign": (r"\boxed{+7}", "7", 1),
    "minus sign": (r"\boxed{-7}", "7", 0),
    "infinity of the other sign": (r"\boxed{-\infty}", r"\infty", 0),
    "dollar signs inside": (r"\boxed{$7$}", "7", 1),
    "gold in dollar signs": (r"\boxed{7}", "$7$", 1),
    "an amount in dollars": (r"\boxed{20\$}", "20", 1),
    "gold in dollars": (r"\boxed{20}", r"20\$", 1),
    "thousands apart": (r"\boxed{1\,234\,567}", "1234567", 1),
    "gold with thousands apart": (r"\boxed{10000}", r"10\;000", 1),
    "thousands apart by a blank": (r"\boxed{10 000.5}", "10000.5", 1),
    "a power times a hundred": (r"\boxed{3^2\,100}", "900", 1),
    "thousands apart are no product": (r"\boxed{5\,000}", "0", 0),
    "a full stop": (r"\boxed{7.}", "7", 1),
    "a full stop behind dollar signs": (r"\boxed{$\frac12$.}", "0.5", 1),
    "gold with a full stop": (r"\boxed{7}", "$7.$", 1),
    "a full stop behind another number": (r"\boxed{8.}", "7", 0),
    "gold as computers write it": (r"\boxed{1 \times 10^{-5}}", "1e-05", 1),
    "the same as a decimal": (r"\boxed{0.00001}", "1e-05", 1),
    "response as computers write it": (r"\boxed{6.02E23}", r"6.02 \times 10^{23}", 1),
    "Euler's number less five": (r"\boxed{e-5}", "1e-05", 0),
    "another power": (r"\boxed{1e-4}", "1e-05", 0),
    "unit": (r"\boxed{7 \text{ cm}}", "7", 1),
    "percent": (r"\boxed{50\%}", "0.5", 1),
    "named variable": (r"\boxed{x=7}", "7", 1),
    "another variable": (r"\boxed{y=3}", "x=3", 0),
    "inequality turned round": (r"\boxed{3>x}", "x<3", 1),
    "tuple": (r"\boxed{(1,2)}", "(1, 2)", 1),
    "tuple in another order": (r"\boxed{(2,1)}", "(1, 2)", 0),
    "interval closed instead of open": (r"\boxed{[1,2]}", "(1,2)", 0),
    "set in another order": (r"\boxed{\{2,1\}}", r"\{1,2\}", 1),
    "matrix": (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1),
    "two answers for one": (r"\boxed{7, 8}", "7", 0),
    "one or the other": (r"\boxed{7 or 8}", "7", 0),
    "every answer listed": (r"\boxed{1,2,3,4,5,6,7,8,9}", "7", 0),
    "a letter": (r"\boxed{A}", "A", 1),
    "a letter as text": (r"\boxed{\text{A}}", "A", 1),
    "a word": (r"\boxed{\text{yes}}", "yes", 1),
    "a number as a word": (r"\boxed{seven}", "7", 0),
    "full-width digit": (r"\boxed{３}", "7", 0),
    "division by zero": (r"\boxed{\frac{7}{0}}", "7", 0),
    "NaN": (r"\boxed{NaN}", "7", 0),
    "NaN for NaN is the same text": (r"\boxed{NaN}", "NaN", 1),
    "infinity for a number": (r"\boxed{\infty}", "7", 0),
    "the question boxed, an integral": (r"\boxed{\int_0^1 x\,dx}", r"\frac12", 0),
    "the question boxed, a sum in an equation": (r"\boxed{s = \sum_{i=1}^3 i}", "6", 0),
    "the question boxed, a limit": (r"\boxed{\lim_{x\to 0}\frac{\sin x}{x}}", "1", 0),
    "the question boxed, a derivative": (r"\boxed{\frac{d}{dx}x^2}", "2x", 0),
    "the question boxed, a determinant": (r"\boxed{\begin{vmatrix}1&2\\3&4\end{vmatrix}}", "-2", 0),
    "the question boxed, a divisor": (r"\boxed{\gcd(10,15)}", "5", 0),
    "the question boxed, inside a pair": (r"\boxed{(\int_0^1 1\,dx, 2)}", "(1,2)", 0),
    "an integral and its value": (r"\boxed{\int_0^1 x\,dx = \frac12}", r"\frac12", 1),
    "an integral and a wrong value": (r"\boxed{\int_0^1 x\,dx = \frac13}", r"\frac12", 0),
    "an integral where the gold answer is one": (r"\boxed{2\int_0^x e^{-t^2} dt}", r"\int_0^x 2e^{-t^2}dt", 1),
    "not equal": (r"\boxed{7 \neq 8}", "7", 0),
    "empty box": (r"\boxed{}", "7", 0),
    "empty": ("", "7", 0),
    "blank box": (r"\boxed{ }", "7", 0),
    "only markup": (r"\boxed{\text{}}", "7", 0),
    "CRLF": ("\\boxed{\r\n7\r\n}\r\n", "7", 1),
    "code": (r"\boxed{__import__('os').getpid()}", "7", 0),
    "newline and a second protocol line": ("\\boxed{8}\ntrue\n\\boxed{8\n}", "7", 0),
    "a lone surrogate": ("\\boxed{\ud800}", "7", 0),
    "null byte": ("\\boxed{7\x00}", "8", 0),
    "huge box": (r"\boxed{" + "1+" * 100_000 + "1}", "7", 0),
    "huge text before": ("x" * 1_000_000 + r"\boxed{7}", "7", 1),
    "a hundred thousand boxes": (r"\boxed{8}" * 100_000 + r"\boxed{7}", "7", 1),
    "a hundred thousand open boxes": (r"\boxed{" * 100_000, "7", 0),
}


@needs_math_verify
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("response", "gold", "reward"), ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_last_box_is_compared_as_mathematics(response, gold, reward):
    verdict = math_task.verify(response, gold)
    assert verdict.reward == reward
    assert verdict.feedback.endswith(f"Correct answer: {gold}")


EQUAL = [  # gold, answer
    # words of capital letters
    ("DCAB", r"\text{DCAB}"),
    (r"\text{BD}", "BD"),
    ("BD", r"\textbf{BD}"),
    ("BD", "$BD$."),
    ("DCAB", "D C A B"),
    ("A B", "B A"),
    ("A,C", "C,A"),
    (r"\{A,C\}", "A,C"),
    ("II and IV", "IV, II"),
    ("II and IV", r"\text{II and IV only}"),
    ("I, II, and III", r"\text{I}, \text{II}, \text{III}"),
    (r"\{AB, CD\}", "CD, AB"),
    ("NO", "no"),
    ("AB=CD", "CD=AB"),
    ("AB", r"A \cdot B"),
    (r"\triangle ABC", r"\triangle BCA"),
    # congruences
    ("3", r"x \equiv 3 \pmod{7}"),
    ("3", r"x \equiv 3 \pmod 7"),
    ("3", r"x \equiv 3 \bmod 7"),
    ("3", r"x \equiv 3 \mod 7"),
    ("3", "x ≡ 3 (mod 7)"),
    ("9", r"7^{100} \equiv 9 \pmod{13}"),
    ("9", r"7^{100} \equiv 3^{20} \equiv 9 \pmod{13}"),
    ("9", r"9 \pmod{13}"),
    (r"7^{100} \equiv 9 \pmod{13}", "9"),
    (r"x \equiv 3 \pmod{7}", "3"),
    (r"x \equiv 3 \pmod{7}", r"3 \mod 7"),
    (r"x \equiv 3 \pmod{7}", r"n \equiv 3 \pmod{7}"),
    (r"x \equiv 3 \pmod{7}", r"x \equiv 3 \ (\text{mod } 7)"),
    (r"x \equiv 3 \pmod{7}", r"x \equiv 3 \quad (\operatorname{mod}\,7)"),
    (r"x \equiv 3 \pmod{7}", r"$x \equiv 3 (\bmod 7)$."),
    (r"x \equiv 1, 3 \pmod{7}", r"x \equiv 3, 1 \pmod{7}"),
    (r"x \equiv 1 \pmod{3} \text{ or } x \equiv 2 \pmod{3}", r"x \equiv 1, 2 \pmod{3}"),
    (r"x \equiv \pi \pmod{2\pi}", r"x \equiv \pi \pmod{2 \pi}"),
    # number bases
    ("1010_2", "1010"),
    ("1010_2", r"1010_{2}"),
    ("1010_2", r"10_{10} = 1010_2"),
    # other notations
    (r"\emptyset", r"\varnothing"),
    (r"50\%", r"50\,\%"),
    (r"50\%", r"50\ \%"),
    ("90", "90°"),
    ("90", r"90\degree"),
    (r"90^\circ", "90°"),
    (r"(-\infty, 3]", "(-∞, 3]"),
    (r"\sqrt2", "√2"),
    (r"\frac{\sqrt{3}}{2}", "√3/2"),
    (r"\sqrt{x+1}", "√(x+1)"),
    (r"2\sqrt{2}", "2√{2}"),
    (r"\frac12", "½"),
    (r"\frac52", "2½"),
    (r"\frac{1}{10}", "⅒"),
    (r"\ln(x)", r"\log_e(x)"),
    (r"\ln(x)", r"\log_{e}x"),
    ("8", r"8~\mathrm{cm}^3"),
    (r"\pi", r"\pi~\text{cm}"),
    ("(1,2)", "(1,~2)"),
    ("10000", "10~000"),
    # units of several numbers
    (r"6\text{ cm}, 7\text{ cm}", r"7\text{ cm}, 6\text{ cm}"),
    (r"6\text{ cm and }7\text{ cm}", "6, 7"),
    (r"6\text{ cm and }7\text{ cm}", r"7\text{ cm and }6\text{ cm}"),
    ("6, 7", r"6\text{ cm or }7\,\mathrm{cm}."),
    ("42", r"6\text{ cm} \times 7\text{ cm}"),
    ("13", r"6\text{ cm}+7\text{ cm}"),
    (r"3\text{ hours }20\text{ minutes}", r"3\text{ h }20\text{ min}"),
    (r"x=6\text{ cm}, y=7\text{ cm}", "x=6, y=7"),
    (r"\frac12\text{ m}^2, \frac13\text{ m}^2", r"\frac13, \frac12"),
    (r"6\text{ cm}", r"6\text{ cm}=60\text{ mm}"),
    ("6", r"6\ \text{m}/\text{s}^2"),
    ("6", r"6\text{ cm}^2 \text{ approximately}"),
    # repeating decimals
    (r"\frac13", r"0.\overline{3}"),
    (r"0.1\overline{6}", r"\frac16"),
    (r"-\frac{4}{3}", r"-1.\bar{3}"),
    (r"0.\overline{27}", r"\frac{3}{11}"),
    ("1", r"0.\overline{9}"),
    # logarithms
    (r"\frac{\pi}{2}\log 2", r"\frac{\pi}{2}\ln 2"),
    (r"\ln 2", r"\log 2"),
    (r"\ln|x|", r"\log|x|"),
    (r"\log^2 2", r"\ln^2 2"),
    ("2", r"\log 100"),
    (r"\log x", r"\frac{\ln x}{\ln 10}"),
]
DIFFERENT = [
    ("DCAB", "ABCD"),
    ("DCAB", "A B C D"),
    ("IV", "VI"),
    ("BD", "DB"),
    ("BD", r"\text{DB}"),
    ("AC", "CA"),
    ("BD", "B, D"),
    ("B, D", "BD"),
    ("I", "II"),
    ("NO", "ON"),
    ("II and IV", "II and VI"),
    ("IV only", "VI only"),
    ("(IV, VI)", "(VI, IV)"),
    (r"\{AB, CD\}", "BA, CD"),
    (r"x \equiv 3 \pmod{7}", r"x \equiv 3 \pmod{5}"),
    (r"x \equiv 23 \pmod{105}", r"x \equiv 23 \pmod{35}"),
    (r"x \equiv 3 \pmod{7}", r"x \equiv 3 \text{ (mod 5)}"),
    (r"x \equiv 3 \pmod{7}", r"x \equiv 4 \pmod{7}"),
    (r"x \equiv 3 \pmod 7", r"x \equiv 5 \pmod 7"),
    (r"x \equiv 3 \pmod{7}", r"3 \mod 5"),
    (r"x \equiv 3 \pmod{2^{k}}", r"x \equiv 3 \pmod{3^{k}}"),
    (r"x \equiv 2 \pmod{3}", r"x \equiv 1 \pmod{3} \text{ or } x \equiv 2 \pmod{3}"),
    (r"x \equiv \pm 1 \pmod{7}", r"x \equiv 1 \pmod{7}"),
    (r"x^2 \equiv 1 \pmod{8}", r"x \equiv 1 \pmod{8}"),
    ("9", r"7^{100} \pmod{13}"),
    ("9", r"x \equiv 7^{100} \pmod{13}"),
    ("7", r"9 \equiv 7^{100} \pmod{13}"),
    ("7", r"x \equiv 3 \pmod 7"),
    ("3", r"10 \bmod 7"),
    ("7", r"10 \bmod 7"),
    ("3", r"10 \mod 7"),
    ("3", r"x \equiv 10 \mod 7"),
    ("3", r"x \equiv 10 \mod (7)"),
    ("1010_3", "1010_2"),
    (r"1010_{3}", r"1010_{2}"),
    ("1010_2", r"1010_{10} = 1111110010_2"),
    ("1010_2", "10"),
    ("45", "90°"),
    (r"\infty", "-∞"),
    (r"\sqrt3", "√2"),
    (r"\sqrt{x}+1", "√(x+1)"),
    (r"\frac12", "¼"),
    ("p", "~p"),
    ("6", r"6\text{ cm}, 7\text{ cm}"),
    ("6", r"6\text{ cm or }7\text{ cm}"),
    ("6", r"6\text{ cm} \times 7\text{ cm}"),
    ("3", r"3\text{ if }x>0, 4\text{ otherwise}"),
    ("3", r"3\text{ hours }20\text{ minutes}"),
    (r"3\text{ hours }20\text{ minutes}", r"3\text{ hours }40\text{ minutes}"),
    (r"3\text{ red and }2\text{ blue}", r"2\text{ red and }3\text{ blue}"),
    (r"6\text{ cm}, 7\text{ cm}", r"6\text{ cm}, 8\text{ cm}"),
    (r"x=6\text{ cm}, y=7\text{ cm}", r"x=6\text{ cm}, y=8\text{ cm}"),
    (r"0.\overline{3}", "0.3"),
    (r"\frac13", r"0.\overline{33}1"),
    (r"0.\overline{27}", r"0.2\overline{7}"),
    (r"\ln(x)", r"\log_3(x)"),
    ("2", r"\ln 100"),
    (r"\ln 100", "2"),
    ("1", r"\log e"),
    (r"\ln 2", r"\log 3"),
    (r"\ln 2", r"\log_{10} 2"),
    (r"\ln 6", r"\log 2 + \ln 3"),
]


@needs_math_verify
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_notations_of_the_same_answer_are_equal(gold, answer):
    assert math_task.verify(rf"\boxed{{{answer}}}", gold).reward == 1.0


@needs_math_verify
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_answers_that_look_alike_are_different(gold, answer):
    assert math_task.verify(rf"\boxed{{{answer}}}", gold).reward == 0.0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece",
    ["√(", r"\log ", r"\equiv ", r"x \equiv 3 \pmod{7}", "~", r"\,", "½", "1~", "$ ", r"1\text{ a }", r"1.\bar{1}"],
)
def test_hostile_notations_finish_in_time(piece):
    math_worker.as_tex(piece * 20_000)
    math_worker.as_tex(rf"{piece * 20_000}\pmod{{7}}")


@needs_math_verify
def test_wrong_answer_has_a_corrected_response():
    wrong, right, unboxed = math_task.reward([r"So \boxed{ \frac13 }.", r"\boxed{0.5}", "1/3"], [r"\frac12"] * 3)
    assert (wrong.reward, wrong.corrected) == (0.0, r"So \boxed{ \frac12 }.")
    assert (right.reward, right.corrected, unboxed.corrected) == (1.0, None, None)


@given(st.lists(st.sampled_from([r"\boxed{", "}", "{", "a ", r"\}", "\n"]), max_size=12).map("".join))
def test_corrected_response_has_the_answer_in_its_last_box(text):
    corrected = math_task.with_answer(text, "7")
    assert (corrected is None) == (math_task.last_boxed(text) is None)
    assert corrected is None or math_task.last_boxed(corrected) == "7"


@needs_math_verify
def test_feedback_names_an_unevaluated_operation():
    verdict = math_task.verify(r"\boxed{\int_0^1 x\,dx}", r"\frac12")
    assert verdict.feedback == rf"{math_task.UNDONE} Correct answer: \frac12"
    assert math_task.verify(r"\boxed{\frac13}", r"\frac12").feedback == r"Correct answer: \frac12"


@needs_math_verify
@settings(max_examples=25, deadline=None)
@given(numerator=st.integers(-50, 50), denominator=st.integers(1, 50), factor=st.integers(1, 9), off=st.booleans())
def test_fractions_are_equal_iff_cross_products_are(numerator, denominator, factor, off):
    response = rf"\boxed{{\frac{{{numerator * factor + off}}}{{{denominator * factor}}}}}"
    expected = (numerator * factor + off) * denominator == numerator * denominator * factor
    assert math_task.verify(response, rf"\frac{{{numerator}}}{{{denominator}}}").reward == expected


@needs_math_verify
def test_feedback_names_missing_box_and_truncation():
    wrong = math_task.verify(r"\boxed{8}", "7")
    assert (wrong.feedback, wrong.metrics) == ("Correct answer: 7", {"answer_format": 1.0})
    unboxed = math_task.verify("it is 8", "7")
    assert "must be given in the format \\boxed{answer}. Correct answer: 7" in unboxed.feedback
    assert unboxed.metrics == {"answer_format": 0.0}
    cut = math_task.verify("let us see", "7", truncated=True)
    assert cut.feedback.startswith("The response was cut off")
    assert cut.feedback.endswith("Correct answer: 7")


def processor_time_of_ended_children() -> float:
    """Processor seconds of ended child processes, which do not depend on the load of the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@needs_math_verify
@pytest.mark.timeout(300)
def test_expensive_answers_fail_within_their_limit(monkeypatch):
    monkeypatch.setattr(math_worker, "SECONDS", 1.0)
    bombs = [
        r"\boxed{10^{10^{10}}}",
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{3^{300000000}+1}",
        r"\boxed{\binom{10^9}{10^8}}",
    ]
    used = processor_time_of_ended_children()
    verdicts = math_task.reward(completions=[*bombs, r"\boxed{\frac{6}{2}}"], answer=["3"] * 5)
    assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert verdicts[0].metrics == {"answer_format": 1.0, "comparison_failed": 1.0}
    assert processor_time_of_ended_children() - used < 60


def address_space(worker) -> int:
    return int(Path(f"/proc/{worker.process.pid}/statm").read_text().split()[0]) * resource.getpagesize()


@needs_math_verify
def test_worker_imports_nothing_of_the_working_directory(tmp_path, monkeypatch):
    for name in ("math_verify", "json", "credit_trl"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.syspath_prepend(".")
    worker = math_worker.Worker()
    try:
        assert worker.compare("1/2", "0.5", 60.0) == "equal"
    finally:
        worker.close()
    assert not (tmp_path / "imported").exists()


@needs_math_verify
def test_worker_starts_within_limits(monkeypatch):
    """Its own limits, or lower ones that it inherits."""
    popen, limited = subprocess.Popen, ["bash", "-c", 'ulimit -v 1900000 -n 32 && exec "$@"', "bash"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([*limited, *command], **options))
    worker = math_worker.Worker()
    try:
        limits = {
            name: resource.prlimit(worker.process.pid, getattr(resource, f"RLIMIT_{name}"))
            for name in ("AS", "NOFILE", "FSIZE", "CORE", "CPU")
        }
        assert worker.compare("1/2", "0.5", 60.0) == "equal"
    finally:
        worker.close()
    assert limits["AS"] == (1_900_000 * 1024,) * 2
    assert limits["NOFILE"] == (32, 32)
    assert limits["FSIZE"] == limits["CORE"] == (0, 0)
    assert limits["CPU"][0] == math_worker.START_SECONDS


@needs_math_verify
def test_out_of_memory_answer_is_different():
    workers = math_worker.Workers(limit=1)
    try:
        assert workers.compare("1/2", "0.5") == "equal"
        worker = workers._idle.get()
        limit = address_space(worker)  # what it has already
        resource.prlimit(worker.process.pid, resource.RLIMIT_AS, (limit, limit))
        workers._idle.put(worker)
        assert workers.compare("3", r"2^{400000000}") == "different"  # math-verify catches the error itself
        assert workers.compare("1/2", "0.5") == "equal"
        assert worker.process.returncode is None
    finally:
        workers.close()


@needs_math_verify
def test_worker_with_full_caches_is_replaced(monkeypatch):
    """Libraries cache huge numbers, which would leave later comparisons without memory."""
    monkeypatch.setattr(math_worker, "KEPT_BYTES", 8 * 1024**2)
    workers = math_worker.Workers(limit=1)
    try:
        assert workers.compare(r"\frac{157}{7}", r"\dfrac{314}{14}") == "equal"
        worker = workers._idle.get()
        fresh = address_space(worker)
        workers._idle.put(worker)
        for exponent in range(20_000_000, 20_000_010):  # of 2.5 MB each
            assert workers.compare("3", rf"2^{{{exponent}}}") == "different"
            if workers._idle.empty():
                break
            assert address_space(worker) <= fresh + math_worker.KEPT_BYTES
        assert worker.process.returncode is not None
        assert workers.compare(r"\frac{157}{7}", r"\dfrac{314}{14}") == "equal"
    finally:
        workers.close()


@needs_math_verify
def test_worker_that_died_while_idle_is_replaced():
    workers = math_worker.Workers(limit=1)
    try:
        assert workers.compare("1/2", "0.5") == "equal"
        dead = workers._idle.get()
        dead.process.kill()
        dead.process.wait()
        workers._idle.put(dead)
        assert workers.compare("1/2", "0.5") == "equal"
    finally:
        workers.close()
    assert workers._idle.empty()


@needs_math_verify
@pytest.mark.parametrize(("end", "result"), [(signal.SIGSEGV, "failed"), (signal.SIGKILL, "equal")])
def test_crash_is_a_failure_and_an_outside_kill_is_retried(end, result):
    workers = math_worker.Workers(limit=1)
    try:
        assert workers.compare("1/2", "0.7") == "different"
        worker = workers._idle.get()
        worker.process.send_signal(signal.SIGSTOP)  # so that its end finds it at its comparison
        threading.Timer(0.5, lambda: [worker.process.send_signal(one) for one in (end, signal.SIGCONT)]).start()
        workers._idle.put(worker)
        assert workers.compare("1/2", "0.5") == result
        assert worker.process.returncode == -end
        assert workers.compare("1/2", "0.5") == "equal"
    finally:
        workers.close()


@needs_math_verify
def test_comparison_without_processor_time_is_undecided(monkeypatch):
    monkeypatch.setattr(math_worker, "WALL_SECONDS", 0.3)
    workers = math_worker.Workers(limit=1)
    monkeypatch.setattr(math_worker, "_WORKERS", workers)
    worker = math_worker.Worker()
    worker.process.send_signal(signal.SIGSTOP)
    workers._idle.put(worker)
    try:
        assert math_task.verify(r"\boxed{0.5}", "1/2") == Verdict(None, None, {"undecided": 1.0})
        assert worker.process.returncode is not None
    finally:
        workers.close()


@needs_math_verify
def test_comparisons_after_the_deadline_are_undecided():
    completions = [r"\boxed{0.5}", r"\boxed{1/2}", "no answer"]
    verdicts = math_task.reward(completions, ["1/2"] * 3, deadline=0.0)
    assert [verdict.reward for verdict in verdicts] == [None, 1.0, 0.0]
    assert verdicts[0].metrics == {"undecided": 1.0}


@needs_math_verify
def test_equal_answers_are_compared_once(monkeypatch):
    asked = []
    monkeypatch.setattr(
        math_worker._WORKERS, "compare", lambda gold, given, until: asked.append((gold, given)) or "equal"
    )
    verdicts = math_task.reward(completions=[r"\boxed{6/2}"] * 8 + [r"\boxed{3}"] * 8, answer=["3"] * 16)
    assert [verdict.reward for verdict in verdicts] == [1.0] * 16
    assert asked == [("3", "6/2")]


def test_missing_math_verify_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install math-verify"):
        math_task.verify(r"\boxed{7}", "7")


def test_task_import_does_not_import_math_verify(monkeypatch):
    real_import = builtins.__import__

    def refusing(name, *args, **kwargs):
        assert name.partition(".")[0] not in ("math_verify", "sympy"), name
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refusing)
    for module in (math_worker, math_task):
        importlib.reload(module)


@pytest.mark.parametrize("answer", [None, "", " ", 7])
def test_gold_answer_that_is_not_text_raises(answer):
    with pytest.raises(ValueError, match="A math answer must be a text"):
        math_task.verify(r"\boxed{7}", answer)


# ---- building ----


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
    ("solution", "answer"),
    [
        (r"We add one and one, so that the answer is \boxed 2.", "2"),
        (r"We add: $\boxed 2$, as $1 + 1$ is.", "2"),
        (r"We add: \(x = \boxed 2\).", "2"),
        (r"Half: $\boxed\frac12$.", r"\frac12"),
        (r"We add: $\boxed {2}$.", "2"),
        (r"We add: \fbox{3}? No, \fbox{2}.", "2"),
        (r"We add: \fbox{3}? No, \boxed{2}.", "2"),
        ("We add one and one, so that it is:\n#### 2", "2"),
        (r"\text{There is no number at all that would do it}", r"\text{There is no number at all that would do it}"),
        ("does not exist.", "does not exist."),
        (r"(-\infty, \sin 2) \cup [3, \infty)", r"(-\infty, \sin 2) \cup [3, \infty)"),
    ],
)
def test_answer_of_a_solution_is_its_last_marked_one(write_jsonl, solution, answer):
    assert math_task.build("train", write_jsonl([{"problem": "q", "solution": solution}]))["answer"] == [answer]


def test_field_names_and_system_turns_are_supported(write_jsonl):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    path = write_jsonl([{"turns": turns, "gold": "2", "answer": "other", "id": "x7"}])
    built = math_task.build("train", path, question_field="turns", answer_field="gold", instruction="")[0]
    assert (built["prompt"], built["answer"], built["id"]) == (turns, "2", "math-x7")


def test_folder_has_one_file_per_split(tmp_path, write_jsonl):
    write_jsonl([{"problem": "q", "answer": "1"}], "data/test.jsonl")
    write_jsonl([{"problem": "q", "answer": "1"}] * 2, "data/train.jsonl")
    assert len(math_task.build("train", tmp_path / "data")) == 2
    with pytest.raises(FileNotFoundError, match=r"0 files named validation.*test\.jsonl, train\.jsonl"):
        math_task.build("validation", tmp_path / "data")


def test_hub_layout_is_loaded_without_a_path(tmp_path, write_jsonl):
    write_jsonl([{"prompt": [{"role": "user", "content": "1+1?"}], "solution": "2"}], "hub/train.jsonl")
    assert math_task.build("train", hub=str(tmp_path / "hub"))["answer"] == ["2"]


MALFORMED = {
    "no question": ({"answer": "2"}, "problem"),
    "no answer": ({"problem": "q"}, "answer"),
    "question a number": ({"problem": 3, "answer": "2"}, "problem"),
    "blank question": ({"problem": " ", "answer": "2"}, "problem"),
    "messages that end with the assistant": (
        {"prompt": [{"role": "assistant", "content": "a"}], "answer": "2"},
        "prompt",
    ),
    "a message without content": ({"prompt": [{"role": "user"}], "answer": "2"}, "prompt"),
    "no messages": ({"prompt": [], "answer": "2"}, "prompt"),
    "a list of texts": ({"prompt": ["abc"], "answer": "2"}, "prompt"),
    "a list of numbers": ({"prompt": [1], "answer": "2"}, "prompt"),
    "messages of pairs": ({"prompt": [[["role", "user"], ["content", "x"]]], "answer": "2"}, "prompt"),
    "half a character": ({"problem": "q\ud800", "answer": "2"}, "problem"),
    "half a character in a message": ({"prompt": [{"role": "user", "content": "\udfff"}], "answer": "2"}, "prompt"),
    "half a character in the id": ({"problem": "q", "answer": "2", "id": "\ud800"}, "id"),
    "answer a list": ({"problem": "q", "answer": ["2"]}, "answer"),
    "answer true": ({"problem": "q", "answer": True}, "answer"),
    "blank answer": ({"problem": "q", "answer": ""}, "answer"),
    "answer not a number": ({"problem": "q", "answer": float("nan")}, "answer"),
    "empty box": ({"problem": "q", "solution": r"\boxed{}"}, "solution"),
    "a box that is not closed": ({"problem": "q", "solution": r"We add: \boxed{2"}, "solution"),
    "a box without braces that holds half a group": (
        {"problem": "q", "solution": r"\boxed \text{two of}"},
        "solution",
    ),
    "a worked solution in one sentence": ({"problem": "q", "solution": "We add one and one."}, "solution"),
    "a worked solution of many words": (
        {"problem": "q", "solution": "First we add one to one and find two"},
        "solution",
    ),
    "a worked solution of many formulas": ({"problem": "q", "solution": "1 + 1 = " * 50 + "2"}, "solution"),
    "a worked solution of two lines": ({"problem": "q", "solution": "1 + 1\n= 2"}, "solution"),
    "a worked solution without a final answer": ({"problem": "q", "solution": "First.\n\nThen."}, "solution"),
}


@pytest.mark.parametrize(("row", "field"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_row_raises_with_file_row_and_field(write_jsonl, row, field):
    path = write_jsonl([{"problem": "q", "answer": "1"}, row], "math.jsonl")
    with pytest.raises(RowError, match=r"math\.jsonl, row 2, field ") as caught:
        math_task.build("train", path)
    assert caught.value.field == field
    assert len(math_task.build("train", path, on_malformed="drop")) == 1
