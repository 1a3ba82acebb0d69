"""The graded samples of an evaluation, in an append-only JSON lines file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from credit_trl.training.run_directory import append_lines, read_lines

SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """One graded completion."""

    prompt: str  # id
    sample: int  # number of the sample, in [0, k)
    text: str
    length: int  # tokens, end of turn included
    truncated: bool  # whether it reached the length limit
    reward: float
    feedback: str | None
    metrics: dict[str, float]  # of the verdict, those that are finite


class SampleFile:
    """Graded samples in the order of `units`, continued from those in the file.

    An incomplete last line, left by a killed process, is removed.
    `units` has (prompt id, number) of every sample of the evaluation; without a path they are kept in memory only.
    """

    def __init__(self, path: Path | None, units: Sequence[tuple[str, int]]) -> None:
        self.path = path
        self.samples = [] if path is None else _read(path)
        found = [(sample.prompt, sample.sample) for sample in self.samples]
        if found != list(units[: len(found)]):
            raise ValueError(f"{path} holds samples of another evaluation. Use another `output_dir`, or remove it.")

    def append(self, samples: Sequence[Sample]) -> None:
        """Add samples; they are on disk when this returns."""
        if self.path is not None:
            append_lines(self.path, *map(asdict, samples))
        self.samples.extend(samples)


def _read(path: Path) -> list[Sample]:
    if not path.is_file():
        return []
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
    try:
        return [Sample(**row) for row in read_lines(path)]
    except TypeError as error:
        raise ValueError(f"{path} does not hold samples of an evaluation: {error}") from error
