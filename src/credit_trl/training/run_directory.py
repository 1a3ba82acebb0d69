"""Files of a run directory, and atomic reading and writing of JSON and JSON Lines.

    run.json                     method, settings and seed of the run
    log.jsonl                    the trainer's logs, one object per line
    evaluations.jsonl            evaluations during training, one object per line
    evaluations/step-000005/     one evaluation: settings.json, samples.jsonl, result.json
    rows/train.parquet           rows that were a `Dataset` object, from which `credit-eval RUN` reads them
    best.json                    step and location of the best model
    summary.json                 best-during-training and final scores, written when training ends

    previous-1/                  files of an earlier run here, or of steps after a resumed one, as above

A process killed at any moment leaves each file complete, or with an unfinished last line that readers ignore.
`credit_trl.lab.report` reads only these files, so it works offline and with every `report_to`.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
EVALUATIONS_FOLDER = "evaluations"
ROWS_FOLDER = "rows"
SETTINGS_FILE = "settings.json"
RESULT_FILE = "result.json"
BEST_FILE = "best.json"
SUMMARY_FILE = "summary.json"
BASE_EVALUATION = f"{EVALUATIONS_FOLDER}/step-000000"  # before the first step

# Files of a run. Checkpoints come first: if moving them is interrupted, no run resumes from them without their log.
_MODELS = ("checkpoint-*", "best-step-*")
_RECORDS = (EVALUATIONS_FILE, LOG_FILE, RUN_FILE, BEST_FILE, SUMMARY_FILE)
_EVALUATIONS = f"{EVALUATIONS_FOLDER}/step-*"
_OUTPUTS = ("completions/*", f"{ROWS_FOLDER}/*", "credit_maps/*", "model", "learning_curve.png", "token_maps.html")
# The final model. An adapter's configuration that remains would make transformers load that adapter.
_FINAL_MODEL = (
    *("adapter_*", "*.safetensors", "*.safetensors.index.json", "pytorch_model*", "config.json"),
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*", "training_args.bin"),
    *("trainer_state.json", "*_results.json", "README.md"),
)


def write_atomically(path: str | Path, text: str) -> None:
    """Replace a file in one step: readers see the old or the new content. It is on disk when this returns."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with scratch.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def remove_scratch_files(folder: Path) -> None:
    """Remove unfinished files of `write_atomically` by killed processes. Called while nothing else writes there."""
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as JSON with `write_atomically`. NaN and infinities become null, as JSON has neither."""
    write_atomically(path, json.dumps(without_nan(value), indent=2, ensure_ascii=False, sort_keys=True) + "\n")


def json_line(value: Any) -> str:
    """Format a value as one line of a JSON Lines file, with its newline."""
    return json.dumps(without_nan(value), ensure_ascii=False, separators=(",", ":")) + "\n"


def append_lines(path: str | Path, *rows: Mapping[str, Any]) -> None:
    """Append objects to a JSON Lines file. The lines are on disk when this returns; on an `OSError` none is there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    length = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(map(json_line, rows)))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        if path.is_file():
            os.truncate(path, length)  # a full disk may have taken a part
        raise


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON Lines file; none if there is no file.

    A last line without a newline was not written completely and is ignored.

    Raises:
        ValueError: another line is not a JSON object; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        return []
    *whole, _unfinished = path.read_bytes().split(b"\n")
    return [_json_object(line, f"{path}, line {number}") for number, line in enumerate(whole, 1)]


def read_json(path: str | Path) -> dict[str, Any]:
    """Read the object of a JSON file. The `ValueError` for another content names the file."""
    return _json_object(Path(path).read_bytes(), str(path))


def _json_object(text: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place} is not a JSON object.")
    return value


def set_aside(folder: Path, step: int = 0, base: str = "") -> None:
    """Move what an earlier run saved after a step to a folder `previous-<n>`, which is a run directory too, and warn.

    Called by one process, when a run starts (`step` 0) or resumes. Of two branches of a run, `latest` then means the
    one that trained last. Nothing is moved where no checkpoint is later, as in a run that was interrupted.

    Args:
        folder: the run directory.
        step: step that the run resumes from: log and settings are copied. At 0 all files of the earlier run move, and
            a copy of the evaluation before the first step stays, which the run reuses if it has the same weights.
        base: name or path of the model that the run starts from, which stays if it is in the run directory.
    """
    if step > 0:
        moved = [path for path in _paths(folder, *_MODELS, _EVALUATIONS) if step_of(path) > step]
        is_used = any(path.match(_MODELS[0]) for path in moved)
        what = f"This run resumes from step {step}. Later checkpoints and evaluations"
    else:
        own = Path(base).resolve() if base else None
        final = () if own == folder.resolve() else _FINAL_MODEL
        moved = _paths(folder, *_MODELS, *_RECORDS, _EVALUATIONS, *_OUTPUTS, *final)
        moved = [path for path in moved if path.resolve() != own]
        has_steps = any(row.get("step", 0) > 0 for row in read_lines(folder / LOG_FILE))
        is_used = bool(_paths(folder, *_MODELS, EVALUATIONS_FILE)) or has_steps
        what = "This run starts from the beginning. Log, evaluations and models of an earlier run"
    if not is_used:
        return
    number = next(n for n in itertools.count(1) if not (folder / f"previous-{n}").exists())
    aside = folder / f"previous-{number}"
    for path in moved:
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    if step > 0:
        for path in _paths(folder, *_RECORDS):
            shutil.copy2(path, aside)
    elif (aside / BASE_EVALUATION).is_dir():
        shutil.copytree(aside / BASE_EVALUATION, folder / BASE_EVALUATION)
    logger.warning(
        f"{what} in {folder} are now in {aside}; `output_dir={aside}` with `resume_from_checkpoint='latest'` goes on "
        "with them."
    )


def _paths(folder: Path, *patterns: str) -> list[Path]:
    return list(dict.fromkeys(path for pattern in patterns for path in folder.glob(pattern)))


def step_of(path: Path) -> int:
    """The step that a name ends with; 0 without one."""
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def keep_up_to(path: str | Path, step: int) -> None:
    """Drop the lines of a JSON Lines file whose `step` is above the step that a run resumes from."""
    if Path(path).is_file():
        write_atomically(path, "".join(json_line(row) for row in read_lines(path) if row.get("step", 0) <= step))


def without_nan(value: Any) -> Any:
    """Copy a JSON value with None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value
