"""A case that nobody planted: SmolLM2-135M-Instruct learns to begin a sentence with a given word.

    python examples/smollm/first_word.py          # `make smollm`: SDPO and guide with λ = 1.5, ten steps each
    python examples/smollm/first_word.py --arms GRPO SDPO "λ=0.1" --seeds 0 1 2 --steps 20 --csv first_word.csv

The model is not warmed up. A prompt asks for a sentence about a noun that begins with a word; the verdict wants the
word first, the noun, and five words or more; the feedback names the broken rule only. With that feedback in its prompt
the model tends to begin with the feedback's own wording ("The sentence …").

Measured in one run each, the probability of the required first word on words that are not trained: .084 before
training; SDPO .112 after four steps, .067 after six and .048 after seven; guide with λ = 1.5 .221 after five.

Every step prints the probability of the required first word on prompts with words that are not trained. The command
writes a page with the curves and answers before and after; with `--csv` a row per measured step: arm, seed, step,
accuracy, transfer, length, kl. Runs that are in the file are skipped.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from credit_trl import CreditConfig, CreditTrainer, Verdict

FAMILY = Path(__file__).parents[1] / "family"
ARMS: dict[str, dict[str, Any]] = {
    "GRPO": {"distillation_weight": 0.0},
    "SDPO": {"contrastive_coef": 0.0},
    "λ=0.1": {"contrastive_coef": 0.1},
    "λ=0.2": {"contrastive_coef": 0.2},
    "λ=0.5": {"contrastive_coef": 0.5},
    "guide 1": {"contrastive_coef": 1.0, "contrastive_form": "guide"},
    "guide 1.5": {"contrastive_coef": 1.5, "contrastive_form": "guide"},
    "temper-only": {"contrastive_coef": 0.1},
}
SHOWN = ("SDPO", "guide 1.5")  # arms of the demonstration
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 16,  # 4 prompts × 4 rollouts
    "num_generations": 4,
    "max_completion_length": 20,
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 3,
    "teacher_model_kind": "base",
    "distillation_topk": 20,
    "use_successful_as_teacher": False,
    "packed": True,
    "reprompt_template": "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
    "feedback_template": ("\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"),
    "use_cpu": not torch.accelerator.is_available(),
    "bf16": torch.accelerator.is_available(),
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
}

WORDS = "Today Sometimes Every Old Green Two When After Many Little Nobody Under Here Some Maybe Look".split()
HELD_OUT = "There My Yesterday If Now Often Three Small".split()
NOUNS = (
    "dog river garden train book window teacher bridge apple winter kitchen horse song market forest lamp ship baker "
    "cloud school road island letter clock"
).split()
RULES = {
    "first": "The sentence does not begin with the required word.",
    "last": "The sentence does not end with the required word.",
    "lower": "The sentence has upper case letters.",
    "noun": "The sentence does not contain the required noun.",
    "length": "The sentence has fewer than five words.",
    None: "The sentence keeps every rule.",
}
# Requests that have nothing to do with the task, for the KL divergence from the base on its own answers.
UNRELATED = [
    {"prompt": [{"role": "user", "content": request.format(subject)}]}
    for request in ("Why do people like {}?", "Explain {} to a child.", "Name three things related to {}.")
    for subject in ("volcanoes", "bicycles", "honey bees", "the moon", "chess", "glass", "elephants", "bread")
]
COLUMNS = ("arm", "seed", "step", "accuracy", "transfer", "length", "kl", "version", "commit", "torch", "trl")


def make_rows(words: Sequence[str], nouns: Sequence[str] = NOUNS, constraint: str = "first") -> list[dict[str, Any]]:
    """A prompt for every word and noun, in random order, with the columns `word`, `noun` and `constraint`.

    `first` is trained. `last` (end with the word) and `lower` (lower case only) measure transfer.
    """
    texts = {
        "first": 'Write one sentence about a {noun}. Begin with the word "{word}".',
        "last": 'Write one sentence about a {noun}. End with the word "{word}".',
        "lower": "Write one sentence about a {noun}. Use lower case letters only.",
    }
    pairs = [(word, noun) for word in words for noun in nouns]
    random.Random(constraint).shuffle(pairs)
    return [
        {
            "prompt": [{"role": "user", "content": texts[constraint].format(word=word, noun=noun)}],
            "word": word,
            "noun": noun,
            "constraint": constraint,
        }
        for word, noun in pairs
    ]


def verify(text: str, word: str, noun: str, constraint: str = "first") -> Verdict:
    """Grade a sentence; the feedback names the first broken rule, or says that there is none."""
    words = re.findall(r"[A-Za-z']+", text)
    lowered = [one.lower() for one in words]
    keeps = {
        "first": words[:1] == [word],
        "last": lowered[-1:] == [word.lower()],
        "lower": bool(words) and words == lowered,
    }[constraint]
    is_about = noun in lowered or f"{noun}s" in lowered
    broken = None if keeps else constraint
    if broken is None and not is_about:
        broken = "noun"
    if broken is None and len(words) < 5:
        broken = "length"
    return Verdict(float(broken is None), RULES[broken], {"first_word": float(keeps)})


def reward(completions: list, word: list[str], noun: list[str], **columns: Any) -> list[Verdict]:
    texts = [completion[-1]["content"] for completion in completions]
    return [verify(*one) for one in zip(texts, word, noun, strict=True)]


@torch.no_grad()
def first_word_probability(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> float:
    """Mean probability of the required word's first token as the first token of the answer."""
    batch = encode(tokenizer, rows).to(model.device)
    probabilities = model(**batch, logits_to_keep=1).logits[:, -1].float().softmax(-1)
    first = [tokenizer(row["word"], add_special_tokens=False)["input_ids"][0] for row in rows]
    return probabilities[range(len(rows)), first].mean().item()


