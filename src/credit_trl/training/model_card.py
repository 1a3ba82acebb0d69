"""The credit's part of a model card: the options of the method and the data."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from transformers import Trainer
from trl import GRPOConfig

from credit_trl.training.run_directory import write_atomically

# Options that the card states even at their defaults.
_STATED = (
    *("contrastive_form", "contrastive_coef", "contrastive_count", "contrastive_source", "distillation_support"),
    *("distillation_topk", "distillation_alpha", "distillation_weight", "teacher_model_kind", "teacher_update_rate"),
)
_VERSIONS = "### Framework versions\n\n"


def complete_card(path: Path, trainer: Trainer, data: str | None) -> None:
    """Add the credit's section to TRL's card; `data` is the name of the dataset or task, if it has one."""
    name = trainer.hub_model_id or str(trainer.args.output_dir)
    card = path.read_text(encoding="utf-8").replace('model="None"', f'model="{name}"')
    card = card.replace("[None](https://huggingface.co/None)", "a local model")
    before, marker, after = card.partition(_VERSIONS)
    own = f"- credit_trl: {version('credit-trl')}\n"
    write_atomically(path, f"{before}{_method(trainer, data)}\n\n{marker}{own}{after}")


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
    rows = [f"| {name} | {value} |".replace("\n", "\\n") for name, value in facts.items()]
    return "\n".join(("### Credit\n", "| | |", "| --- | --- |", *rows))
