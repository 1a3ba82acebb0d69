"""Layout, import rules, function sizes, names and words of the package, read from its source."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from trl import GRPOConfig, GRPOTrainer

from credit_trl import CreditConfig, CreditTrainer
from tables import tables_of

TABLES = tables_of(__file__)

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "credit_trl"

FOLDERS = {*"quickstart_model rollout contexts teacher loss training tasks sandbox evaluation lab cli".split()}
STAGELESS = {"mistakes", "run_directory", "trl_compat", "trl_parity"}
TOP_MODULES = {"trainer", "config", "objective", "testing", *STAGELESS}
MAX_PARAMETERS = 8
MAX_LINES = 60

CORE_PARTS = ("trainer", "config", "objective", "rollout", "contexts", "teacher", "loss", "training")
MAX_OPTIONS = 34  # of `CreditConfig` beyond `GRPOConfig`
MAX_PROSE_BYTES = 190_000  # Markdown of the root, docs, examples and skills
MAX_FINDINGS = 1300  # words, with those of tables
MAX_PACKED_ASSIGNMENTS = 60
MAX_WALRUSES = 30
MAX_OVERRIDES = 18  # of methods of TRL's trainer
MIN_READERS = 3  # functions that name a dataclass of the stages

STAGES = ("rollout", "contexts", "teacher", "loss")
MAY_IMPORT = {name: set(targets) for name, targets in TABLES["may_import"].items()}


@cache
def sources() -> dict[str, ast.Module]:
    """Module name without `credit_trl.` -> its syntax tree; `__init__` is the package itself."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return trees


def resolve(dotted: str) -> str | None:
    """The module of the package that a dotted name lies in, or None for other packages."""
    parts = dotted.split(".")
    if parts[0] != "credit_trl":
        return None
    for end in range(len(parts), 1, -1):
        if (name := ".".join(parts[1:end])) in sources():
            return name
    return "__init__"


