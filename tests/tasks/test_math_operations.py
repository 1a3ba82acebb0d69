from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.tasks.math_operations import finished_part, moduli, operations, without_moduli

OPERATIONS = {  # text: names
    r"\int_0^1 x\,dx": {"int"},
    r"\iint x\,dA": {"int"},
    r"\sum_{i=1}^3 i": {"sum"},
    r"\prod_{i=1}^3 i": {"prod"},
    r"\lim_{x\to 0} x": {"lim"},
    r"\det A + \operatorname{tr} A": {"det", "tr"},
    r"\begin{vmatrix}1\end{vmatrix}": {"det"},
    r"\operatorname{trace}(A)": {"tr"},
    r"\operatorname {rank }A + \operatorname{SVD}(A)": {"rank", "SVD"},
    r"\|v\| + \lVert v\rVert": {"norm"},
    r"\Vertical \text{rank} rank trace": set(),
    r"\gcd(10,15)": {"gcd"},
    r"\operatorname{lcm}(10,15)": {"lcm"},
    r"\operatorname*{max}(3,5)": {"max"},
    r"\frac{d}{dx}x^2": {"d"},
    r"\dfrac{d}{dx}x^2": {"d"},
    r"\frac d{dx}x^2": {"d"},
    r"\frac{\mathrm{d}}{\mathrm{d}x}x^2": {"d"},
    r"\frac{\mathrm d}{\mathrm d x}x^2": {"d"},
    r"\frac{\partial}{\partial x}x^2": {"d"},
    r"\tfrac{d (x^{2})}{dx}": {"d"},
    r"\frac{d^2 y}{d\theta^{2}}": {"d"},
    r"\cfrac{d}{dx}(x^3)": {"d"},
    "d/dx (x^3)": {"d"},
    "d^2/dx x^3": {"d"},
    r"7^{100} \mod 13": {"mod"},
    r"7^{100} \bmod{13}": {"mod"},
    r"7^{100} \pmod{13}": {"mod"},
    r"\operatorname{mod}(7^{100}, 13)": {"mod"},
    r"\sup_{x<3} x": {"sup"},
    r"[0, \infty)": set(),
    "d/2 + bd/dx_1": set(),
    r"\frac{1}{2}": set(),
    r"\frac{d}{2}": set(),
    r"\frac{d}{d+1}": set(),
    r"\frac{d}{d_1}": set(),
    r"\frac{d-1}{dx}": set(),
    r"\limits \text{max} \maximum \triangle \interior": set(),
    "": set(),
}


@pytest.mark.parametrize(("text", "names"), OPERATIONS.items())
def test_operations_are_found_by_name(text, names):
    assert operations(text) == names


@pytest.mark.parametrize(
    ("gold", "answer", "part"),
    [
        ("1", "1", "1"),
        ("1", "x = 1", "x = 1"),
        ("1", r"\int f", None),
        ("1", r"x = \int f", None),
        ("1", r"\int f = 1", " 1"),
        ("1", r"\int f = \sum g = 1", " 1"),
        ("1", r"\int f \approx 1", " 1"),
        ("1", r"\int f = \int g", None),
        ("1", r"\int f =", None),
        ("1", r"\sum_{i=1}^3 i", None),
        ("1", r"f(\sum_{i=1}, n=1)", None),
        ("1", r"\{\int f, x=1\}", None),
        (r"\int g", r"\int f", r"\int f"),
        (r"\int g", r"\int\sum f", None),
        ("3", r"x \equiv 3 \pmod{7}", r"x \equiv 3 \pmod{7}"),
        ("3", r"x \equiv 3 \mod 7", r"x \equiv 3 \mod 7"),
        ("3", r"10 \mod 7", None),
        ("3", r"10 \bmod 7 \equiv 3", None),
        ("3", r"x \equiv 10 \mod (7)", None),
        ("3", r"10 \bmod 7 = 3", " 3"),
        (r"n \mod 2", r"n \bmod 2", r"n \bmod 2"),
    ],
)
def test_finished_part_is_the_value_of_an_operation(gold, answer, part):
    assert finished_part(gold, answer) == part


@pytest.mark.parametrize(
    ("text", "found", "rest"),
    [
        (r"x \equiv 3 \pmod{7}", {"7"}, r"x \equiv 3"),
        (r"x \equiv 3\pmod 7", {"7"}, r"x \equiv 3"),
        (r"x \equiv 3 \bmod 7, 5", {"7"}, r"x \equiv 3, 5"),
        (r"x \equiv 3 (mod n)", {"n"}, r"x \equiv 3"),
        (r"x \equiv 3\,(\mathrm{mod}\ 7)", {"7"}, r"x \equiv 3"),
        (r"x \equiv 3 \pmod{2^{k} + 1}", {"2^{k}+1"}, r"x \equiv 3"),
        (r"1 \pmod{3}, 2 \pmod{5}", {"3", "5"}, "1, 2"),
        (r"10 \mod 7", {"7"}, r"10 \mod 7"),
        (r"x \equiv \pi \mod 2\pi", set(), r"x \equiv \pi \mod 2\pi"),
        (r"\modulus 7 + model 3", set(), r"\modulus 7 + model 3"),
    ],
)
def test_moduli_of_congruences_are_found_and_removed(text, found, rest):
    assert moduli(text) == found
    assert without_moduli(text) == rest


@given(answer=st.text(alphabet=r"\{}()[]=d12x^ ", max_size=40) | st.text())
def test_answer_without_operations_is_whole(answer):
    assert operations(answer) or finished_part("1", answer) == answer


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece",
    [r"\frac{d", r"\frac{d{}", "{", r"\frac{d ", " ", r"\frac{d}{d", r"\int=", r"\pmod{", r"\pmod{{a}", "mod 1"],
)
def test_hostile_repetitions_finish_in_time(piece):
    finished_part("1", piece * 20_000)
    finished_part("1", r"\frac{d" + piece * 20_000)
