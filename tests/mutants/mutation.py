"""Change functions of the core, one mutant at a time, and run the tests that execute the changed statement.

    python tests/mutants/mutation.py                      # go on where the last call stopped, and write table.md
    python tests/mutants/mutation.py --again survived     # decide the survivors once more, with the tests of today
    python tests/mutants/mutation.py --new                # start again, with the present sources

The checkout stays as it is: each worker has a copy in `.mutants`, whose sources are those of the first call. It
collects the tests once. For each mutant it forks a child, which gives functions their changed code.
"""

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import json
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
from inspect import CO_OPTIMIZED
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
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
from hypothesis import Phase, settings
from operators import OPERATORS
from parso.tree import NodeOrLeaf

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/credit_trl")
PLAN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("plan.yaml").read_text("utf-8"))
TABLE = Path(__file__).with_name("table.md")
# The limit ends mutants that hang; a busy machine stays below it.
LIMIT_SECONDS = 60.0
LIMIT_RATIO = 10.0
MEASURE_SECONDS = 3600.0
REQUIRED_SHARE = 0.95
OUTCOMES = ("killed", "equivalent", "survived")


@dataclass(frozen=True)
class Measured:
    """What the tests of the unchanged copy execute."""

    seconds: dict[str, float]
    """Node id of a passed test -> its seconds of a processor."""
    lines: dict[str, dict[int, set[str]]]
    """Module -> line -> tests that execute it."""


def copy_tree(tree: Path) -> None:
    """Copy the checkout; `src` only where the copy has none."""
    shutil.rmtree(tree / "tests", ignore_errors=True)
    ignored = [".*", "runs", "site", "dist", *["src"] * (tree / "src").exists()]
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*ignored), dirs_exist_ok=True)


def in_child(log: Path, limit: float, run: Callable[[], int]) -> int | None:
    """Exit code of a function in a forked child with a log; None beyond the limit."""
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
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


def candidates(module: str, source: str) -> Iterator[MutationSpec]:
    """Mutants of the functions of a module, except for messages."""
    operators = OPERATORS | {name: OperatorProvider()[name] for name in PLAN["operators"]}
    tree = get_ast(source)
    for name, operator in operators.items():
        occurrence = -1
        for node in ast_nodes(tree):
            for start, end in operator().mutation_positions(node):
                occurrence += 1
                if not _is_message(node):
                    yield MutationSpec(module, name, occurrence, start, end)


def _is_message(node: NodeOrLeaf) -> bool:
    """Whether code is part of an error, a log or a warning."""
    parent = node.parent
    while parent is not None and parent.type not in ("suite", "file_input"):
        code = parent.get_code().strip()
        if parent.type in ("fstring", "raise_stmt") or code.startswith(("logger.", "warnings.")):
            return True
        parent = parent.parent
    return False


def sample(tree: Path, count: int) -> list[WorkItem]:
    """Mutants of functions that are spread evenly over the modules, at most two on a line."""
    items = []
    modules = list(PLAN["modules"])
    for index, module in enumerate(modules):
        quota = (count - len(items)) // (len(modules) - index)
        source = (tree / PACKAGE / module).read_text("utf-8")
        specs = list(candidates(module, source))
        random.Random(f"0 {module}").shuffle(specs)
        on_line: Counter[int] = Counter()
        for spec in specs:
            line = spec.start_pos[0]
            if quota and on_line[line] < 2 and changed_functions(source, mutated_source(source, spec)):
                on_line[line] += 1
                quota -= 1
                items.append(WorkItem.single(uuid.UUID(int=len(items)).hex, spec))
    return items


def mutated_source(source: str, spec: MutationSpec) -> str:
    operator = OPERATORS.get(spec.operator_name) or OperatorProvider()[spec.operator_name]
    return mutate_code(source, operator(), spec.occurrence) or source


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


