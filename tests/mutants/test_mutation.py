"""Operators of mutants that cosmic-ray lacks, the choice of mutants, and of the tests that decide one."""

import mutation
import operators
import pytest
from cosmic_ray.mutating import mutate_code


@pytest.mark.parametrize(("name", "before", "after", "occurrence"), mutation.PLAN["examples"])
def test_operator_changes_its_examples(name, before, after, occurrence):
    assert mutate_code(before, operators.OPERATORS[name](), occurrence) == after


def test_messages_have_no_mutants():
    source = "def f(a):\n    logger.warning(a + 1)\n    raise ValueError(f'{a + 1}', a + 1)\n"
    assert [spec.operator_name for spec in mutation.candidates("module.py", source)] == ["RemoveStatement"]


def test_tests_of_a_mutant_execute_its_statement():
    source = "def f(x):\n    return [\n        y + 1\n        for y in x\n    ]\n"
    fast, slow, user = "tests/test_objective.py::fast", "tests/test_objective.py::slow", "tests/other.py::a"
    measured = mutation.Measured({slow: 9.0, fast: 1.0, user: 0.1}, {"objective.py": {2: {slow, user, fast}}})
    for line, seconds, tests in ((1, 20, []), (3, 20, [fast, slow, user]), (3, 5, [fast])):
        assert mutation.chosen_tests(measured, "objective.py", source, line, seconds) == tests


@pytest.mark.parametrize("change", ["return 4", "X = 1", "b: int = 2", "x=3", "class"])
def test_mutants_change_functions_alone(change):
    source = "X = 1\nclass A:\n    b: int = 2\n    def f(self, x=3):\n        return 4\n"
    changes = mutation.changed_functions(source, source.replace(change, f"{change}0"))
    assert [new.co_name for _, new in changes] == ["f"] * (change == "return 4")


def test_the_table_counts_the_mutants_of_the_plan():
    counts = {}
    for line in mutation.TABLE.read_text("utf-8").splitlines():
        if line.endswith(" |") and line[-3].isdigit():
            module, *cells = line.strip("|").split("|")
            counts[module.strip()] = [int(cell) for cell in cells]
    tried, killed, equivalent, _ = total = counts.pop("total")
    assert [sum(column) for column in zip(*counts.values(), strict=True)] == total
    assert {module: row[2] for module, row in counts.items()} == {
        module: sum(row["module"] == module for row in mutation.PLAN["equivalent"])
        for module in mutation.PLAN["modules"]
    }
    assert tried >= 400
    assert killed >= mutation.REQUIRED_SHARE * (tried - equivalent)