def imported(module: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(module of the package, line) of each import, deferred and lazy ones included.

    A string that is the dotted name of a module counts, as `importlib`, tables of lazy exports and names of resources
    use them.
    """
    package = module if (PACKAGE / Path(*module.split("."))).is_dir() else module.rpartition(".")[0]
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ["credit_trl", *filter(None, package.split("."))]
                base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [base])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_module = node.value.startswith("credit_trl.") and node.value.removeprefix("credit_trl.") in sources()
            names = [node.value] if is_module else []
        for name in names:
            if (target := resolve(name)) is not None:
                yield target, node.lineno


@cache
def imports() -> dict[str, dict[str, int]]:
    """Module -> imported modules of the package, each with the first line that imports it."""
    targets_of: dict[str, dict[str, int]] = {}
    for module, tree in sources().items():
        targets_of[module] = {}
        for target, line in imported(module, tree):
            if target != module:
                targets_of[module].setdefault(target, line)
    return targets_of


def test_deferred_lazy_and_relative_imports_are_found():
    tree = ast.parse(TABLES["imports"])
    targets = [target for target, _ in imported("rollout.batch", tree)]
    assert sorted(targets) == ["lab", "loss.head", "rollout.verdict", "trainer", "training.checks"]


def part(module: str) -> str:
    return module.split(".")[0]


def is_allowed(module: str, target: str) -> bool:
    allowed = MAY_IMPORT.get(part(module), set())
    return part(target) == part(module) or part(target) in allowed or target in allowed


def report(problems: Iterable[str]) -> None:
    """Fail with one problem a line."""
    if lines := list(problems):
        pytest.fail(f"{len(lines)} problems:\n" + "\n".join(lines), pytrace=False)


def test_folders_are_those_of_the_layout():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders == FOLDERS


def test_modules_at_the_top_are_those_of_the_layout():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert modules == TOP_MODULES


@pytest.mark.parametrize("part_name", TABLES["node_budgets"])
def test_syntax_nodes_are_within_the_budget(part_name):
    globs, budget = TABLES["node_budgets"][part_name]
    files = {path for glob in globs for path in ROOT.glob(glob)}
    trees = [ast.parse(path.read_text("utf-8")) for path in files]
    assert sum(len(list(ast.walk(tree))) for tree in trees) <= budget


def test_options_are_within_the_budget():
    added = {option.name for option in fields(CreditConfig)} - {option.name for option in fields(GRPOConfig)}
    assert len(added) <= MAX_OPTIONS, sorted(added)


def test_documentation_is_within_the_budget():
    folders = (ROOT / "docs", ROOT / "examples", ROOT / "skills")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    assert sum(page.stat().st_size for page in pages) <= MAX_PROSE_BYTES
    assert [page for page in pages if re.search(r"^(<{7}|>{7}) ", page.read_text("utf-8"), re.MULTILINE)] == []


def test_findings_are_short_and_their_intervals_stand_in_no_parentheses():
    text = (ROOT / "docs" / "findings.md").read_text("utf-8")
    assert len(text.split()) <= MAX_FINDINGS
    assert re.findall(r"\([^()\]]*\[[−\d][^\]]*\][^()]*\)", text) == []


def test_assignments_have_one_value_a_line():
    nodes = [node for tree in sources().values() for node in ast.walk(tree)]
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    packed = [a for a in assigned if isinstance(a.targets[0], ast.Tuple) and isinstance(a.value, ast.Tuple)]
    assert len(packed) <= MAX_PACKED_ASSIGNMENTS
    assert sum(isinstance(node, ast.NamedExpr) for node in nodes) <= MAX_WALRUSES


def dataclasses_of(tree: ast.Module) -> Iterator[str]:
    """Names of the dataclasses of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            decorators = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
            if decorators & {"dataclass", "dataclasses.dataclass"}:
                yield node.name


def test_dataclasses_of_the_stages_have_several_readers():
    readers = defaultdict(set)
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for name in {part for child in ast.walk(node) for part in words_of(child)}:
                    readers[name].add(f"{module}:{node.name}")
    report(
        f"{name} of credit_trl.{module} has {len(readers[name])} readers, fewer than {MIN_READERS}"
        for module, tree in sources().items()
        if part(module) in (*STAGES, "training")
        for name in dataclasses_of(tree)
        if len(readers[name]) < MIN_READERS
    )


def words_of(node: ast.AST) -> list[str]:
    """Identifiers of a node; those of a quoted annotation too."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"\w+", node.value) if len(node.value) < 80 else []
    return []


def test_contrastive_coef_has_at_most_three_holders():
    """λ goes from the configuration to `objective.credit_target` through few hands."""
    holders = [
        f"{module}:{node.name}"
        for module, tree in sources().items()
        if part(module) in CORE_PARTS
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "contrastive_coef"
    ]
    assert len(holders) <= 3, holders


def test_one_class_lies_between_the_trainer_and_trl():
    chain = CreditTrainer.__mro__[: CreditTrainer.__mro__.index(GRPOTrainer)]
    assert len(chain) <= 2
    method_names = [{name for name, value in vars(cls).items() if callable(value)} for cls in chain]
    twice = set.intersection(*method_names) - {"__init__"} if len(method_names) > 1 else set()
    assert not {name for name in twice if hasattr(GRPOTrainer, name)}
    overridden = {name for name in set.union(*method_names) if hasattr(GRPOTrainer, name)} - {"__init__"}
    assert len(overridden) < MAX_OVERRIDES, sorted(overridden)


def test_each_part_imports_only_what_it_may():
    report(
        f"credit_trl.{module}:{line} imports {target}; `{part(module)}` may import only "
        f"{', '.join(sorted(MAY_IMPORT.get(part(module), set()))) or 'nothing of the package'}"
        for module, targets in imports().items()
        for target, line in targets.items()
        if not is_allowed(module, target)
    )


def test_no_module_imports_testing():
    report(f"credit_trl.{module} imports testing" for module, targets in imports().items() if "testing" in targets)


def test_core_does_not_reach_tasks_through_other_modules():
    """The trainer does, by the token maps of its callbacks."""
    report(
        f"credit_trl.{module} reaches {', '.join(sorted(reached))}"
        for module in sources()
        if part(module) in set(CORE_PARTS) - {"trainer"}
        and (reached := {m for m in reachable(module) if part(m) == "tasks"})
    )


def reachable(module: str) -> set[str]:
    """Modules that importing this one may load, itself excluded unless it lies on a circle."""
    seen: set[str] = set()
    waiting = [*imports()[module]]
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += imports()[name]
    return seen


def test_no_import_circles_deferred_imports_included():
    circles = set()
    for module in sources():
        if module in (reached := reachable(module)):
            circles.add(tuple(sorted(member for member in reached if module in reachable(member))))
    report(" <-> ".join(circle) for circle in sorted(circles))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, nested ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    stars = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) + stars


def sizes(measure) -> Iterator[tuple[str, int, int]]:
    """("module:function", line, measured) of each function."""
    for module, tree in sources().items():
        for function in functions(tree):
            yield f"{module}:{function.name}", function.lineno, measure(function)


def line_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return function.end_lineno - function.lineno + 1


@pytest.mark.parametrize(
    ("measure", "limit"), [(parameter_count, MAX_PARAMETERS), (line_count, MAX_LINES)], ids=["parameters", "lines"]
)
def test_functions_are_within_the_limits(measure, limit):
    report(
        f"credit_trl.{name} (line {line}) has {value}, over {limit}"
        for name, line, value in sizes(measure)
        if value > limit
    )


def public_names(tree: ast.Module) -> Iterator[str]:
    """Names of the classes, functions and constants that a module defines at its top level."""
    for node in tree.body:
        names = []
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        yield from (name for name in names if not name.startswith("_"))


def test_a_public_name_is_defined_in_one_module():
    owners = defaultdict(list)
    for module, tree in sources().items():
        for name in dict.fromkeys(public_names(tree)):
            owners[name].append(module)
    report(
        f"{name} is defined in {', '.join(modules)}"
        for name, modules in sorted(owners.items())
        if len(modules) > 1 and name not in TABLES["shared_names"]
    )


def prose_files() -> list[Path]:
    suffixes = {".py", ".md", ".jinja", ".js", ".html"}
    paths = [path for folder in (PACKAGE, ROOT / "docs") for path in folder.rglob("*") if path.suffix in suffixes]
    return sorted([*paths, ROOT / "README.md"])


def test_source_and_docs_use_the_words_of_the_glossary():
    problems = []
    for path in prose_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            checked_text = re.sub("|".join(TABLES["allowed_words"]), "", line, flags=re.IGNORECASE)
            for pattern, use in TABLES["replaced_words"].items():
                if match := re.search(pattern, checked_text, flags=re.IGNORECASE):
                    problems.append(f"{path.relative_to(ROOT)}:{number}: {match[0]!r}, use: {use}")
    report(problems)