def chosen_tests(measured: Measured, module: str, source: str, line: int, seconds: float) -> list[str]:
    """Tests of a mutant that execute its statement: those of the module, those that mirror it, then all.

    The fastest are first. They take `seconds` of a processor at most, on the unchanged copy.
    """
    mirrors = tuple(PLAN["modules"][module])
    executing = set()
    for number in statement_lines(source, line):
        executing.update(measured.lines[module].get(number, ()))
    total = 0.0
    selected = []
    file = f"/test_{Path(module).stem}.py:"
    order = [(file not in test, not test.startswith(mirrors), measured.seconds[test], test) for test in executing]
    for *_, test in sorted(order):
        total += measured.seconds[test]
        if total <= seconds or not selected:
            selected.append(test)
    return selected


def changed_functions(source: str, mutated: str) -> list[tuple[CodeType, CodeType]]:
    """Code of functions before and after; none where code of a module or class changes, or `mutated` is no Python."""
    try:
        bodies = [(compile(source, "", "exec"), compile(mutated, "", "exec"))]
    except SyntaxError:
        return []
    changes = []
    for old_body, new_body in bodies:
        if _without_functions(old_body) != _without_functions(new_body):
            return []
        for old, new in zip(_parts(old_body), _parts(new_body), strict=True):
            if not old.co_flags & CO_OPTIMIZED:  # a class
                bodies.append((old, new))
            elif old != new:
                changes.append((old, new))
    is_replaceable = all(old.co_name[0] != "<" and old.co_freevars == new.co_freevars for old, new in changes)
    return changes if is_replaceable else []


def _parts(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]


def _without_functions(code: CodeType) -> tuple[Any, ...]:
    constants = [part.co_name if isinstance(part, CodeType) else (type(part), part) for part in code.co_consts]
    return code.co_code, constants, code.co_names


def _place(code: CodeType, path: str) -> tuple[str, str, int]:
    return path, code.co_qualname, code.co_firstlineno


