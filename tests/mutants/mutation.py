"""Change the core of the package, one mutant at a time, and run the tests that mirror the changed module.

    python tests/mutants/mutation.py                      # go on where the last call stopped, and write table.csv
    python tests/mutants/mutation.py --again survived     # decide the survivors once more, with the tests of today
    python tests/mutants/mutation.py --list survived      # the differences of the survivors

The checkout stays as it is: mutants live in copies in `--folder`. Their `src` is that of the first call, so `--new`
starts again with the present sources. A child process is forked for each mutant: where functions alone change, from
a process that has collected the tests, and the child gives the functions their new code; otherwise from a process
that has imported libraries alone, and the child imports the mutant.
"""

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from difflib import unified_diff
from pathlib import Path
from types import CodeType, FunctionType
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
from hypothesis import Phase, settings
from operators import OPERATORS
from parso.tree import NodeOrLeaf, search_ancestor

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/credit_trl")
PLAN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("plan.yaml").read_text("utf-8"))
TABLE = Path(__file__).with_name("table.md")
# The limit ends mutants that hang; a busy machine stays below it.
LIMIT_SECONDS = 60.0
LIMIT_RATIO = 10.0
TESTS_SECONDS = 20.0  # of a processor: the tests of one mutant on the unchanged copy
REQUIRED_SHARE = 0.95
OUTCOMES = ("killed", "equivalent", "survived")
# Code without behaviour: annotations, decorators, and messages of errors and logs.
IGNORED_ANCESTORS = ("annassign", "tfpdef", "decorator", "fstring", "import_from", "import_name", "raise_stmt")
IGNORED_CALLS = ("logger.", "warnings.")


@dataclass(frozen=True)
class Measured:
    """What the tests of the unchanged copy execute."""

    seconds: dict[str, float]
    """Node id of a passed test -> its seconds of a processor."""
    lines: dict[str, dict[int, set[str]]]
    """Module -> line -> tests that execute it, and "" where an import does."""


def _processor_seconds() -> float:
    return sum(os.times()[:4])


class Examples:
    """Pytest plugin: hypothesis draws the same examples in each run, and does not shrink one that fails."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], derandomize=True, deadline=None)
        settings.load_profile("mutants")


@dataclass(eq=False)
class Recorder:
    """Pytest plugin that measures each test: its duration, and the lines that it executes."""

    trace: coverage.Coverage
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.trace.switch_context(item.nodeid)
        start = _processor_seconds()
        result = yield
        self.seconds[item.nodeid] = _processor_seconds() - start
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
    shutil.rmtree(tree / "tests", ignore_errors=True)
    for name in filter(None, names):
        source = ROOT / name
        target = tree / name
        if source.is_file() and not (has_sources and name.startswith("src/")):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def in_workers(count: int, run: Callable[[int], None]) -> None:
    """Call a function with the number of a worker, in each of so many forked processes."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=run, args=(index,)) for index in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("A worker failed, see above.")


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


def test_files(tree: Path) -> list[str]:
    """Files of the tests of the plan, relative to the copy."""
    files = set()
    for names in PLAN["modules"].values():
        for name in names:
            paths = [tree / name] if name.endswith(".py") else (tree / name).rglob("test_*.py")
            files.update(str(path.relative_to(tree)) for path in paths)
    return sorted(files)


def measure(folder: Path, trees: Sequence[Path]) -> Measured:
    """Run the tests of the plan on the unchanged copy, with coverage by test; a file again only where it changed."""
    sources = hashlib.sha256()
    for path in sorted((trees[0] / "src").rglob("*.py")):
        sources.update(path.read_bytes())
    stores = {}
    for file in test_files(trees[0]):
        digest = sources.copy()
        digest.update((trees[0] / file).read_bytes())
        stores[file] = folder / "measured" / f"{digest.hexdigest()}.json"
    missing = [file for file, store in stores.items() if not store.is_file()]
    # The files with the most tests start first, so that the workers end together.
    missing.sort(key=lambda file: -(trees[0] / file).stat().st_size)
    (folder / "measured").mkdir(exist_ok=True)

    def run(worker: int) -> None:
        tree = trees[worker]
        for file in missing[worker :: len(trees)]:
            temporary = folder / f"temporary-{worker}"
            log = folder / f"measure-{worker}.log"
            code = in_child(tree, log, math.inf, lambda: _measure(tree, file, stores[file], temporary))  # noqa: B023
            print(f"measured {file}", flush=True)
            if code != 0:
                raise RuntimeError(f"The tests of the unchanged copy did not run, see {log}.")

    in_workers(len(trees), run)
    seconds = {}
    lines = {module: defaultdict(set) for module in PLAN["modules"]}
    for store in stores.values():
        stored = json.loads(store.read_text("utf-8"))
        seconds |= stored["seconds"]
        for module, by_line in stored["lines"].items():
            for line, tests in by_line.items():
                lines[module][int(line)].update(tests)
    return Measured(seconds, lines)


