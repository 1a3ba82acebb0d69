"""Change the core of the package, one mutant at a time, and run the tests that mirror the changed module.

    python tests/mutants/mutation.py                      # go on where the last call stopped, and write table.csv
    python tests/mutants/mutation.py --again survived     # decide the survivors once more, with the tests of today
    python tests/mutants/mutation.py --list survived      # the differences of the survivors

The checkout stays as it is: mutants live in a copy in `--folder`. The copy of `src` is that of the first call, so
`--new` starts again with the present sources. A child process is forked for each mutant from a parent that has
imported torch and TRL, and nothing of this package.
"""

import argparse
import ast
import contextlib
import csv
import hashlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import coverage
import pytest
import yaml
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
from operators import OPERATORS
from parso.tree import NodeOrLeaf, search_ancestor

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/credit_trl")
PLAN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("plan.yaml").read_text("utf-8"))
TABLE = Path(__file__).with_name("table.csv")
# The limit ends mutants that hang; a busy machine stays below it.
LIMIT_SECONDS = 60.0
LIMIT_RATIO = 10.0
MEASURE_SECONDS = 7200.0
TESTS_SECONDS = 60.0  # of the unchanged copy, of the tests of one mutant
REQUIRED_SHARE = 0.95
# Code without behaviour: annotations, decorators, and messages of errors and logs.
IGNORED_ANCESTORS = ("annassign", "tfpdef", "decorator", "fstring", "import_from", "import_name", "raise_stmt")
IGNORED_CALLS = ("logger.", "warnings.")


@dataclass(frozen=True)
class Measured:
    """What the tests of the unchanged copy execute."""

    seconds: dict[str, float]
    """Node id of a passed test -> its duration."""
    lines: dict[str, dict[int, list[str]]]
    """Module -> line -> tests that execute it."""
    imported: list[str]
    """Modules of libraries that the tests import."""


@dataclass(eq=False)
class Recorder:
    """Pytest plugin that measures each test: its duration, and the lines that it executes."""

    trace: coverage.Coverage
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.trace.switch_context(item.nodeid)
        start = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - start
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)


@dataclass(eq=False)
class Selection:
    """Pytest plugin that runs chosen tests in their order, and writes the first failure to a file."""

    tests: Sequence[str]
    failure: Path

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[test] for test in self.tests if test in by_id]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failure.write_text(report.nodeid, "utf-8")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failure.write_text("import", "utf-8")


def copy_tree(tree: Path) -> None:
    """Copy the files of the checkout; `src` only where the copy has none."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    has_sources = (tree / "src").exists()
    for name in filter(None, names):
        source = ROOT / name
        target = tree / name
        if source.is_file() and not (has_sources and name.startswith("src/")):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def in_child(tree: Path, log: Path, limit: float, run: Callable[[], int]) -> int | None:
    """Exit code of a function in a forked child that imports the package of the copy; None beyond the limit."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path[:0] = [str(tree / "src"), str(tree / "tests")]
        os.environ["PYTHONPATH"] = str(tree / "src")
        code = 3
        try:
            code = run()
        finally:
            os._exit(code)
    deadline = time.monotonic() + limit
    status = None
    while status is None and time.monotonic() < deadline:
        waited, code = os.waitpid(child, os.WNOHANG)
        if waited:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def pytest_arguments(files: Sequence[str], temporary: Path) -> list[str]:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--basetemp", str(temporary)]
    return [*options, *files]


def measure(folder: Path) -> Measured:
    """Run all tests of the plan on the unchanged copy, with coverage by test; stored until a test file changes."""
    tree = folder / "tree"
    tests = sorted({test for row in PLAN["modules"].values() for test in row})
    digest = hashlib.sha256()
    for path in sorted((tree / "tests").rglob("*.py")):
        digest.update(path.read_bytes())
    store = folder / f"measured-{digest.hexdigest()[:16]}.json"
    if not store.is_file():
        print("measuring the tests of the unchanged copy", flush=True)
        log = folder / "measure.log"
        code = in_child(tree, log, MEASURE_SECONDS, lambda: _measure(tree, tests, store, folder / "temporary"))
        if code != 0:
            raise RuntimeError(f"The tests of the unchanged copy did not run, see {log}.")
    stored = json.loads(store.read_text("utf-8"))
    lines = {module: {int(line): ids for line, ids in by_line.items()} for module, by_line in stored["lines"].items()}
    return Measured(stored["seconds"], lines, stored["imported"])