@dataclass(eq=False)
class Worker:
    """Pytest plugin that collects all tests of a copy, and then measures them and decides mutants, in children."""

    folder: Path
    index: int
    count: int
    items: Sequence[WorkItem]
    seconds: float
    barrier: Any
    """At which the workers wait for all measurements."""
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = self.folder / f"tree-{self.index}"
        self.failure = self.folder / f"failure-{self.index}"

    def work(self) -> None:
        os.chdir(self.tree)
        sys.path[:0] = [str(self.tree / "src"), str(self.tree / "tests")]
        os.environ["PYTHONPATH"] = str(self.tree / "src")
        files = sorted({test for tests in PLAN["modules"].values() for test in tests})
        temporary = str(self.folder / f"temporary-{self.index}")
        options = ["-qs", "--basetemp", temporary, *"-p no:cacheprovider -p no:xdist".split()]
        if pytest.main([*options, *files], plugins=[self]):
            raise RuntimeError("The tests were not collected: with `--new` the copy has the present sources.")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Let hypothesis draw the same examples in each run, and not shrink one that fails."""
        settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], derandomize=True, deadline=None)
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.append(report.nodeid)
        if report.failed:
            self.failure.write_text(report.nodeid, "utf-8")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        tests_of = defaultdict(list)
        for test in session.items:
            tests_of[test.nodeid.partition("::")[0]].append(test)
        functions = self._functions()
        if threading.active_count() > 1:
            raise RuntimeError(f"A thread would hold its locks in a child for ever: {threading.enumerate()}.")
        stores = self._measure(tests_of)
        self.barrier.wait()
        measured = joined(stores)
        tests = {test.nodeid: test for test in session.items}
        for item in self.items[self.index :: self.count]:
            self._decide(item, tests, functions, measured)
        return True

    def _functions(self) -> dict[tuple[str, str, int], list[Any]]:
        """All functions of the copy by their place."""
        for module in PLAN["modules"]:
            importlib.import_module(f"credit_trl.{module.removesuffix('.py').replace('/', '.')}")
        gc.unfreeze()
        functions = defaultdict(list)
        for value in gc.get_objects():
            if type(value) is FunctionType:
                functions[_place(value.__code__, value.__code__.co_filename)].append(value)
        gc.freeze()
        return functions

    def _measure(self, tests_of: dict[str, list[pytest.Item]]) -> list[Path]:
        """Measure the files of tests that changed, in turns with the other workers; return where all are stored."""
        sources = b"".join((self.tree / PACKAGE / module).read_bytes() for module in PLAN["modules"])
        stores = []
        for number, (file, tests) in enumerate(tests_of.items()):
            digest = hashlib.sha256(sources + (self.tree / file).read_bytes()).hexdigest()
            stores.append(self.folder / "measured" / f"{digest}.json")
            if number % self.count == self.index and not stores[-1].is_file():
                log = self.folder / f"measure-{self.index}.log"
                code = in_child(log, MEASURE_SECONDS, lambda: self._store(tests, stores[-1]))  # noqa: B023
                print(f"measured {file}: {code}", flush=True)
        return stores

    def _store(self, tests: Sequence[pytest.Item], store: Path) -> int:
        trace = coverage.Coverage(data_file=None, include=[str(self.tree / PACKAGE / "*")], config_file=False)
        trace.start()
        seconds = {}
        for test, following in zip(tests, [*tests[1:], None], strict=True):
            trace.switch_context(test.nodeid)
            start = sum(os.times()[:4])
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            seconds[test.nodeid] = sum(os.times()[:4]) - start
        trace.stop()
        for test in self.failed:
            seconds.pop(test, None)
        lines = {}
        for module in PLAN["modules"]:
            by_line = trace.get_data().contexts_by_lineno(str(self.tree / PACKAGE / module))
            lines[module] = {line: sorted(seconds.keys() & tests) for line, tests in by_line.items()}
        store.write_text(json.dumps({"seconds": seconds, "lines": lines}), "utf-8")
        return 0

    def _decide(self, item: WorkItem, tests: dict[str, Any], functions: dict[Any, Any], measured: Measured) -> None:
        """Run the tests of a mutant in a child, and store the result."""
        spec = item.mutations[0]
        path = self.tree / PACKAGE / spec.module_path
        source = path.read_text("utf-8")
        mutated = mutated_source(source, spec)
        chosen = chosen_tests(measured, str(spec.module_path), source, spec.start_pos[0], self.seconds)

        def run() -> int:
            for old, new in changed_functions(source, mutated):
                for function in functions[_place(old, str(path))]:
                    function.__code__ = new
            items = [tests[test] for test in chosen]
            for test, following in zip(items, [*items[1:], None], strict=False):
                test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
                if self.failure.is_file():
                    return 1
            return 0

        self.failure.unlink(missing_ok=True)
        limit = LIMIT_SECONDS + LIMIT_RATIO * sum(measured.seconds[test] for test in chosen)
        code = in_child(self.folder / f"mutant-{self.index}.log", limit, run) if chosen else 0
        reason = "time limit" if code is None else f"exit {code}"
        killer = self.failure.read_text("utf-8") if self.failure.is_file() else reason
        lines = list(unified_diff(source.splitlines(), mutated.splitlines(), lineterm="", n=0))
        outcome = TestOutcome.KILLED if code != 0 else TestOutcome.SURVIVED
        result = WorkResult(WorkerOutcome.NORMAL, killer, outcome, "\n".join(lines[3:]))
        with use_db(self.folder / "mutants.sqlite") as database:
            database.set_result(item.job_id, result)
        place = f"{spec.module_path}:{spec.start_pos[0]} {spec.operator_name}"
        print(f"{outcome_of(spec, result)} {place} by {killer}", flush=True)


def joined(stores: Sequence[Path]) -> Measured:
    seconds = {}
    lines = {module: defaultdict(set) for module in PLAN["modules"]}
    for store in stores:
        stored = json.loads(store.read_text("utf-8"))
        seconds |= stored["seconds"]
        for module, by_line in stored["lines"].items():
            for line, tests in by_line.items():
                lines[module][int(line)].update(tests)
    return Measured(seconds, lines)


def mutated_line(diff: str) -> str:
    """Code of a mutant: its changed lines, or what it removes."""
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    removed = [line[1:].strip() for line in diff.splitlines() if line.startswith("-")]
    return " ".join(filter(None, added)) or f"without {' '.join(removed)}"


def outcome_of(spec: MutationSpec, result: WorkResult) -> str:
    """`killed`, `survived`, or `equivalent` for those of the plan."""
    if result.test_outcome is TestOutcome.KILLED:
        return "killed"
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
    """Write the counts by module to table.md, and the survivors; return the share of killed mutants.

    A survivor whose code is gone from the present sources is not counted.
    """
    by_module: dict[str, Counter[str]] = {module: Counter() for module in PLAN["modules"]}
    survivors = []
    for item, result in decided:
        spec = item.mutations[0]
        outcome = outcome_of(spec, result)
        if outcome == "killed" or is_present(item, result):
            by_module[str(spec.module_path)][outcome] += 1
            if outcome == "survived":
                survivors.append(f"- {spec.module_path}: `{mutated_line(result.diff)}`")
    total = sum(by_module.values(), Counter())
    lines = [header, "", f"| module | tried | {' | '.join(OUTCOMES)} |", "|---|---|---|---|---|"]
    for module, counts in [*by_module.items(), ("total", total)]:
        cells = [str(counts[outcome]) for outcome in OUTCOMES]
        lines.append(f"| {module} | {counts.total()} | {' | '.join(cells)} |")
    lines += ["", "Survivors:", "", *sorted(survivors)]
    TABLE.write_text("\n".join(lines) + "\n", "utf-8")
    share = total["killed"] / max(1, total["killed"] + total["survived"])
    print(f"{total.total()} mutants, {share:.1%} of those that are not equivalent killed")
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=440, help="mutants in all")
    parser.add_argument("--workers", type=int, default=2, help="processes that decide mutants")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a processor, of the tests of a mutant")
    parser.add_argument("--new", action="store_true", help="start again, with the present sources")
    parser.add_argument("--again", metavar="OUTCOME", help="decide the mutants with this outcome once more")
    options = parser.parse_args()
    folder = Path(os.environ.get("MUTANTS_FOLDER", ROOT / ".mutants"))
    if options.new:
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "measured").mkdir(parents=True, exist_ok=True)
    for index in range(options.workers):
        copy_tree(folder / f"tree-{index}")
    with use_db(folder / "mutants.sqlite") as database:
        if not database.num_work_items:
            database.add_work_items(sample(folder / "tree-0", options.count))
            command = ["git", "log", "-1", "--format=%h", "--", "src"]
            commit = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            (folder / "commit").write_bytes(commit.stdout)
        if options.again is None:
            items = sorted(database.pending_work_items, key=lambda item: item.job_id[::-1])
        else:
            decided = database.completed_work_items
            items = [item for item, result in decided if outcome_of(item.mutations[0], result) == options.again]
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(options.workers)
    workers = []
    for index in range(options.workers):
        worker = Worker(folder, index, options.workers, items, options.seconds, barrier)
        workers.append(context.Process(target=worker.work))
        workers[-1].start()
    for process in workers:
        process.join()
    commit = (folder / "commit").read_text("utf-8").strip()
    command = f"python tests/mutants/mutation.py --count {options.count}"
    header = f"Mutants of the sources of commit {commit}, decided by `{command}` until {date.today()}:"
    with use_db(folder / "mutants.sqlite") as database:
        share = write_table(database.completed_work_items, header)
    return 0 if share >= REQUIRED_SHARE and not any(process.exitcode for process in workers) else 1


if __name__ == "__main__":
    sys.exit(main())
