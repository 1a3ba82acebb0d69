"""A hundred faults, drawn at random, hit runs one after the other; each run ends bit for bit as an undisturbed one.

The runs have the callbacks of every run, three steps a generation batch and two checkpoints, and a clock that jumps.

A fault that cannot be survived is refused with a sentence that names the file and what to do, and the test does that.
`FAULT_SEED=7 make test-faults` draws other faults; the seed is part of the name of each test.
"""

import os
import random
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from credit_trl.cli.preemption import REQUEUE
from faults import launching
from faults.faulty_run import FAULTS, STEPS, Fault

SEED = int(os.environ.get("FAULT_SEED", "0"))
RUNS, FAULTS_A_RUN = 20, 5
VARIANT = "jumps"
BATCH_STEPS, LIMIT = 3, 2  # optimizer steps of a generation batch, checkpoints that are kept

KINDS = FAULTS["endings"]
DAMAGES = ("flipped bit", "truncated file")
BEFORE_BACKWARD = ("rollout", "verdict", "contexts", "contrast", "scores, before", "update, before")


def deal(seed: int) -> list[list[str]]:
    """Kinds of the faults of each run; all are equally frequent."""
    kinds = [*(kind for kind in KINDS if "nan" not in kind), "nan", *DAMAGES]
    deck = [kinds[n % len(kinds)] for n in range(RUNS * FAULTS_A_RUN)]
    random.Random(seed).shuffle(deck)
    return [deck[n::RUNS] for n in range(RUNS)]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def written_at(checkpoint: Path) -> int:
    """When the first file of a checkpoint was written, by the clock of the system, in nanoseconds."""
    return min(path.stat().st_ctime_ns for path in checkpoint.iterdir())


def is_half_removed(checkpoint: Path) -> bool:
    return len(list(checkpoint.glob("*.safetensors"))) < 2  # policy and teacher