def _measure(tree: Path, tests: Sequence[str], store: Path, temporary: Path) -> int:
    trace = coverage.Coverage(data_file=None, include=[str(tree / PACKAGE / "*")], config_file=False)
    recorder = Recorder(trace)
    trace.start()
    code = pytest.main(pytest_arguments(tests, temporary), plugins=[recorder])
    trace.stop()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    lines = {}
    for module in PLAN["modules"]:
        by_line = trace.get_data().contexts_by_lineno(str(tree / PACKAGE / module))
        lines[module] = {line: sorted({*ids} - recorder.failed - {""}) for line, ids in by_line.items()}
    seconds = {test: value for test, value in recorder.seconds.items() if test not in recorder.failed}
    libraries = [
        name
        for name, module in sys.modules.items()
        if "site-packages" in (getattr(module, "__file__", None) or "") and name.split(".")[0] in PLAN["preloaded"]
    ]
    store.write_text(json.dumps({"seconds": seconds, "lines": lines, "imported": libraries}), "utf-8")
    return 0


def candidates(module: str, source: str) -> Iterator[MutationSpec]:
    """Mutants of a module, those of code without behaviour excluded."""
    provider = OperatorProvider()
    operators = {name: provider[name] for name in PLAN["operators"]} | OPERATORS
    tree = get_ast(source)
    for name, operator in operators.items():
        occurrence = -1
        for node in ast_nodes(tree):
            for start, end in operator().mutation_positions(node):
                occurrence += 1
                if not _has_no_behaviour(node):
                    yield MutationSpec(module, name, occurrence, start, end)


def _has_no_behaviour(node: NodeOrLeaf) -> bool:
    if node.type not in IGNORED_ANCESTORS and search_ancestor(node, *IGNORED_ANCESTORS) is not None:
        return True
    ancestor = node
    while ancestor is not None and ancestor.type not in ("suite", "file_input"):
        # A return annotation is a child of the function.
        if ancestor.parent is not None and ancestor.parent.type == "funcdef" and ancestor.type != "suite":
            return ancestor.type != "parameters"
        if ancestor.get_code().strip().startswith(IGNORED_CALLS):
            return True
        ancestor = ancestor.parent
    return False


def sample(tree: Path, count: int, seed: int) -> list[WorkItem]:
    """Mutants that are spread evenly over the modules, at most two on a line."""
    items = []
    modules = list(PLAN["modules"])
    for index, module in enumerate(modules):
        quota = (count - len(items)) // (len(modules) - index)
        source = (tree / PACKAGE / module).read_text("utf-8")
        specs = list(candidates(module, source))
        random.Random(f"{seed} {module}").shuffle(specs)
        on_line: Counter[int] = Counter()
        for spec in specs:
            line = spec.start_pos[0]
            if quota and on_line[line] < 2:
                on_line[line] += 1
                quota -= 1
                items.append(WorkItem.single(uuid.UUID(int=len(items)).hex, spec))
    return items


def _mutated(source: str, spec: MutationSpec) -> str | None:
    """Source of a mutant; None where it equals the source or is no Python."""
    provider = OperatorProvider()
    operator = OPERATORS.get(spec.operator_name) or provider[spec.operator_name]
    mutated = mutate_code(source, operator(), spec.occurrence)
    try:
        is_equal = mutated is None or ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return None
    return None if is_equal else mutated


def statement_lines(source: str, line: int) -> range:
    """Lines of the innermost statement with a line; of a compound statement those of its head."""
    lines = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
            if node.lineno <= line <= end:
                lines = range(node.lineno, end + 1)
    return lines


def chosen_tests(measured: Measured, module: str, source: str, line: int) -> list[str]:
    """Tests of a mutant: those of the plan that execute its statement, or all of them, the fastest first."""
    files = tuple(PLAN["modules"][module])
    in_plan = [test for test in measured.seconds if test.startswith(files)]
    executing = {test for number in statement_lines(source, line) for test in measured.lines[module].get(number, ())}
    tests = sorted(executing.intersection(in_plan) or in_plan, key=lambda test: measured.seconds[test])
    total = 0.0
    selected = []
    for test in tests:
        total += measured.seconds[test]
        if total <= TESTS_SECONDS or not selected:
            selected.append(test)
    return selected


def decide(folder: Path, measured: Measured, spec: MutationSpec) -> WorkResult:
    """Run the tests of one mutant in the copy."""
    module = str(spec.module_path)
    path = folder / "tree" / PACKAGE / module
    source = path.read_text("utf-8")
    mutated = _mutated(source, spec)
    if mutated is None:
        return WorkResult(WorkerOutcome.NO_TEST, "", TestOutcome.INCOMPETENT, "")
    tests = chosen_tests(measured, module, source, spec.start_pos[0])
    failure = folder / "failure"
    failure.unlink(missing_ok=True)
    limit = LIMIT_SECONDS + LIMIT_RATIO * sum(measured.seconds[test] for test in tests)
    files = sorted({test.partition("::")[0] for test in tests})
    selection = Selection(tests, failure)
    arguments = [*pytest_arguments(files, folder / "temporary"), "-x"]
    # A mutant of the same size in the same second would be taken from the cache.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    path.write_text(mutated, "utf-8")
    try:
        code = in_child(
            folder / "tree", folder / "mutant.log", limit, lambda: int(pytest.main(arguments, plugins=[selection]))
        )
    finally:
        path.write_text(source, "utf-8")
    outcome = TestOutcome.SURVIVED if code in (0, 5) else TestOutcome.KILLED
    test = failure.read_text("utf-8") if failure.is_file() else "time limit" if code is None else f"exit {code}"
    difference = unified_diff(source.splitlines(), mutated.splitlines(), lineterm="", n=1)
    return WorkResult(WorkerOutcome.NORMAL, test, outcome, "\n".join(list(difference)[2:]))


