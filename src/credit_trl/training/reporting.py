"""What a run leaves: `run.json`, `log.jsonl`, seconds of its stages, its completions."""

import json
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from credit_trl import run_directory as files
from credit_trl.contexts.images import thumbnail
from credit_trl.contexts.prompts import images_of
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.rollout.batch import GenerationBatch, loss_mask
from credit_trl.teacher.sharding import full_shape
from credit_trl.training.checkpoints import UNFINISHED, RunStart, own_checkpoints
from credit_trl.training.run_options import merged_options

logger = logging.getLogger(__name__)


class StageClock:
    """Accumulates wall-clock seconds by stage. The time of a stage inside another counts for the inner one only.

    A stage is timed if `counts` returns True when it ends.
    """

    def __init__(self, counts: Callable[[], bool] = lambda: True) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps = 0  # optimizer steps since the last report
        self._counts = counts
        self._reported = 0.0  # of the seconds of the step that is not finished

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a stage."""
        seconds_before = sum(self.seconds.values())
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._counts():
                nested_seconds = sum(self.seconds.values()) - seconds_before
                self.seconds[name] += time.perf_counter() - started - nested_seconds

    def report(self, finished: float, unfinished: float) -> dict[str, float]:
        """Return `credit/seconds_<stage>`, means over the steps since the last report, and reset the clock.

        What no other stage takes is `credit/seconds_update`.

        Args:
            finished: seconds of the steps that TRL has finished since the last report.
            unfinished: seconds of the one that it has not: the last of an epoch, if it has fewer micro-batches.
        """
        if self.steps == 0:
            return {}
        self.seconds["update"] = finished + unfinished - self._reported - sum(self.seconds.values())
        means = {f"credit/seconds_{name}": seconds / self.steps for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self.steps = 0
        self._reported = unfinished
        return means


class RunLog(TrainerCallback):
    """Writes `run.json` and `log.jsonl` into the output directory, for any `report_to`.

    Every `CreditTrainer` has one, `trainer.run_log`. A run changes no file in the directory before its first update,
    or its end. Then the files of an earlier run are moved into `_earlier_<n>`; a run that resumes drops the logs,
    completions, scores and token maps after the step that it starts from. `segments` in `run.json` lists the steps
    from which the run went on with other options, each with those that changed. Warnings are rows of `log.jsonl`.
    A failure ends the run: its files would be mixed with an earlier run's, or would not say what it did.
    `facts` are further fields of `run.json`, such as the task; `rows` are data sets for `store_rows`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}
        self.has_begun = False  # to write
        self._first_step = 0
        self._tensorboard: TensorBoardCallback | None = None  # which would make its files when a run begins
        self._unwritten: list[dict[str, Any]] = []

    def hold_back(self) -> None:
        """Write nothing until the first update, and let TensorBoard not either."""
        self.has_begun = False
        self._tensorboard = self.trainer.pop_callback(TensorBoardCallback) or self._tensorboard

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_over = state.global_step >= state.max_steps
        self.trainer.alarms.raise_if(is_over, "nothing_to_do", step=state.global_step, last=state.max_steps)
        self._first_step = state.global_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin(args, state, kwargs["model"])

    def continued_step(self) -> int | None:
        """Step up to which the files in the output directory are of this run; None where it is a new one."""
        start = self.trainer.run_start
        return self._first_step if start is not None and start.continues else None

    def _begin(self, args: Any, state: Any, model: nn.Module) -> None:
        """Take over the directory, once for each call of `train`."""
        if self.has_begun:
            return
        self.has_begun = True
        if not state.is_world_process_zero:
            return
        self.trainer.check_lock()
        folder = Path(args.output_dir)
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # of a killed run
        files.remove_scratch(folder)
        step = self.continued_step()
        if step is None:
            place = files.set_aside(folder, own_checkpoints(folder))
            if place is not None:
                logger.warning(f"The earlier run in {folder} is in {place} now.")
                if self.trainer.log_completions:  # TRL has made the folder when it was constructed
                    (folder / "completions").mkdir()
        else:
            self._drop_after(folder, step)
        files.store_rows(folder, self.facts["data"], self.rows)
        files.write_json(folder / files.RUN_FILE, self._description(folder, args, model, step))
        self._write_logs(folder)
        if self._tensorboard is not None:
            self.trainer.add_callback(self._tensorboard)
            self._tensorboard.on_train_begin(args, state, None, model=model)
            for logs in state.log_history:
                if logs["step"] == self._first_step == state.global_step:  # an evaluation before the first update
                    self._tensorboard.on_log(args, state, None, logs)

    def _description(self, folder: Path, args: Any, model: nn.Module, step: int | None) -> dict[str, Any]:
        """Content of `run.json`."""
        earlier: dict[str, Any] = {}
        if step is not None and (folder / files.RUN_FILE).exists():
            try:
                earlier = files.read_run_file(folder)
            except ValueError as error:
                logger.warning(f"{error} It is written again, and its `segments` begin at step {step}.")
        start = self.trainer.run_start
        run = {
            "config": args.to_dict(),
            "seed": args.seed,
            "model": getattr(model, "name_or_path", "") or type(model).__name__,
            "last_step": self.trainer.state.max_steps,
            "parameters": sum(full_shape(p).numel() for p in model.parameters()),
            "run": start.run or earlier.get("run") or uuid4().hex,
            "segments": self._segments(start, earlier.get("segments") or []),
            "saved": earlier.get("saved") or [],
            **self.facts,
        }
        return json.loads(json.dumps(run, default=str))

    def _segments(self, start: RunStart, segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The segments of a run, and a new one where its options have changed."""
        stored = merged_options(segments)
        changed = {}
        for name, value in start.options.items():
            if name not in stored or stored[name] != value:
                changed[name] = value
        return [*segments, {"step": self._first_step, "options": changed}] if changed else segments

    def _drop_after(self, folder: Path, step: int) -> None:
        """Drop what the run wrote after the step that it resumes from."""
        files.keep_up_to(folder / files.LOG_FILE, step)
        files.keep_up_to(folder / files.EVALUATIONS_FILE, step)
        for pattern in ("completions/completions_*.parquet", f"{files.MAPS_FOLDER}/step-*.json"):
            for path in folder.glob(pattern):
                number = path.stem.removeprefix("completions_").removeprefix("step-")
                if number.isdecimal() and int(number) > step:
                    path.unlink()

    def note_saved(self, names: set[str]) -> None:
        """Add names in the output directory to `saved` of `run.json`: files and folders of the run's models."""
        folder = Path(self.trainer.args.output_dir)
        if self.has_begun and names and (folder / files.RUN_FILE).exists():
            run = files.read_run_file(folder)
            files.write_json(folder / files.RUN_FILE, run | {"saved": sorted(names.union(run.get("saved") or []))})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self.trainer.check_lock()
        self._unwritten.append({"step": state.global_step, **logs})
        if "train_runtime" in logs:  # the end of a run without a step
            self._begin(args, state, self.trainer.accelerator.unwrap_model(self.trainer.model))
        if self.has_begun:
            self._write_logs(Path(args.output_dir))

    def note_warning(self, cause: str, message: str) -> None:
        """Add a warning to the log: its step, the time in UTC, its cause in `warning`, and the message."""
        time_of_warning = datetime.now(UTC).isoformat(timespec="seconds")
        row = {"step": self.trainer.state.global_step, "time": time_of_warning, "warning": cause, "message": message}
        self._unwritten.append(row)
        if self.has_begun:
            self._write_logs(Path(self.trainer.args.output_dir))

    def _write_logs(self, folder: Path) -> None:
        path = folder / files.LOG_FILE
        if not self._unwritten:
            return
        try:
            files.append_lines(path, self._unwritten)
            self._unwritten.clear()
        except OSError as error:
            logger.warning(f"{path} could not be written ({error}). {len(self._unwritten)} logs are kept for later.")


def text_block(parts: Mapping[str, Any]) -> str:
    """Titled texts or messages for the console, with control characters written as `⟨U+001B⟩`."""
    lines = []
    for title, text in parts.items():
        if isinstance(text, list):
            text = "\n".join(f"{message.get('role')}: {_content_text(message.get('content'))}" for message in text)
        lines += [f"--- {title}", escape_controls(str(text))]
    return "\n".join(lines)


def _content_text(content: Any) -> str:
    """The content of a message; an image as `[image 24×16]`."""
    if not isinstance(content, list):
        return str(content)
    texts = []
    for part in content:
        size = "×".join(map(str, getattr(part.get("image"), "size", ())))
        texts.append(part.get("text") or f"[{part.get('type')} {size}]")
    return " ".join(texts)


def escape_controls(text: str) -> str:
    """The text with control and formatting characters, except ends of lines, written as `⟨U+001B⟩`."""
    escaped = ""
    for character in text:
        is_shown = character.isprintable() or character == "\n"
        escaped += character if is_shown else f"⟨U+{ord(character):04X}⟩"
    return escaped


def print_completions(logs: Mapping[str, Any], step: int, count: int | None) -> None:
    """Print the first `count` rollouts (None: one) of TRL's table of completions, each as a block of titled texts.

    TRL's own table has a column for each of these texts, and so four letters a row on a console of 80.
    """
    columns = {"prompt": logs["prompt"], "completion": logs["completion"], **logs["rewards"]}
    columns |= {"advantage": logs["advantages"], **logs["extra"]}
    for sample in range(min(1 if count is None else count, len(logs["prompt"]))):
        title = f"step {step}"
        texts = {}
        for name, values in columns.items():
            value = values[sample]
            if isinstance(value, int | float):
                title += f"  {name} {value:.3g}"
            else:
                texts[name] = value
        tqdm.write(f"--- {title}\n{text_block(texts)}\n---")


def add_completion_columns(
    trainer: Any, output: Mapping[str, Tensor], batch: GenerationBatch, contexts: Sequence[TokenContexts] | None
) -> None:
    """Add feedback, teacher prompt, the mean of S_t and thumbnails of images to TRL's table of completions.

    `output` has the tensors (B, T) of the generation batch with the stored scores, `contexts` are those of the local
    samples, or None without a distillation loss. S_t is 0 for samples without a contrast. Every process must call it.
    """
    logs = trainer._logs
    columns: dict[str, list[Any]] = {"feedback": batch.feedback}
    if contexts is not None:
        mask = loss_mask(output) & output["contrast_mask"][:, None]
        specific = (output["teacher_token_logps"] - output["generic_token_logps"]) * mask
        prompts = [sample_contexts.teacher or [] for sample_contexts in contexts]
        columns["teacher_prompt"] = trainer.processing_class.batch_decode(prompts)
        columns["s_mean"] = (specific.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()
    if contexts is not None and trainer.log_completions and trainer.log_multimodal:
        thumbnails = gather_object([list(map(thumbnail, images_of(prompt))) for prompt in batch.prompts])
        if logs["images"] or any(thumbnails):  # for the same rows as the prompts, which TRL has added
            missing = len(logs["prompt"]) - len(thumbnails) - len(logs["images"])
            logs["images"].extend([[]] * missing)
            logs["images"].extend(thumbnails)
    for name, values in columns.items():
        logs["extra"][name].extend(gather_object(values))