@torch.no_grad()
def answer(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], seed: int | None = None) -> list[list[int]]:
    """Token ids of one answer to each row: greedy, or sampled at temperature 1 where a seed is given."""
    options = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    batch = encode(tokenizer, rows).to(model.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed or 0)
        ids = model.generate(**batch, **options, max_new_tokens=OPTIONS["max_completion_length"])
    found = ids[:, batch["input_ids"].shape[1] :].tolist()
    return [[token for token in one if token != tokenizer.pad_token_id] for one in found]


def encode(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> Any:
    texts = tokenizer.apply_chat_template([row["prompt"] for row in rows], add_generation_prompt=True, tokenize=False)
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)


@torch.no_grad()
def answer_logps(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], answers: list[list[int]]) -> torch.Tensor:
    """Log-probabilities at each token of the answers, (tokens, V)."""
    found = []
    for row, ids in zip(rows, answers, strict=True):
        prompt = encode(tokenizer, [row])["input_ids"]
        whole = torch.cat([prompt, torch.tensor([ids])], dim=1).to(model.device)
        found.append(model(whole).logits[0, prompt.shape[1] - 1 : -1].float().log_softmax(-1))
    return torch.cat(found)


def accuracy(tokenizer: Any, rows: Sequence[dict[str, Any]], answers: Sequence[Sequence[int]]) -> float:
    graded = [
        verify(tokenizer.decode(ids, skip_special_tokens=True), row["word"], row["noun"], row["constraint"]).reward
        for row, ids in zip(rows, answers, strict=True)
    ]
    return sum(graded) / len(graded)


