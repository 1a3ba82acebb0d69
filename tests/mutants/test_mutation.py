"""Operators of mutants that cosmic-ray lacks, the choice of mutants, and of the tests that decide one."""

import mutation
import operators
import pytest
from cosmic_ray.mutating import mutate_code

EXAMPLES = [(name, example) for name, operator in operators.OPERATORS.items() for example in operator.examples()]


@pytest.mark.parametrize(
    ("name", "example"), EXAMPLES, ids=lambda value: str(getattr(value, "post_mutation_code", value))
)
def test_operator_changes_its_examples(name, example):
    operator = operators.OPERATORS[name]()
    mutated = mutate_code(example.pre_mutation_code, operator, example.occurrence)
    assert mutated == example.post_mutation_code


@pytest.mark.parametrize("code", mutation.PLAN["unchanged"])
def test_code_without_behaviour_has_no_mutants(code):
    assert list(mutation.candidates("module.py", code)) == []


def test_tests_of_a_mutant_execute_its_statement():
    source = "def f(x):\n    return [\n        y + 1\n        for y in x\n    ]\n\n\nSIZE = 1\n"
    fast, slow, user = "tests/test_objective.py::fast", "tests/test_objective.py::slow", "tests/other.py::a"
    lines = {2: {slow, user, "failed"}, 8: {""}}
    measured = mutation.Measured({slow: 9.0, fast: 1.0, user: 0.1}, {"objective.py": lines})
    tests = {line: mutation.chosen_tests(measured, "objective.py", source, line) for line in (1, 3, 6, 8)}
    assert tests == {1: [slow, user], 3: [slow, user], 6: [], 8: [fast, slow]}


@pytest.mark.parametrize(
    ("mutated", "changes"),
    [
        ("X = 1\nclass A:\n    b: int = 2\n    def f(self, x=3):\n        return 5\n", ["f"]),
        ("X = 2\nclass A:\n    b: int = 2\n    def f(self, x=3):\n        return 4\n", None),
        ("X = 1\nclass A:\n    b: int = 3\n    def f(self, x=3):\n        return 4\n", None),
        ("X = 1\nclass A:\n    b: int = 2\n    def f(self, x=4):\n        return 4\n", None),
    ],
    ids="function constant field default".split(),
)
def test_mutants_of_functions_need_no_import(mutated, changes):
    source = "X = 1\nclass A:\n    b: int = 2\n    def f(self, x=3):\n        return 4\n"
    codes = mutation.changed_functions(source, mutated)
    assert (None if codes is None else [new.co_name for _, new in codes]) == changes
