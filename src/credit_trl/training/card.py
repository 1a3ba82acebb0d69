"""What a run is called, and what its model card says of it."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from credit_trl import run_directory as files
from credit_trl.training.reporting import escape_controls
from credit_trl.training.run_options import merged_options

# Options that the name of a method stands for.
METHOD_OPTIONS = ("distillation_weight", "contrastive_coef", "contrastive_form")
_TEACHERS = {
    "ema": "an average of the policy (`ema`)",
    "base": "the model before training (`base`)",
    "live": "the policy itself (`live`)",
}
_FACTS_TITLE = "## This run"


def method_name(options: Mapping[str, Any]) -> str:
    """GRPO, SDPO, `CREDIT λ = 0.1`, `guide 1.5`, or a mixture with GRPO; "" where the options do not say."""
    if "contrastive_coef" not in options:
        return ""
    weight = options.get("distillation_weight", 1.0)
    coefficient = options["contrastive_coef"]
    if weight == 0.0:
        return "GRPO"
    if coefficient == 0.0:
        name = "SDPO"
    elif options.get("contrastive_form") == "guide":
        name = f"guide {coefficient}"
    else:
        name = f"CREDIT λ = {coefficient}"
    if weight != 1.0:
        name += f" with weight {weight} beside GRPO"
    return name


def method_of_run(options: Mapping[str, Any], segments: Sequence[Mapping[str, Any]]) -> str:
    """Method of a run; of one that resumed with another, each with the step from which it held."""
    texts: list[str] = []
    current = ""
    for count in range(1, len(segments) + 1):
        name = method_name(dict(options) | merged_options(list(segments[:count])))
        if texts and name != current:
            texts.append(f"{name} from step {segments[count - 1]['step']}")
        elif not texts:
            texts.append(name)
        current = name
    if len(texts) < 2:
        return method_name(options)
    return ", then ".join(texts)


def model_name(path: str) -> str:
    """Name on the hub, or of the folder, of a model."""
    folder = Path(path)
    if folder.parts[-2:] == ("quickstart_model", "plain"):
        return "quickstart"
    return folder.name if folder.is_absolute() or folder.is_dir() else path


def card_writer(write: Callable[..., None], output_dir: str) -> Callable[..., None]:
    """TRL's function that writes the model card, which then says what the run was; the commit is that of now."""
    folder = Path(output_dir)
    commit = current_commit()

    def write_with_facts(model_name: str | None = None, **options: Any) -> None:
        write(model_name=model_name or folder.resolve().name, **options)
        if (folder / files.CARD).is_file() and PartialState().is_main_process:
            add_facts_to_card(folder, commit)

    return write_with_facts


def add_facts_to_card(folder: Path, commit: str | None) -> None:
    """Add method, teacher, data and score of the run in a folder to its model card, in place of earlier ones."""
    card = folder / files.CARD
    text = card.read_text("utf-8").split(f"\n{_FACTS_TITLE}\n")[0].rstrip()
    rows = [f"- {name}: {value}" for name, value in card_facts(folder, commit).items()]
    files.write_atomically(card, "\n".join([text, "", _FACTS_TITLE, "", *rows, ""]))


def card_facts(folder: Path, commit: str | None) -> dict[str, str]:
    """Facts of a run by their titles; those that are not known are missing."""
    run: dict[str, Any] = {}
    if (folder / files.RUN_FILE).exists():
        run = files.read_run_file(folder)
    options = run.get("config") or {}
    facts = {"method": method_of_run(options, run.get("segments") or [])}
    if options.get("distillation_weight"):
        kind = options.get("teacher_model_kind")
        path = options.get("teacher_model_name_or_path")
        facts["teacher"] = _TEACHERS.get(kind, str(kind))
        if path:
            facts["teacher"] = model_name(path)
        facts["λ"] = str(options.get("contrastive_coef"))
    facts["base model"] = model_name(str(run.get("model") or ""))
    facts["data"] = _data_text(run)
    facts["score"] = _score_text(folder)
    if commit:
        facts["code"] = f"commit {commit}"
    return {name: _one_line(value) for name, value in facts.items() if value}


def _data_text(run: Mapping[str, Any]) -> str:
    data = run.get("data") or {}
    rows = data.get("train") or {}
    place = run.get("task") or data.get("task") or rows.get("name") or rows.get("path") or ""
    text = str(place)
    if Path(place).is_absolute():
        text = Path(place).name
    digest = rows.get("sha256")
    if digest and text:
        text += f" (sha256 {digest[:8]})"
    return text


def _score_text(folder: Path) -> str:
    """avg@k before and after training with their 95 % intervals."""
    rows = files.read_steps(folder / files.EVALUATIONS_FILE)
    scored = [row for row in rows if isinstance(row.get("score"), float)]
    if not scored:
        return ""
    latest = scored[-1]
    text = f"avg@{latest.get('k')} {_percent_with_interval(latest)} on {latest.get('task')} at step {latest['step']}"
    if scored[0]["step"] == 0 and latest["step"] > 0:
        text += f"; {_percent_with_interval(scored[0])} before training"
    return text


def _percent_with_interval(row: Mapping[str, Any]) -> str:
    text = f"{100 * row['score']:.1f} %"
    if isinstance(row.get("low"), float) and isinstance(row.get("high"), float):
        text += f" (95 % interval {100 * row['low']:.1f} to {100 * row['high']:.1f})"
    return text


def _one_line(value: str) -> str:
    """A text without line breaks, control characters and HTML, for a list of Markdown."""
    return escape_controls(" ".join(value.split())).replace("<", "&lt;")


def current_commit(folder: str | Path = ".") -> str | None:
    """Commit of the working tree, with `-dirty` where files differ from it; None outside of one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
