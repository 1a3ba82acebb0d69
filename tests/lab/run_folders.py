"""Run directories without training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from credit_trl.lab.analysis.tokenmap import TokenMap, write_maps
from credit_trl.run_directory import append_lines, write_json


def write_steps(folder: Path, maps: Sequence[TokenMap]) -> None:
    """Write each map as that of a step."""
    for step, token_map in enumerate(maps):
        write_maps([token_map], folder / "credit_maps" / f"step-{step:06d}.json")


def make_run(
    folder: Path,
    scores: np.ndarray,
    *,
    seed: int = 0,
    text: str = "hello",
    groups: Sequence[str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Run directory of four logs with evaluations at steps 0, 2, …; `scores` has shape (evaluations, prompts).

    `metrics` are further logged numbers, of each log. Prompts alternate between the `groups`.
    """
    config = {"contrastive_coef": 0.1, "output_dir": str(folder), "seed": seed, "logging_steps": 1} | options
    rows = {"path": str(folder / "rows" / "train.parquet"), "sha256": "0123456789abcdef"}
    functions = [{"name": None, "called": "check", "file": None}]
    data = {"folder": str(folder), "train": rows, "reward_funcs": functions}
    run = {"config": config, "seed": seed, "model": f"bases/seed{seed}", "data": data}
    write_json(folder / "run.json", run | {"segments": [{"step": 0, "options": options}]})
    for step in range(1, 5):
        row = {"step": step, "reward": 0.1 * step + seed, "completions/mean_length": 20.0, "credit/s_mean": 0.5}
        append_lines(folder / "log.jsonl", [row | dict(metrics or {})])
        message = [{"role": "user", "content": f"{text} {step}"}]
        rollout = {"step": step, "prompt": message, "completion": message, "reward": 1.0, "feedback": text}
        (folder / "completions").mkdir(exist_ok=True)
        table = pa.Table.from_pylist([rollout | {"teacher_prompt": text, "s_mean": 0.25, "advantage": 0.0}] * 9)
        pq.write_table(table, folder / "completions" / f"completions_{step:05d}.parquet")
    for i, row in enumerate(np.atleast_2d(scores)):
        mean = float(row.mean())
        result = {"task": "sums", "k": 4, "score": mean, "low": mean - 0.1, "high": mean + 0.1}
        append_lines(folder / "evaluations.jsonl", [{"step": 2 * i, **result}])
        prompts = []
        for n, value in enumerate(row):
            group = None if groups is None else groups[n % len(groups)]
            prompts.append({"id": f"p{n}", "group": group, "score": float(value)})
        rates = {group: {"format": (i + 1) / 8} for group in groups or ()}
        full_result = {**result, "prompts": prompts, "group_metrics": rates}
        write_json(folder / "evaluations" / f"step-{2 * i:06d}" / "result.json", full_result)
    return folder
