"""Run directories in the format that training writes, with given scores."""

from __future__ import annotations

from credit_trl.training.run_directory import append_lines, write_json

K = 4


def writer(root):
    """Return a function that writes one run directory; `scores` maps step → prompt id → score."""

    def write(
        name: str,
        scores: dict[int, dict[str, float]],
        arm: str = "CREDIT",
        seed: int = 1,
        task: str = "letters",
        groups: dict[str, str] | None = None,
        log: list[dict] | None = None,
        config: dict | None = None,
        metrics: dict[str, float] | None = None,
        finished: bool = True,
        settings: dict | None = None,
        model: str = "",
    ):
        folder = root / name
        config = {"contrastive_coef": 0.1, "contrastive_count": 1, "distillation_weight": 1.0} | (config or {})
        write_json(folder / "run.json", {"arm": arm, "seed": seed, "task": task, "config": config, "model": model})
        for row in log or []:
            append_lines(folder / "log.jsonl", row)
        for step, by_prompt in scores.items():
            prompts = [
                {
                    "id": prompt,
                    "group": (groups or {}).get(prompt, task),
                    "score": score,
                    "successes": 0,
                    "majority": None,
                    "metrics": metrics or {},
                }
                for prompt, score in by_prompt.items()
            ]
            mean = sum(by_prompt.values()) / len(by_prompt)
            append_lines(folder / "evaluations.jsonl", {"step": step, "task": task, "k": K, "score": mean})
            write_json(
                folder / "evaluations" / f"step-{step:06d}" / "result.json",
                {"task": task, "model": "m", "k": K, "score": mean, "prompts": prompts},
            )
            if settings is not None:
                write_json(folder / "evaluations" / f"step-{step:06d}" / "settings.json", settings)
        if finished:
            write_json(folder / "summary.json", {})
        return folder

    return write