class Measurements(TrainerCallback):
    """Measures the policy after every step, and with `every` also the columns of the table."""

    def __init__(self, trainer: CreditTrainer, arm: str, every: int | None, prompts: int) -> None:
        self.trainer = trainer
        self.arm = arm
        self.every = every
        self.tokenizer = trainer.processing_class
        self.rows = make_rows(HELD_OUT)[:prompts]
        self.others = make_rows(HELD_OUT, constraint="last")[: prompts // 2]
        self.others += make_rows(HELD_OUT, constraint="lower")[: prompts // 2]
        self.curve: list[float] = []
        self.table: list[dict[str, Any]] = []
        if every is not None:
            self.unrelated = UNRELATED[:prompts]
            self.base_answers = answer(trainer.model, self.tokenizer, self.unrelated)
            self.base_logps = answer_logps(trainer.model, self.tokenizer, self.unrelated, self.base_answers)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measure(state.global_step)

    def _measure(self, step: int) -> None:
        model = self.trainer.model
        was_training = model.training
        model.eval()
        self.curve.append(first_word_probability(model, self.tokenizer, self.rows))
        print(f"{self.arm:12} step {step:3}  p(required first word) {self.curve[-1]:.3f}", flush=True)
        if self.every is not None and step % self.every == 0:
            self.table.append({"step": step} | self._columns(model, step))
        model.train(was_training)

    def _columns(self, model: Any, step: int) -> dict[str, float]:
        answers = answer(model, self.tokenizer, self.rows, seed=step)
        others = answer(model, self.tokenizer, self.others, seed=step)
        logps = answer_logps(model, self.tokenizer, self.unrelated, self.base_answers)
        return {
            "accuracy": accuracy(self.tokenizer, self.rows, answers),
            "transfer": accuracy(self.tokenizer, self.others, others),
            "length": sum(map(len, answers)) / len(answers),
            "kl": (self.base_logps.exp() * (self.base_logps - logps)).sum(-1).mean().item(),
        }


def train(
    model: Any, tokenizer: Any, arm: str, seed: int, every: int | None, prompts: int = 24, **options: Any
) -> Any:
    """Train an arm and return its `Measurements`.

    Args:
        model: the base, which is changed.
        tokenizer: its tokenizer.
        arm: a name of `ARMS`.
        seed: seed of the order of prompts and of sampling.
        every: steps between rows of the table; None for the curve alone.
        prompts: number of prompts with held-out words that are measured.
        **options: options of `CreditConfig` in place of `OPTIONS`.
    """
    trainer = make_trainer(arm, OPTIONS | ARMS[arm] | options | {"seed": seed}, model, tokenizer)
    trainer.remove_callback(PrinterCallback)
    measurements = Measurements(trainer, arm, every, prompts)
    trainer.add_callback(measurements)
    trainer.train()
    return measurements


def make_trainer(arm: str, options: dict[str, Any], model: Any, tokenizer: Any) -> CreditTrainer:
    """The trainer of an arm. Temper-only, of examples/family, has the target (1 − λ) f in place of f − λ Ĝ."""
    is_tempered = arm == "temper-only"
    config = CreditConfig(**options | ({"contrastive_coef": 0.0} if is_tempered else {}))
    rows = Dataset.from_list(make_rows(WORDS))
    trainer = CreditTrainer(model, reward, config, rows, processing_class=tokenizer)
    if is_tempered:
        sys.path.append(str(FAMILY))
        importlib.import_module("temper_only").temper(trainer.credit_step, options["contrastive_coef"])
    return trainer


def run_study(args: argparse.Namespace, load: Any) -> None:
    """Append the rows of the arms and seeds that the table does not have."""
    for seed in args.seeds:
        for arm in args.arms:
            if (arm, str(seed), str(args.steps)) in read_keys(args.csv):
                continue
            folder = args.output_dir / f"{arm}-seed{seed}"
            found = train(*load(), arm, seed, args.every, max_steps=args.steps, output_dir=str(folder))
            append(args.csv, [{"arm": arm, "seed": seed} | row for row in found.table])


def read_keys(file: Path) -> set[tuple[str, str, str]]:
    if not file.is_file():
        return set()
    with file.open(encoding="utf-8", newline="") as lines:
        return {(row["arm"], row["seed"], row["step"]) for row in csv.DictReader(lines)}


def append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows with the versions that made them, one process at a time."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    made_by = {"version": version("credit-trl"), "commit": commit, "torch": version("torch"), "trl": version("trl")}
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        is_new = not file.exists()
        with file.open("a", encoding="utf-8", newline="") as lines:
            writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows(row | made_by for row in rows)


def demonstrate(args: argparse.Namespace, load: Any) -> Path:
    """Train the arms of the demonstration and write the page."""
    curves = {}
    model, tokenizer = load()
    rows = make_rows(HELD_OUT)[:5]
    answers = {"before": answer(model, tokenizer, rows)}
    for arm in args.arms:
        model, tokenizer = load()
        folder = args.output_dir / arm
        measured = train(model, tokenizer, arm, args.seeds[0], None, max_steps=args.steps, output_dir=str(folder))
        curves[arm] = measured.curve
        answers[arm] = answer(measured.trainer.model.eval(), tokenizer, rows)
    texts = {name: [tokenizer.decode(ids, skip_special_tokens=True) for ids in of] for name, of in answers.items()}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    file = args.output_dir / "first_word.html"
    file.write_text(page(curves, rows, texts), encoding="utf-8")
    return file


def page(curves: dict[str, list[float]], rows: Sequence[dict[str, Any]], texts: dict[str, list[str]]) -> str:
    """HTML with the curve of every arm and the answers beside each other."""
    colors = ("#c0392b", "#2471a3", "#7d3c98", "#1e8449")
    lines, legend = [], []
    for (arm, curve), color in zip(curves.items(), colors * len(curves), strict=False):
        width = 560 / max(len(curve) - 1, 1)
        points = " ".join(f"{40 + width * step:.0f},{220 - 200 * p:.0f}" for step, p in enumerate(curve))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        legend.append(f'<span style="color:{color}">{escape(arm)}: {curve[0]:.3f} → {curve[-1]:.3f}</span>')
    axes = (
        '<path d="M40 20V220H600" fill="none" stroke="gray"/><text x="2" y="26">1</text><text x="2" y="224">0</text>'
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in ("prompt", *texts))
    body = "".join(
        f"<tr><td>{escape(row['prompt'][0]['content'])}</td>"
        + "".join(f"<td>{escape(of[number])}</td>" for of in texts.values())
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        '<!doctype html><meta charset="utf-8"><title>First word</title>'
        "<style>body{font:16px sans-serif;max-width:60em;margin:2em auto}"
        "td,th{text-align:left;vertical-align:top;padding:.4em;border-top:1px solid #ccc}</style>"
        "<h1>Begin with the given word</h1><p>Probability of the required first word, by step, on words that are not "
        f'trained. {" · ".join(legend)}</p><svg viewBox="0 0 620 240">{axes}{"".join(lines)}</svg>'
        f"<h2>Greedy answers before training and after</h2><table><tr>{head}</tr>{body}</table>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name (default: SmolLM2-135M-Instruct, from hub or wheel)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(SHOWN), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="the demonstration uses the first")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every", type=int, default=10, help="steps between rows of the table")
    parser.add_argument("--csv", type=Path, help="run a study: append a row per measured step to this table")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/first_word"))
    args = parser.parse_args()

    def load() -> tuple[Any, Any]:
        from smollm2 import smollm2_directory

        directory = args.model or smollm2_directory()
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(directory)

    if args.csv:
        run_study(args, load)
    else:
        print(f"The curves and five answers: {demonstrate(args, load).resolve()}")


if __name__ == "__main__":
    main()
