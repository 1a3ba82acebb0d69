"""The graded samples of an evaluation, in an append-only JSON lines file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from credit_trl.training.run_directory import read_lines

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


def read_samples(path: Path, units: Sequence[tuple[str, int]]) -> list[Sample]:
    """The samples of a file, to which others are appended. An incomplete last line of a killed process is removed.

    Args:
        path: the file, which may be missing.
        units: (prompt id, number) of every sample of the evaluation, of which the file has the first.

    Raises:
        ValueError: the file holds samples of another evaluation.
    """
    content = path.read_bytes() if path.is_file() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
    try:
        samples = [Sample(**row) for row in read_lines(path)]
    except TypeError as error:
        raise ValueError(f"{path} does not hold samples of an evaluation: {error}") from error
    if [(sample.prompt, sample.sample) for sample in samples] != list(units[: len(samples)]):
        raise ValueError(f"{path} holds samples of another evaluation. Use another `output_dir`, or remove it.")
    return samples
