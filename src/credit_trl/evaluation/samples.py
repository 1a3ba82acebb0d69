"""The samples of one evaluation, a file that only grows: one line a sample, in a fixed order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from credit_trl.training.run_directory import json_line, read_lines

SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """One graded answer.

    Args:
        prompt: the prompt's id.
        sample: its number among the prompt's k.
        text: the answer.
        length: in tokens, the end of turn included.
        truncated: cut at the length limit.
        reward: the verdict's.
        feedback: the verdict's words.
        metrics: the verdict's further numbers.
        answer: what the task takes as the answer given, for maj@k; None where nothing was answered or it is unknown.
    """

    prompt: str
    sample: int
    text: str
    length: int
    truncated: bool
    reward: float
    feedback: str | None
    metrics: dict[str, float]
    answer: str | None


class SampleFile:
    """Graded samples in the order of `units`; what is there when it is opened counts as done.

    A file that ends in the middle of a line, because its writer was killed, is cut back to its last whole line.

    Args:
        path: the file, or None to keep the samples in memory.
        units: (prompt id, number) of every sample that the evaluation wants, in order.

    Raises:
        ValueError: the file holds other samples, or more.
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
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write("".join(json_line(asdict(sample)) for sample in samples).encode())
                file.flush()
                os.fsync(file.fileno())
        self.samples.extend(samples)


def _read(path: Path) -> list[Sample]:
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return [_sample(row, path) for row in read_lines(path)]


def _sample(row: dict[str, Any], path: Path) -> Sample:
    try:
        return Sample(**row)
    except TypeError as error:
        raise ValueError(f"{path} does not hold samples of an evaluation: {error}") from error
