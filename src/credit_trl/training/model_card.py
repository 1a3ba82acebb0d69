"""The credit's part of a model card: method, data, and metrics before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import Trainer
from trl import GRPOConfig

from credit_trl.training.run_directory import write_atomically

# Names in the log, without `eval_`, and what the card calls them. Scores of avg@k are added.
_METRICS = {
    "reward": "reward",
    "completions/mean_length": "response length, tokens",
    "credit/s_mean": "S_t, nats",
    "credit/delta_v_mean": "ΔV_t, nats",
    "credit/advantage_mean": "R_t, nats",
}
# Options that the card states even at their defaults.
_STATED = (
    *("contrastive_form", "contrastive_coef", "contrastive_count", "contrastive_source", "distillation_support"),
    *("distillation_topk", "distillation_alpha", "distillation_weight", "teacher_model_kind", "teacher_update_rate"),
)
_VERSIONS = "### Framework versions\n\n"


def complete_card(path: Path, trainer: Trainer, data: str | None) -> None:
    """Add the credit's sections to TRL's card; `data` is the name of the dataset or task, if it has one."""
    name = trainer.hub_model_id or str(trainer.args.output_dir)
    card = path.read_text(encoding="utf-8").replace('model="None"', f'model="{name}"')
    card = card.replace("[None](https://huggingface.co/None)", "a local model")
    before, marker, after = card.partition(_VERSIONS)
    sections = (_method(trainer, data), _metrics(trainer.state.log_history))
    own = f"- credit_trl: {version('credit-trl')}\n"
    write_atomically(path, before + "".join(f"{text}\n\n" for text in sections if text) + marker + own + after)


def _method(trainer: Trainer, data: str | None) -> str:
    args = trainer.args
    rows = f"{len(trainer.train_dataset)} rows" if hasattr(trainer.train_dataset, "__len__") else "a stream of rows"
    facts = {
        "data": f"{data}, {rows}" if data else rows,
        "steps": str(trainer.state.global_step),
        "generation batch": f"{args.generation_batch_size} rollouts, {args.num_generations} a prompt",
        "learning rate": f"{args.learning_rate:g}",
        "seed": str(args.seed),
    }
    if args.distillation_weight > 0.0:
        options = {
            name: one for name, one in args.__dataclass_fields__.items() if name not in GRPOConfig.__dataclass_fields__
        }
        changed = [name for name, one in options.items() if getattr(args, name) != one.default]
        facts = {f"`{name}`": repr(getattr(args, name)) for name in dict.fromkeys((*_STATED, *changed))} | facts
    return "### Credit\n\n" + _table(("", ""), list(facts.items()))


def _metrics(history: Sequence[Mapping[str, Any]]) -> str:
    """Table of each metric's first and last value; empty before the first log."""
    scores = {name for entry in history for name in entry if name.startswith("eval_avg@")}
    scores = sorted(name for name in scores if not name.endswith(("_low", "_high")))
    labels = {name: name.removeprefix("eval_") for name in scores}
    labels |= {f"eval_{name}": f"{label} (evaluation)" for name, label in _METRICS.items()}
    labels |= {name: f"{label} (training)" for name, label in _METRICS.items()}
    rows = []
    for name, label in labels.items():
        if logged := [entry for entry in history if entry.get(name) is not None]:
            first, last = logged[0], logged[-1]
            rows.append((label, *(f"{entry[name]:.4g} (step {entry['step']})" for entry in (first, last))))
    return "### Metrics\n\n" + _table(("", "before", "after"), rows) if rows else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[cell.replace("|", "\\|").replace("\n", "\\n") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
