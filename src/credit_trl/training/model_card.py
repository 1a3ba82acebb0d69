"""The credit's part of a model card: method, data, metrics before and after, and how to load the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import Trainer

from credit_trl.config import CreditConfig
from credit_trl.training.run_directory import write_atomically

# Names in the log, without `eval_`, and what the card calls them. Scores of avg@k are added.
_METRICS = {
    "reward": "reward",
    "completions/mean_length": "response length, tokens",
    "credit/s_mean": "S_t, nats",
    "credit/delta_v_mean": "ΔV_t, nats",
    "credit/advantage_mean": "R_t, nats",
}
# Options of the method that the card states where they differ from their defaults.
_FURTHER = (*("distillation_tail", "teacher_context", "teacher_model_name_or_path", "teacher_sync_steps"),)
_VERSIONS = "### Framework versions\n\n"


def complete_card(path: Path, trainer: Trainer, data: str | None) -> None:
    """Add the credit's sections to TRL's card; `data` is the name of the dataset or task, if it has one."""
    name = trainer.hub_model_id or str(trainer.args.output_dir)
    card = path.read_text(encoding="utf-8").replace('model="None"', f'model="{name}"')
    card = card.replace("[None](https://huggingface.co/None)", "a local model")
    before, marker, after = card.partition(_VERSIONS)
    sections = [
        _method(trainer, data),
        _metrics(trainer.state.log_history),
        _loading(name, isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel)),
    ]
    own = f"- credit_trl: {version('credit-trl')}\n"
    write_atomically(path, before + "".join(f"{text}\n\n" for text in sections if text) + marker + own + after)


def _method(trainer: Trainer, data: str | None) -> str:
    args: CreditConfig = trainer.args
    rows = f"{len(trainer.train_dataset)} rows" if hasattr(trainer.train_dataset, "__len__") else "a stream of rows"
    facts = {
        "data": f"{data}, {rows}" if data else rows,
        "steps": str(trainer.state.global_step),
        "generation batch": f"{args.generation_batch_size} rollouts, {args.num_generations} a prompt",
        "learning rate": f"{args.learning_rate:g}",
        "seed": str(args.seed),
    }
    if args.distillation_weight > 0.0:
        facts = _credit(args) | facts
    return "### Credit\n\n" + _table(("", ""), [(name, value) for name, value in facts.items()])


def _credit(args: CreditConfig) -> dict[str, str]:
    parts = [("feedback", args.include_environment_feedback), ("demonstration", args.use_successful_as_teacher)]
    is_topk = args.distillation_support.endswith("_topk")
    rate = f", rate {args.teacher_update_rate:g}" if args.teacher_model_kind == "ema" else ""
    read = " and ".join(name for name, is_used in parts if is_used)
    defaults = CreditConfig.__dataclass_fields__
    further = {name: value for name in _FURTHER if (value := getattr(args, name)) != defaults[name].default}
    facts = {
        "form of the target": f"`contrastive_form={args.contrastive_form}`",
        "λ": f"{args.contrastive_coef:g}",
        "C": f"{args.contrastive_count}, `contrastive_source={args.contrastive_source}`",
        "support": args.distillation_support + (f", K = {args.distillation_topk}" if is_topk else ""),
        "α": f"{args.distillation_alpha:g}",
        "weight of the distillation loss": f"{args.distillation_weight:g}",
        "teacher": args.teacher_model_kind + rate,
        "privileged context": read,
    }
    if further:
        facts["further options"] = ", ".join(f"`{name}={value}`" for name, value in further.items())
    return facts


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


def _loading(name: str, is_adapter: bool) -> str:
    library, model_class = ("peft", "AutoPeftModel") if is_adapter else ("transformers", "AutoModel")
    return (
        f"### Load\n\n```python\nfrom {library} import {model_class}ForCausalLM\n"
        f"from transformers import AutoTokenizer\n\n"
        f'model = {model_class}ForCausalLM.from_pretrained("{name}", dtype="auto")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```'
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