def _measure(tree: Path, file: str, store: Path, temporary: Path) -> int:
    trace = coverage.Coverage(data_file=None, include=[str(tree / PACKAGE / "*")], config_file=False)
    recorder = Recorder(trace)
    trace.start()
    code = pytest.main(pytest_arguments([file], temporary), plugins=[Examples(), recorder])
    trace.stop()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(code)
    lines = {}
    for module in PLAN["modules"]:
        by_line = trace.get_data().contexts_by_lineno(str(tree / PACKAGE / module))
        lines[module] = {line: sorted({*ids} - recorder.failed) for line, ids in by_line.items()}
    seconds = {test: value for test, value in recorder.seconds.items() if test not in recorder.failed}
    store.write_text(json.dumps({"seconds": seconds, "lines": lines}), "utf-8")
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
    if node.parent is not None and node.parent.type == "parameters":  # the star before keywords
        return True
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
    """Lines of the innermost statement with a line; of `if`, `for` and the like those of the head."""
    lines = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
            if node.lineno <= line <= end:
                is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
                lines = range(node.lineno, (node.end_lineno if is_definition else end) + 1)
    return lines


def chosen_tests(measured: Measured, module: str, source: str, line: int) -> list[str]:
    """Tests of a mutant that execute its statement: those that mirror the module, then all, the fastest first.

    All that mirror it where only an import executes the statement.
    """
    mirrors = tuple(PLAN["modules"][module])
    executing = set()
    for number in statement_lines(source, line):
        executing.update(measured.lines[module].get(number, ()))
    tests = executing & measured.seconds.keys()
    if executing and not tests:
        tests = {test for test in measured.seconds if test.startswith(mirrors)}
    total = 0.0
    selected = []
    for test in sorted(tests, key=lambda test: (not test.startswith(mirrors), measured.seconds[test])):
        total += measured.seconds[test]
        if total <= TESTS_SECONDS or not selected:
            selected.append(test)
    return selected


def changed_functions(source: str, mutated: str) -> list[tuple[CodeType, CodeType]] | None:
    """Code of functions before and after; None where code of a module or class changes."""
    changes = []
    bodies = [(compile(source, "", "exec"), compile(mutated, "", "exec"))]
    for body in bodies:
        old_codes, new_codes = ([part for part in code.co_consts if isinstance(part, CodeType)] for code in body)
        if _without_functions(body[0]) != _without_functions(body[1]):
            return None
        for old, new in zip(old_codes, new_codes, strict=True):
            if old.co_flags & inspect.CO_NEWLOCALS == 0 or old.co_flags & inspect.CO_OPTIMIZED == 0:
                bodies.append((old, new))
            elif old != new and (old.co_name.startswith("<") or old.co_freevars != new.co_freevars):
                return None
            elif old != new:
                changes.append((old, new))
    return changes


def _without_functions(code: CodeType) -> tuple[Any, ...]:
    constants = [part.co_name if isinstance(part, CodeType) else part for part in code.co_consts]
    # A line number is no change.
    names = code.co_names, code.co_varnames, code.co_freevars
    return code.co_code, [(type(part), part) for part in constants], names


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


