"""What reading the code costs: vague names, dense statements, nested expressions and unnamed tuples."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_architecture import CORE_PARTS, PACKAGE, ROOT, TABLES, functions, part, report, sources

LIMITS = TABLES["readability"]
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.Raise, ast.Assert, ast.Delete)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NOT_COUNTED = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)


class WithoutAnnotations(ast.NodeTransformer):
    """Removes annotations, which cost little to read."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Simple statements and the heads of compound ones, without docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, SIMPLE):
            yield node
        elif isinstance(node, ast.If | ast.While):
            yield node.test
        elif isinstance(node, ast.For):
            yield node.iter
        elif isinstance(node, ast.With):
            yield from (item.context_expr for item in node.items)


def size(node: ast.AST) -> int:
    return sum(not isinstance(child, NOT_COUNTED) for child in ast.walk(node))


def measures(texts: list[str]) -> dict[str, float]:
    """Nodes per statement, and what stands how often in 1,000 statements, of modules together."""
    trees = [WithoutAnnotations().visit(ast.parse(text)) for text in texts]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    sizes = sorted(size(statement) for tree in trees for statement in statements(tree))
    per_thousand = 1000 / max(len(sizes), 1)
    arguments = [argument for node in nodes if isinstance(node, ast.Call) for argument in node.args]
    return {
        "mean": sum(sizes) / max(len(sizes), 1),
        "p90": sizes[int(0.9 * (len(sizes) - 1))] if sizes else 0,
        "comprehensions": per_thousand * sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        "conditional expressions": per_thousand * sum(isinstance(node, ast.IfExp) for node in nodes),
        "star-arguments": per_thousand * sum(isinstance(argument, ast.Starred) for argument in arguments),
    }


def files_of(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def is_core(path: Path) -> bool:
    return part(path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")) in CORE_PARTS


CORE = [path for path in files_of("src/credit_trl") if is_core(path)]
GROUPS = {str(path.relative_to(PACKAGE)): [path] for path in CORE}
GROUPS["outside the core"] = [path for path in files_of("src/credit_trl") if not is_core(path)]


@pytest.mark.parametrize("group", GROUPS)
def test_statements_are_short_and_plain(group):
    values = measures([path.read_text("utf-8") for path in GROUPS[group]])
    limits = LIMITS.get(group, LIMITS["core"])
    report(
        f"{group}: {name} {values[name]:.1f}, over {limit}" for name, limit in limits.items() if values[name] > limit
    )


def test_measures_count_a_dense_statement():
    dense = "def f(x: list[int]) -> int:\n    return g(*[a if a else b for a in x])\n"
    values = measures([dense])
    assert list(values.values()) == [12.0, 12, 1000.0, 1000.0, 1000.0]


def bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.mark.parametrize("folder", ["src", "tests", "examples"])
def test_names_say_what_they_hold(folder):
    names = [name for path in files_of(folder) for name in bound_names(ast.parse(path.read_text("utf-8")))]
    vague = set(LIMITS["vague names"].split())
    share = sum(name in vague for name in names) / len(names)
    assert share <= LIMITS["share of vague names"][folder]


def nested(tree: ast.AST, kinds: type | tuple[type, ...]) -> Iterator[int]:
    """Lines of expressions of a kind that hold another of it."""
    for node in ast.walk(tree):
        if isinstance(node, kinds) and sum(isinstance(child, kinds) for child in ast.walk(node)) > 1:
            yield node.lineno


@pytest.mark.parametrize("kinds", [COMPREHENSIONS, ast.IfExp], ids=["comprehension", "conditional expression"])
def test_no_expression_holds_another_of_its_kind(kinds):
    report(f"credit_trl.{module}:{line}" for module, tree in sources().items() for line in nested(tree, kinds))


def returned_tuples(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Lines that return a tuple of three or more, without those of functions inside."""
    waiting = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            is_joined = any(isinstance(element, ast.Starred) for element in node.value.elts)
            if len(node.value.elts) >= 3 and not is_joined:
                yield node.lineno
        waiting += ast.iter_child_nodes(node)


def test_public_functions_return_no_unnamed_tuple_of_three():
    report(
        f"credit_trl.{module}:{line} {function.name}"
        for module, tree in sources().items()
        for function in functions(tree)
        if not function.name.startswith("_")
        for line in returned_tuples(function)
    )
