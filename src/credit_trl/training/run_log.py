"""Callback that writes `run.json` and `log.jsonl` of every run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from credit_trl.teacher.sharding import full_shape
from credit_trl.training.run_directory import (
    LOG_FILE,
    RUN_FILE,
    append_lines,
    keep_up_to,
    set_aside_earlier_run,
    set_aside_later_steps,
    write_json,
)


class RunLog(TrainerCallback):
    """Writes `run.json` and `log.jsonl` into the output directory, for any `report_to`.

    Every `CreditTrainer` has one, `trainer.run_log`. A resumed run first removes the lines after the step of its
    checkpoint and sets later checkpoints aside; a run that starts from the beginning first sets aside an earlier one.
    `facts` are further fields of `run.json`, such as the task.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder, model = Path(args.output_dir), kwargs.get("model")
        name = getattr(model, "name_or_path", "")
        if state.global_step == 0:
            set_aside_earlier_run(folder, name)
        else:
            set_aside_later_steps(folder, state.global_step)
        run = {
            "config": args.to_dict(),
            "seed": args.seed,
            "model": name or type(model).__name__,
            "parameters": sum(full_shape(p).numel() for p in model.parameters()) if model is not None else None,
            **self.facts,
        }
        write_json(folder / RUN_FILE, json.loads(json.dumps(run, default=str)))
        keep_up_to(folder / LOG_FILE, state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and logs:
            append_lines(Path(args.output_dir) / LOG_FILE, {"step": state.global_step, **logs})
