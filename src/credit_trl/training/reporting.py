"""What a run leaves for its reader: console lines, run directory, table of completions and model card."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from credit_trl.contexts.tokens import TokenContexts
from credit_trl.loss.distillation import MicroBatchLoss
from credit_trl.rollout.batch import GenerationBatch
from credit_trl.training.completions import CompletionTable
from credit_trl.training.console import print_lines
from credit_trl.training.drift import DriftAlarms
from credit_trl.training.metrics import drop_undefined
from credit_trl.training.micro_batches import UnpaddedTrainer
from credit_trl.training.model_card import complete_card
from credit_trl.training.run_log import RunLog
from credit_trl.training.timing import StageClock


class ContinueReports(TrainerCallback):
    """Lets alarms and clock of a resumed run go on from what it has logged."""

    def __init__(self, drift: DriftAlarms, clock: StageClock) -> None:
        self.drift = drift
        self.clock = clock

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.drift.restore(state.log_history)
        self.clock.start(state.global_step)


class ReportingTrainer(UnpaddedTrainer):
    """TRL's GRPO trainer with the credit in its reports.

    Attributes:
        run_log: writes `run.json` and `log.jsonl`; entries of `run_log.facts` are added to `run.json`.
        completion_tables: for `"train"` and `"eval"`, columns of the credit for `log_completions`; else empty.
    """

    _generation_batch: GenerationBatch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.run_log = RunLog()
        self.add_callback(self.run_log)
        if self.args.console_log == "line":
            print_lines(self.callback_handler)
        self.completion_tables: dict[str, CompletionTable] = {}
        if self.args.log_completions:
            means_follow = self.args.shares[1] > 0.0
            for mode, rounds in (("train", self.args.dynamic_sampling_rounds), ("eval", 0)):
                logs = copy.deepcopy(self._logs)
                self.completion_tables[mode] = CompletionTable(logs, self.accelerator, means_follow, rounds)

    @property
    def _table(self) -> CompletionTable | None:
        """The table of completions of training or of evaluation, whichever runs."""
        return self.completion_tables.get("train" if self.model.training else "eval")

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._table is not None:
            self._table.fill(self._pending_extra_logs, len(prompts))
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._table is None:
            return super()._generate_and_score_completions(inputs)
        if self._table.has_ended:
            self._table.clear()
        self._logs = self._table.logs
        output = super()._generate_and_score_completions(inputs)
        # dynamic sampling may call this several times for one generation batch
        output["table_rows"] = self._table.number(self._generation_batch)
        return output

    def _tabulate(
        self, output: dict[str, Any], batch: GenerationBatch, contexts: Sequence[TokenContexts] | None
    ) -> None:
        """Add the columns of a generation batch to the table. Every process must call it."""
        if self._table is not None:
            decode = self.processing_class.batch_decode
            output["table_rows"] = self._table.add(batch, output["table_rows"], contexts, decode)

    def _tabulate_update(self, inputs: dict[str, Any], loss: MicroBatchLoss) -> None:
        """Store the mean credit of a micro-batch for the table."""
        if self._table is not None:
            self._table.observe(inputs.get("table_rows"), loss)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        drop_undefined(self._metrics["train" if self.model.training else "eval"])
        if self._table is None:
            super().log(logs, start_time)
            return
        self._logs = self._table.updated()
        super().log(logs, start_time)
        self._table.write_tensorboard(self._logs, self.callback_handler, self.state.global_step)
        self._logs = self._table.logs
        self._table.has_ended = not self.model.training

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write TRL's card and add how the credit was trained, the metrics, and how to load the model."""
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            data = dataset_name or self.run_log.facts.get("task")
            complete_card(Path(self.args.output_dir) / "README.md", self, data)