def preload(modules: Sequence[str]) -> None:
    """Import libraries, of which children get copies; no thread may run when a child is forked."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module that imports only in its place
            print(f"{name} is not preloaded: {error}", flush=True)
    if threading.active_count() > 1:
        raise RuntimeError(f"The libraries started threads: {threading.enumerate()}. Remove one from `preloaded`.")


def mutated_line(diff: str) -> str:
    """Code of a mutant: its changed lines, or what it removes."""
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    removed = [line[1:].strip() for line in diff.splitlines() if line.startswith("-")]
    return " ".join(filter(None, added)) or f"without {' '.join(removed)}"


def outcome_of(spec: MutationSpec, result: WorkResult) -> str:
    """`killed`, `survived`, `equivalent` for those of the plan, or `no program`."""
    if result.test_outcome is TestOutcome.KILLED:
        return "killed"
    if result.test_outcome is TestOutcome.INCOMPETENT:
        return "no program"
    code = mutated_line(result.diff)
    module = str(spec.module_path)
    is_equivalent = any(row["module"] == module and row["mutant"] == code for row in PLAN["equivalent"])
    return "equivalent" if is_equivalent else "survived"


def write_table(decided: Sequence[tuple[WorkItem, WorkResult]], header: str) -> float:
    """Write table.csv, print the counts by module, and return the share of killed mutants."""
    counts: Counter[str] = Counter()
    by_module: dict[str, Counter[str]] = {module: Counter() for module in PLAN["modules"]}
    rows = []
    for item, result in decided:
        spec = item.mutations[0]
        outcome = outcome_of(spec, result)
        if outcome == "no program":
            continue
        counts[outcome] += 1
        by_module[str(spec.module_path)][outcome] += 1
        decided_by = result.output.rpartition("::")[2].partition("[")[0]
        code = decided_by if outcome == "killed" else mutated_line(result.diff)
        rows.append((str(spec.module_path), spec.start_pos[0], spec.operator_name, outcome, code))
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {header}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("module", "line", "operator", "outcome", "killing test or mutant"))
        writer.writerows(sorted(rows))
    for module, row in by_module.items():
        print(f"{module:32}", *(f"{row[name]:4} {name}" for name in ("killed", "survived", "equivalent")))
    share = counts["killed"] / max(1, counts["killed"] + counts["survived"])
    print(f"{len(rows)} mutants, {share:.1%} of those that are not equivalent killed")
    return share


def pending(database: WorkDB, again: str | None) -> list[WorkItem]:
    """Mutants to decide: those without a result, or those with an outcome."""
    if again is None:
        return sorted(database.pending_work_items, key=lambda item: item.job_id[::-1])
    return [item for item, result in database.completed_work_items if outcome_of(item.mutations[0], result) == again]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=432, help="mutants in all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of mutants")
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants", help="copy, results and log")
    parser.add_argument("--new", action="store_true", help="remove the folder, and start with the present sources")
    parser.add_argument("--again", metavar="OUTCOME", help="decide the mutants with this outcome once more")
    parser.add_argument("--list", metavar="OUTCOME", help="print the differences of these mutants, and run nothing")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    folder = options.folder.resolve()
    if options.new:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    with use_db(folder / "mutants.sqlite") as database:
        if options.list:
            for item, result in database.completed_work_items:
                spec = item.mutations[0]
                if outcome_of(spec, result) == options.list:
                    print(f"{spec.module_path}:{spec.start_pos[0]} {spec.operator_name}\n{result.diff}\n")
            return 0
        tree = folder / "tree"
        copy_tree(tree)
        if not database.num_work_items:
            database.add_work_items(sample(tree, options.count, options.seed))
        measured = measure(folder)
        preload(measured.imported)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        items = pending(database, options.again)
        for number, item in enumerate(items, 1):
            result = decide(folder, measured, item.mutations[0])
            database.set_result(item.job_id, result)
            spec = item.mutations[0]
            place = f"{spec.module_path}:{spec.start_pos[0]}"
            print(f"{number}/{len(items)} {outcome_of(spec, result)} {place} {spec.operator_name}", flush=True)
        header = f"python tests/mutants/mutation.py --count {options.count} --seed {options.seed}"
        share = write_table(database.completed_work_items, header)
    return 0 if share >= REQUIRED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
