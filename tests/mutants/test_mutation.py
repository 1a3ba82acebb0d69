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
    source = "def f(x):\n    return [\n        y + 1\n        for y in x\n    ]\n"
    seconds = {"tests/test_objective.py::slow": 9.0, "tests/test_objective.py::fast": 1.0, "tests/other.py::a": 0.1}
    lines = {"objective.py": {2: ["tests/test_objective.py::slow", "tests/other.py::a"]}}
    measured = mutation.Measured(seconds, lines, [])
    assert mutation.statement_lines(source, 3) == range(2, 6)
    assert mutation.chosen_tests(measured, "objective.py", source, 3) == ["tests/test_objective.py::slow"]
    everything = ["tests/test_objective.py::fast", "tests/test_objective.py::slow"]
    assert mutation.chosen_tests(measured, "objective.py", source, 1) == everything
