"""What a run leaves for its reader: console lines, run directory, table of completions and model card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from credit_trl.contexts.tokens import TokenContexts
from credit_trl.rollout.batch import GenerationBatch, loss_mask
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
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.run_log = RunLog()
        self.add_callback(self.run_log)
        print_lines(self.callback_handler)

    def _tabulate(
        self, output: dict[str, Tensor], batch: GenerationBatch, contexts: Sequence[TokenContexts] | None
    ) -> None:
        """Add feedback, teacher prompt and the mean of S_t to TRL's table of completions (`log_completions`).

        S_t is 0 for samples without a contrast. Every process must call it.
        """
        columns: dict[str, list[Any]] = {"feedback": batch.feedback}
        if contexts is not None:
            mask = loss_mask(output) & output["contrast_mask"][:, None]
            specific = (output["teacher_token_logps"] - output["generic_token_logps"]) * mask
            columns["teacher_prompt"] = self.processing_class.batch_decode([c.teacher or [] for c in contexts])
            columns["s_mean"] = (specific.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()
        for name, values in columns.items():
            self._logs["extra"][name].extend(gather_object(values))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        drop_undefined(self._metrics["train" if self.model.training else "eval"])
        super().log(logs, start_time)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write TRL's card and add how the credit was trained, the metrics, and how to load the model."""
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            data = dataset_name or self.run_log.facts.get("task")
            complete_card(Path(self.args.output_dir) / "README.md", self, data)