@dataclass(eq=False)
class Server:
    """Pytest plugin that collects all tests, and then decides the mutants of functions, each in a child."""

    worker: "Worker"
    items: Sequence[WorkItem]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for module in PLAN["modules"]:
            importlib.import_module(f"credit_trl.{module.removesuffix('.py').replace('/', '.')}")
        gc.unfreeze()
        functions = defaultdict(list)
        sources = str(self.worker.tree / PACKAGE)
        for value in gc.get_objects():
            if type(value) is FunctionType and value.__code__.co_filename.startswith(sources):
                functions[value.__code__.co_filename, *_place(value.__code__)].append(value)
        gc.collect()
        gc.freeze()
        require_one_thread()
        tests = {item.nodeid: item for item in session.items}
        for item in self.items:
            self._decide(item, tests, functions)
        return True

    def _decide(self, item: WorkItem, tests: dict[str, pytest.Item], functions: dict[tuple, list[Any]]) -> None:
        mutant = self.worker.mutant(item)
        changes = changed_functions(mutant.source, mutant.mutated) if mutant.mutated else None
        if not changes:
            return
        places = [functions.get((str(mutant.path), *_place(old))) for old, _ in changes]
        if not all(places):
            return

        def run() -> int:
            for values, (_, code) in zip(places, changes, strict=True):
                for value in values:
                    value.__code__ = code
            chosen = [tests[test] for test in mutant.tests if test in tests]
            for test, following in zip(chosen, [*chosen[1:], None], strict=False):
                test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
                if self.worker.failure.is_file():
                    return 1
            return 0

        self.worker.decide(item, mutant, run)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.worker.failure.write_text(report.nodeid, "utf-8")


@dataclass(frozen=True)
class Mutant:
    """A mutant, and the tests that decide it."""

    path: Path
    source: str
    mutated: str | None
    tests: list[str]


@dataclass(eq=False)
class Worker:
    """Decides mutants in a copy of its own."""

    folder: Path
    index: int
    measured: Measured

    def __post_init__(self) -> None:
        self.tree = self.folder / f"tree-{self.index}"
        self.failure = self.folder / f"failure-{self.index}"
        self.temporary = self.folder / f"temporary-{self.index}"
        self.decided = self.folder / f"decided-{self.index}"

    def mutant(self, item: WorkItem) -> Mutant:
        spec = item.mutations[0]
        path = self.tree / PACKAGE / spec.module_path
        source = path.read_text("utf-8")
        tests = chosen_tests(self.measured, str(spec.module_path), source, spec.start_pos[0])
        return Mutant(path, source, _mutated(source, spec), tests)

    def work(self, items: Sequence[WorkItem]) -> None:
        """Decide the mutants of functions, then those that have to be imported."""
        self.decided.write_text("", "utf-8")
        server = Server(self, items)
        arguments = pytest_arguments(test_files(self.tree), self.temporary)
        log = self.folder / f"server-{self.index}.log"
        if in_child(self.tree, log, math.inf, lambda: int(pytest.main(arguments, plugins=[Examples(), server]))):
            raise RuntimeError(f"The tests were not collected, see {log}.")
        decided = set(self.decided.read_text("utf-8").split())
        for item in items:
            if item.job_id not in decided:
                self._import(item)

    def _import(self, item: WorkItem) -> None:
        mutant = self.mutant(item)
        selection = Selection(mutant.tests, self.failure)
        files = sorted({test.partition("::")[0] for test in mutant.tests})
        arguments = [*pytest_arguments(files, self.temporary), "-x"]
        # A mutant of the same size in the same second would be taken from the cache.
        Path(importlib.util.cache_from_source(str(mutant.path))).unlink(missing_ok=True)
        mutant.path.write_text(mutant.mutated or mutant.source, "utf-8")
        try:
            self.decide(item, mutant, lambda: int(pytest.main(arguments, plugins=[Examples(), selection])))
        finally:
            mutant.path.write_text(mutant.source, "utf-8")

    def decide(self, item: WorkItem, mutant: Mutant, run: Callable[[], int]) -> None:
        """Run the tests of a mutant in a child, and store the result."""
        result = WorkResult(WorkerOutcome.NO_TEST, "", TestOutcome.INCOMPETENT, "")
        if mutant.mutated is not None:
            self.failure.unlink(missing_ok=True)
            limit = LIMIT_SECONDS + LIMIT_RATIO * sum(self.measured.seconds[test] for test in mutant.tests)
            log = self.folder / f"mutant-{self.index}.log"
            code = in_child(self.tree, log, limit, run) if mutant.tests else 0
            outcome = TestOutcome.SURVIVED if code in (0, 5) else TestOutcome.KILLED
            reason = "time limit" if code is None else f"exit {code}"
            test = self.failure.read_text("utf-8") if self.failure.is_file() else reason
            lines = mutant.source.splitlines(), mutant.mutated.splitlines()
            difference = "\n".join(list(unified_diff(*lines, lineterm="", n=1))[2:])
            result = WorkResult(WorkerOutcome.NORMAL, test, outcome, difference)
        with use_db(self.folder / "mutants.sqlite") as database:
            database.set_result(item.job_id, result)
        with self.decided.open("a", encoding="utf-8") as file:
            file.write(f"{item.job_id}\n")
        spec = item.mutations[0]
        print(f"{outcome_of(spec, result)} {spec.module_path}:{spec.start_pos[0]} {spec.operator_name}", flush=True)


