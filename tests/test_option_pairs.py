"""No option is silently without effect: a walk over all pairs of options on a tiny model.

A run with a pair of choices is compared with the run without one of them. Each choice changes a loss or a gradient, or
the pair is an error at construction, or docs/options.md lists it.
"""

import re
import tempfile
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig

from credit_trl import CreditConfig, CreditTrainer, Verdict
from dense import move
from tables import rows_of, tables_of
from test_trainer_parity import loss_and_gradients, prepared
from tiny import QUIET, build_model, build_tokenizer, save_model

TABLES = tables_of(__file__)

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
TOKENIZER = build_tokenizer()
ROWS = Dataset.from_list(rows_of(__file__, "option_pair_rows"))

# One choice besides the default for each option; its first option names it.
CHOICES = TABLES["choices"]

# Options whose effect begins with the second generation batch.
LATE = {"teacher_update_rate", "teacher_model_kind"}


def name_of(choice: int) -> str:
    return next(iter(CHOICES[choice]))


def text_of(choice: int) -> str:
    return f"{name_of(choice)}={CHOICES[choice][name_of(choice)]}"


def documented() -> list[tuple[set[str], set[str]]]:
    """The rows of settings and options that these disable, from docs/options.md."""
    text = PAGE.read_text("utf-8").partition("## Accepted without effect")[2].partition("\n## ")[0]
    table = text.partition("| setting | without effect |")[2]
    cells = [row.replace("all others", "`all others`").split("|")[1:3] for row in table.splitlines()[2:]]
    rows = [[set(re.findall(r"`([^`]+)`", cell)) for cell in row] for row in cells]
    return [(row[0], row[1]) for row in rows if len(row) == 2]


def is_documented(choice: int, paired_choice: int) -> bool:
    """Whether a row says that the other choice disables this one."""
    return any(
        {name_of(paired_choice), text_of(paired_choice)} & settings
        and {name_of(choice), text_of(choice), "all others"} & options
        for settings, options in documented()
    )


def test_every_option_is_walked_or_named_as_not_walked():
    credit_options = {f.name for f in fields(CreditConfig)} - {f.name for f in fields(GRPOConfig)}
    assert credit_options - {name for choice in CHOICES for name in choice} == set(TABLES["not_walked"])


def verdicts(completions, **kwargs):
    """A success, a middle reward before or after it, and failures, with feedback; nothing in the last group."""
    texts = [c[-1]["content"] for c in completions]
    rewards = [(1.0, 0.5, 0.0, 0.0)[(i + i // 4) % 4] if i < 12 else 0.0 for i in range(len(texts))]
    feedback = [f"Not {text!r}, {'look ' * 20} at {i}." if i < 12 else None for i, text in enumerate(texts)]
    return [Verdict(*pair) for pair in zip(rewards, feedback, strict=True)]


def options_of(choices: frozenset[int], teacher: str) -> dict[str, object]:
    """Options of several choices; the option that names a choice wins over another's further options."""
    chosen = {name: value for choice in choices for name, value in CHOICES[choice].items()}
    chosen |= {name_of(choice): CHOICES[choice][name_of(choice)] for choice in choices}
    return {name: teacher if value == "TEACHER" else value for name, value in chosen.items()}


class Walk:
    """Losses of runs, each run once."""

    def __init__(self, teacher: str) -> None:
        self.teacher = teacher  # path of another model
        self.known: dict[tuple[frozenset[int], int], list[float] | str] = {}

    def losses(self, choices: frozenset[int], batches: int) -> list[float] | str:
        """Loss and squared gradient norm of each generation batch, or the error of the construction."""
        key = choices, batches
        if key not in self.known:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    trainer = make_trainer(folder, options_of(choices, self.teacher))
                    self.known[key] = train(trainer, batches)
                except ValueError as error:
                    self.known[key] = str(error)
        return self.known[key]

    def is_neutral(self, choice: int, *trained_choices: int) -> bool:
        """Whether a choice changes nothing beside others that train."""
        names = {name_of(c) for c in (choice, *trained_choices)}
        batches = 2 if names & LATE else 1
        changed, unchanged = (
            self.losses(frozenset(c), batches) for c in ((choice, *trained_choices), trained_choices)
        )
        if isinstance(changed, str) or isinstance(unchanged, str):
            return False
        return changed == pytest.approx(unchanged, rel=1e-6, abs=1e-12)

    def unexplained(self) -> list[str]:
        """Pairs in which one choice has no effect and that no row names."""
        alone = {choice for choice in range(len(CHOICES)) if self.is_neutral(choice)}  # they need another option
        unnamed = [text_of(choice) for choice in alone if not any(is_documented(choice, o) for o in others(choice))]
        return unnamed + [
            f"{text_of(choice)} with {text_of(paired_choice)}"
            for choice in range(len(CHOICES))
            for paired_choice in others(choice)
            if choice not in alone
            and not is_documented(choice, paired_choice)
            and self.is_neutral(choice, paired_choice)
        ]


def others(choice: int) -> list[int]:
    """Choices beside which a choice must have an effect."""
    return [o for o in range(len(CHOICES)) if name_of(o) != name_of(choice)]


def make_trainer(folder: str, options: dict[str, object]) -> CreditTrainer:
    sizes = {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 3}
    config = CreditConfig(folder, **QUIET, **sizes, **options)
    trainer = CreditTrainer(build_model(TOKENIZER), verdicts, config, ROWS, processing_class=TOKENIZER)
    trainer._decode = lambda ids: [f"<think>since {sum(x)}</think>so {x[0]} {'so ' * (sum(x) % 7 * 16)}" for x in ids]
    if config.distillation_weight and config.teacher_model_kind in ("ema", "base"):
        move(trainer.teacher.model.parameters())
    return trainer


def train(trainer: CreditTrainer, batches: int) -> list[float]:
    losses = []
    for trainer._step in range(batches):
        loss, gradients = loss_and_gradients(trainer, prepared(trainer, rows=4))
        losses += [loss.item(), sum(g.double().pow(2).sum().item() for g in gradients.values())]
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                parameter -= 0.5 * gradients[name]
        if trainer.args.distillation_weight and trainer.args.teacher_model_kind == "ema":
            trainer.teacher.update(trainer.args.teacher_update_rate)
    return losses


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_each_option_of_a_pair_has_an_effect_or_is_documented(tmp_path):
    warnings.simplefilter("ignore")
    teacher = save_model(tmp_path / "teacher", seed=5, hidden_size=48)
    assert Walk(teacher).unexplained() == []
