"""Callback that writes `run.json` and `log.jsonl` of every run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from credit_trl.teacher.sharding import full_shape
from credit_trl.training import run_directory as files
from credit_trl.training.resuming import stored_options
from credit_trl.training.run_data import store_rows

logger = logging.getLogger(__name__)


class RunLog(TrainerCallback):
    """Writes `run.json` and `log.jsonl` into the output directory, for any `report_to`.

    Every `CreditTrainer` has one, `trainer.run_log`. A resumed run first removes the lines after the step of its
    checkpoint and sets later checkpoints aside; a run that starts from the beginning first sets aside an earlier one.
    `segments` in `run.json` has an entry for each step from which the run went on with other options of the objective.
    `facts` are further fields of `run.json`, such as the task; `rows` are data sets for `store_rows`.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}
        self._unwritten: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        model = kwargs["model"]
        name = getattr(model, "name_or_path", "")
        files.set_aside(folder, state.global_step, name)
        path = folder / files.RUN_FILE
        store_rows(folder, self.facts["data"], self.rows)
        options = stored_options(args, model)
        segments = files.read_json(path).get("segments", []) if path.is_file() else []
        if not segments or segments[-1]["options"] != options:
            segments.append({"step": state.global_step, "options": options})
        run = {
            "config": args.to_dict(),
            "seed": args.seed,
            "model": name or type(model).__name__,
            "parameters": sum(full_shape(p).numel() for p in model.parameters()),
            "segments": segments,
            **self.facts,
        }
        files.write_json(path, json.loads(json.dumps(run, default=str)))
        files.keep_up_to(folder / files.LOG_FILE, state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        path = Path(args.output_dir) / files.LOG_FILE
        self._unwritten.append({"step": state.global_step, **logs})
        try:
            files.append_lines(path, *self._unwritten)
            self._unwritten.clear()
        except OSError as error:
            logger.warning(
                f"{path} could not be written ({error}). {len(self._unwritten)} logs wait for the next try."
            )