class FaultyRun:
    """A run in a folder, and the faults that hit it."""

    def __init__(self, context, expected: dict, folder: Path, draw: random.Random) -> None:
        self.context = context
        self.expected = expected
        self.draw = draw
        self.folder = folder
        self.changed: dict[Path, int] = {}  # damaged file -> its time; a checkpoint that is written again has another
        self.history: list[object] = []
        folder.mkdir()

    def launch(self, fault: Fault | None, variant: str = "") -> tuple[int, str]:
        """Run to the end or the fault; return the exit code and what was logged meanwhile."""
        log = self.folder / "log_0.txt"
        size_before = log.stat().st_size if log.exists() else 0
        [code] = launching.launch(self.context, self.folder, VARIANT + variant, fault)
        self.history.append((fault, code))
        return code, log.read_bytes()[size_before:].decode(errors="replace")

    def checkpoints(self) -> dict[int, bool]:
        """Step of each checkpoint, in the order in which they were written, and whether it is damaged."""
        paths = sorted(self.folder.glob("checkpoint-*"), key=written_at)
        damaged = {f.parent for f, changed in self.changed.items() if f.exists() and f.stat().st_mtime_ns == changed}
        return {step_of(path): path in damaged or is_half_removed(path) for path in paths}

    @property
    def step(self) -> int:
        """Step of the newest undamaged checkpoint."""
        return max((step for step, is_damaged in self.checkpoints().items() if not is_damaged), default=0)

    def resume(self, fault: Fault | None, variant: str = "") -> tuple[int, str]:
        """Launch again. A damaged newest checkpoint is warned about, or refused if there is no older one."""
        steps = list(self.checkpoints())
        newer = steps[steps.index(self.step) + 1 :] if self.step else steps
        damaged = [self.folder / f"checkpoint-{step}" for step in newer]
        if damaged and not self.step:
            code, said = self.launch(None)
            assert code == 1, self.history
            assert re.search(r"No checkpoint in .* can be resumed: .*set another `output_dir`", said), said
            assert all(f"{folder}/" in said for folder in damaged), said
            for folder in damaged:
                shutil.rmtree(folder)
            damaged = []
        code, said = self.launch(fault, variant)
        if damaged:
            assert re.search(r"DAMAGED CHECKPOINT: .* The run resumes from .*checkpoint-\d+ instead", said), said
            assert all(f"{folder}/" in said for folder in damaged), said
        return code, said

    def finish(self) -> None:
        """Run to the end, which must be that of an undisturbed run."""
        assert self.resume(None)[0] == 0, self.history
        self.check_end()

    def check_end(self) -> None:
        assert launching.result(self.folder) == self.expected, self.history

    def places(self, kind: str) -> list[Fault]:
        """Faults of a kind that happen when the run resumes from its newest checkpoint."""
        done = self.step
        places = []
        for point, (_, _, when, _) in FAULTS["points"].items():
            if point.startswith(("checkpoint", "teacher")):
                steps = range(done + 1, STEPS + 1)
            elif point.startswith("update"):
                steps = range(done, STEPS)
            else:  # once in a generation batch
                steps = range(-(-done // BATCH_STEPS) * BATCH_STEPS, STEPS, BATCH_STEPS)
            if when == "half" and kind != "kill":
                continue
            if when == "half" and "old one" in point:
                present = sum(step <= done for step in self.checkpoints())
                steps = [step for step in steps if present + step - done > LIMIT]
            if kind.startswith("nan") and not point.startswith(BEFORE_BACKWARD):
                continue
            places += [Fault(point, step, kind=kind) for step in steps]
        return places

    def hit(self, kind: str) -> bool:
        """Let a fault happen; return whether the run went on to its end all the same."""
        if kind in DAMAGES:
            if not self.step:
                self.resume(Fault("checkpoint, after", 1))
            self.damage(kind)
            return False
        if kind == "nan":
            kind = self.draw.choice(["nan gradient", "nan loss", "nan teacher"])
        fault = self.draw.choice(self.places(kind))
        if kind == "second":
            threading.Thread(target=self.start_second, daemon=True).start()
        code, said = self.resume(fault, "-service" if kind == "service" else "")
        codes, reason = KINDS[kind]
        assert code in (REQUEUE if valid_code == "requeue" else valid_code for valid_code in codes), (
            self.history,
            said[-3000:],
        )
        if code or kind == "second":
            assert re.search(reason, said, re.DOTALL), (self.history, said[-3000:])
        assert code == -9 or not (self.folder / "unfinished").exists(), self.history
        if code == 0:
            self.check_end()
        return code == 0

    def start_second(self) -> None:
        """Start another trainer in the folder while the first one waits, and let that go on."""
        while not (self.folder / "waits").exists():
            time.sleep(0.02)
        self.history.append(("second trainer", launching.launch(self.context, self.folder, VARIANT)))
        (self.folder / "continues").touch()

    def damage(self, kind: str) -> None:
        """Flip a bit of a file of the newest checkpoint, or cut the file off, both at a random place."""
        files = (self.folder / f"checkpoint-{self.step}").iterdir()
        file = self.draw.choice(sorted(file for file in files if file.stat().st_size))
        content = bytearray(file.read_bytes())
        place = self.draw.randrange(len(content))
        if kind == "truncated file":
            del content[place:]
        else:
            content[place] ^= 1 << self.draw.randrange(8)
        file.write_bytes(content)
        self.changed[file] = file.stat().st_mtime_ns
        self.history.append((kind, file.name, place))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(RUNS), ids=lambda number: f"seed{SEED}-run{number}")
def test_run_hit_by_random_faults_ends_as_an_undisturbed_one(context, uninterrupted, tmp_path, number):
    """A run that ends before it has had all its faults is followed by another one."""
    draw = random.Random(f"{SEED} {number}")
    run = None
    for position, kind in enumerate(deal(SEED)[number]):
        if run is not None and run.step == STEPS:
            run.finish()
            run = None
        run = run or FaultyRun(context, uninterrupted(VARIANT, 1), tmp_path / str(position), draw)
        if run.hit(kind):
            run = None
    if run is not None:
        run.finish()


def test_a_hundred_faults_of_every_kind_are_dealt():
    dealt = [kind for faults in deal(SEED) for kind in faults]
    assert len(dealt) == 100
    assert min(dealt.count(kind) for kind in set(dealt)) >= 11
    assert deal(SEED) == deal(SEED) != deal(SEED + 1)
