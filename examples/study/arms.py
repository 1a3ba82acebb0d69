"""Arms of the studies: options of `CreditConfig`, by the name in the tables, and their colors in figures."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from credit_trl import CreditConfig, CreditTrainer

sys.path.append(str(Path(__file__).parents[1] / "family"))
from temper_only import temper

ARMS: dict[str, dict[str, Any]] = {
    "SDPO": {"contrastive_coef": 0.0},
    "CREDIT λ=0.05": {"contrastive_coef": 0.05},
    "CREDIT λ=0.1": {"contrastive_coef": 0.1},
    "CREDIT λ=0.2": {"contrastive_coef": 0.2},
    "CREDIT λ=0.5": {"contrastive_coef": 0.5},
    "CREDIT form=guide λ=0.2": {"contrastive_coef": 0.2, "contrastive_form": "guide"},
    "CREDIT form=guide λ=1": {"contrastive_coef": 1.0, "contrastive_form": "guide"},
    "CREDIT form=guide λ=1.5": {"contrastive_coef": 1.5, "contrastive_form": "guide"},
    "temper-only λ=0.1": {"contrastive_coef": 0.1},
    "GRPO": {"distillation_weight": 0.0},
    "GRPO and guide λ=1.5": {"contrastive_coef": 1.5, "contrastive_form": "guide", "distillation_weight": 0.5},
    # What could take the place of feedback, contrast or teacher: `CHANGES`, and options alone.
    "foreign z SDPO": {"contrastive_coef": 0.0},
    "foreign z λ=0.1": {"contrastive_coef": 0.1},
    "foreign z guide λ=1.5": {"contrastive_coef": 1.5, "contrastive_form": "guide"},
    "no z SDPO": {"contrastive_coef": 0.0, "teacher_prompt": "student"},
    "no z λ=0.1": {"contrastive_coef": 0.1, "teacher_prompt": "student"},
    "five rollouts SDPO": {"contrastive_coef": 0.0, "num_generations": 5, "per_device_train_batch_size": 80},
    "anchored GRPO": {"distillation_weight": 0.0, "beta": 0.04},
    "unlikely tokens GRPO": {"distillation_weight": 0.0},
}
UNLIKELY = 0.1  # probability below which a sampled token is unlikely
# Name and color in figures, in the order of legends and tables.
STYLES = {
    "SDPO": ("SDPO", "#D55E00"),
    "CREDIT λ=0.05": ("CREDIT, λ = 0.05", "#56B4E9"),
    "CREDIT λ=0.1": ("CREDIT, λ = 0.1", "#0072B2"),
    "CREDIT λ=0.2": ("CREDIT, λ = 0.2", "#7A6AE0"),
    "CREDIT λ=0.5": ("CREDIT, λ = 0.5", "#B07AA1"),
    "CREDIT form=guide λ=0.2": ("guide, λ = 0.2", "#009E73"),
    "CREDIT form=guide λ=1": ("guide, λ = 1", "#4DAF4A"),
    "CREDIT form=guide λ=1.5": ("guide, λ = 1.5", "#8DB600"),
    "temper-only λ=0.1": ("temper-only, λ = 0.1", "#E69F00"),
    "hint-contrast λ=0.1": ("contrast of feedback, λ = 0.1", "#CC79A7"),  # of rows in results/ alone
    "GRPO": ("GRPO", "#7F7F7F"),
    "GRPO and guide λ=1.5": ("half GRPO, half guide, λ = 1.5", "#B8860B"),
}
# The arms that the tables of the predicted worlds have.
DEFAULT_ARMS = (
    *("SDPO", "CREDIT λ=0.1", "CREDIT λ=0.05", "CREDIT λ=0.2"),
    *("temper-only λ=0.1", "CREDIT form=guide λ=0.2", "GRPO"),
)


def read_options(lines: Sequence[str]) -> dict[str, Any]:
    """Options of lines such as `learning_rate=2e-5`. YAML reads a number without a point before its e as text."""
    options = dict(yaml.safe_load(line.replace("=", ": ", 1)).popitem() for line in lines)
    for name, value in options.items():
        with suppress(ValueError):
            options[name] = float(value) if isinstance(value, str) else value
    return options


def with_options(arm: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and options of an arm with further options, such as `SDPO teacher_model_kind=base`.

    The number of steps is not in the name: rows of longer runs have further steps.
    """
    added = "".join(f" {name}={value}" for name, value in options.items() if name != "max_steps")
    return arm + added, ARMS[arm] | options


@cache
def made_by() -> dict[str, str]:
    """Commit and versions, columns of a row."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    versions = {name: version(name) for name in ("torch", "transformers", "trl")}
    return versions | {"version": version("credit-trl"), "commit": commit}


def make_trainer(
    arm: str, options: dict[str, Any], model: Any, reward: Any, rows: Any, tokenizer: Any
) -> CreditTrainer:
    """The trainer of an arm, by the arm's name in `ARMS`, with its change of `CHANGES`."""
    change = next((change for name, change in CHANGES.items() if arm.startswith(name)), None)
    is_tempered = arm.startswith("temper-only")
    config = CreditConfig(**options | ({"contrastive_coef": 0.0} if is_tempered else {}))
    trainer = CreditTrainer(model, reward, config, rows, processing_class=tokenizer)
    if change is not None:
        change(trainer, options)
    return trainer


def temper_target(trainer: CreditTrainer, options: dict[str, Any]) -> None:
    """The target (1 − λ) f in place of f − λ Ĝ."""
    temper(trainer.credit_step, options["contrastive_coef"])


def read_foreign_feedback(trainer: CreditTrainer, options: dict[str, Any]) -> None:
    """Give teacher and contrast the feedback of the next prompt of the batch (one process)."""
    build = trainer.credit_step.build_contexts

    def build_foreign(batch: Any) -> Any:
        texts = batch.verdict_feedback
        moved = [*texts[batch.group_size :], *texts[: batch.group_size]]
        return build(replace(batch, verdict_feedback=moved))

    trainer.credit_step.build_contexts = build_foreign


def punish_unlikely_tokens(trainer: CreditTrainer, options: dict[str, Any]) -> None:
    """Lower the advantage of each token that is `UNLIKELY` under the policy by 1, the deviation of an advantage."""
    generate = trainer._generate_and_score_completions

    @torch.no_grad()
    def generate_and_punish(inputs: Any) -> Any:
        output = generate(inputs)
        names = ("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask")
        ids, mask = (torch.cat([output[name] for name in of], dim=1) for of in names)
        completion_length = output["completion_ids"].shape[1]
        logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, completion_length)
        output["advantages"] = output["advantages"][:, None] - (logps.exp() < UNLIKELY).to(logps)
        return output

    trainer._generate_and_score_completions = generate_and_punish


CHANGES: dict[str, Callable[[CreditTrainer, dict[str, Any]], None]] = {
    "temper-only": temper_target,
    "foreign z": read_foreign_feedback,
    "unlikely tokens": punish_unlikely_tokens,
}