def require_one_thread() -> None:
    """No thread may run when a child is forked: it would hold its locks for ever."""
    if threading.active_count() > 1:
        raise RuntimeError(f"Imports started threads: {threading.enumerate()}.")


def preload(modules: Sequence[str]) -> None:
    """Import libraries, of which children get copies."""
    for name in modules:
        importlib.import_module(name)
    require_one_thread()


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


def is_present(item: WorkItem, result: WorkResult) -> bool:
    """Whether the lines that a mutant changes are in the present sources."""
    path = ROOT / PACKAGE / item.mutations[0].module_path
    lines = set(path.read_text("utf-8").splitlines()) if path.is_file() else set()
    return all(line[1:] in lines for line in result.diff.splitlines() if line.startswith("-"))


def write_table(decided: Sequence[tuple[WorkItem, WorkResult]], header: str) -> float:
    """Write the counts by module to table.md, the survivors below them, and return the share of killed mutants."""
    by_module: dict[str, Counter[str]] = {module: Counter() for module in PLAN["modules"]}
    survivors = []
    for item, result in decided:
        spec = item.mutations[0]
        outcome = outcome_of(spec, result)
        if outcome == "no program" or not is_present(item, result):
            continue
        by_module[str(spec.module_path)][outcome] += 1
        if outcome == "survived":
            survivors.append(f"- {spec.module_path}: `{mutated_line(result.diff)}`")
    total = sum(by_module.values(), Counter())
    lines = [header, "", f"| module | tried | {' | '.join(OUTCOMES)} |", "|---|---|---|---|---|"]
    for module, counts in [*by_module.items(), ("total", total)]:
        cells = [str(counts[outcome]) for outcome in OUTCOMES]
        lines.append(f"| {module} | {counts.total()} | {' | '.join(cells)} |")
    if survivors:
        lines += ["", "Survivors:", "", *sorted(survivors)]
    TABLE.write_text("\n".join(lines) + "\n", "utf-8")
    share = total["killed"] / max(1, total["killed"] + total["survived"])
    print(f"{total.total()} mutants, {share:.1%} of those that are not equivalent killed")
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
    parser.add_argument("--workers", type=int, default=2, help="processes that decide mutants")
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
        trees = [folder / f"tree-{index}" for index in range(options.workers)]
        for tree in trees:
            copy_tree(tree)
        if not database.num_work_items:
            database.add_work_items(sample(trees[0], options.count, options.seed))
            commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True)
            (folder / "commit").write_bytes(commit.stdout)
        items = pending(database, options.again)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    preload(PLAN["preloaded"])
    measured = measure(folder, trees)
    in_workers(len(trees), lambda index: Worker(folder, index, measured).work(items[index :: len(trees)]))
    with use_db(folder / "mutants.sqlite") as database:
        command = f"python tests/mutants/mutation.py --count {options.count} --seed {options.seed}"
        commit = (folder / "commit").read_text("utf-8").strip()
        header = f"Mutants of the sources of commit {commit}, decided on {date.today()} by `{command}`:"
        share = write_table(database.completed_work_items, header)
    return 0 if share >= REQUIRED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
