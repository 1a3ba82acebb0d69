"""A case that nobody planted: SmolLM2-135M-Instruct learns to begin a sentence with a given word.

    python examples/smollm/first_word.py          # `make smollm`: SDPO and guide with λ = 1.5, ten steps each
    python examples/smollm/first_word.py --predict    # what each arm's target gives to the word, without training
    python examples/smollm/first_word.py --arms GRPO SDPO "CREDIT λ=0.1" --seeds 0 1 2 --steps 20 --csv first_word.csv

The model is not warmed up. A prompt asks for a sentence about a noun that begins with a word; the verdict wants the
word first, the noun, and five words or more; the feedback names the broken rule only. With that feedback in its prompt
the model tends to begin with the feedback's own wording ("The sentence …").

Every step prints the probability of the required first word on prompts with words that are not trained. The command
writes a page with the curves and answers before and after. With `--csv` it measures every `--every` steps only, and
writes a row for each: arm, seed, step, that probability, accuracy, transfer, length, KL divergence and perplexity on
unrelated prompts, the probability on prompts with trained words, and the share of answers with the noun. Runs that are
in the file are skipped.
"""

import argparse
import random
import re
import sys
from collections.abc import Sequence
from html import escape
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from credit_trl import CreditTrainer, Verdict, objective
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts
from credit_trl.evaluation import SamplingConfig
from credit_trl.lab.analysis import Checkpoint, analysis_config, map_response
from credit_trl.lab.analysis.drift import holding_coef
from credit_trl.lab.analysis.responses import Rollout, rollout_contexts
from credit_trl.lab.analysis.vocabulary_logps import CreditLogps, credit_logps, next_token_logps, vocabulary_logps
from credit_trl.tasks.quickstart import TEMPLATES

sys.path.append(str(Path(__file__).parents[1] / "study"))
from arms import ARMS, STYLES, made_by, make_trainer, read_options, with_options

STUDIED = (
    *("SDPO", "CREDIT λ=0.1", "CREDIT λ=0.2", "CREDIT λ=0.5"),
    *("CREDIT form=guide λ=1", "CREDIT form=guide λ=1.5", "temper-only λ=0.1"),
)
SHOWN = ("SDPO", "CREDIT form=guide λ=1.5")  # arms of the demonstration
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
    **TEMPLATES,  # SDPO's wording
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
# Requests that have nothing to do with the task: KL divergence from the base, and perplexity, of the base's answers.
UNRELATED = [
    {"prompt": [{"role": "user", "content": request.format(subject)}]}
    for request in ("Why do people like {}?", "Explain {} to a child.", "Name three things related to {}.")
    for subject in ("volcanoes", "bicycles", "honey bees", "the moon", "chess", "glass", "elephants", "bread")
]
MEASURED = ["probability", "accuracy", "transfer", "length", "kl", "perplexity", "trained", "noun"]
COLUMNS = ["arm", "seed", "step", *MEASURED, "version", "commit", "torch", "trl"]


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
    lowered = [word_said.lower() for word_said in words]
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
    return Verdict(float(broken is None), RULES[broken], {"first_word": float(keeps), "noun": float(is_about)})


def reward(completions: list, word: list[str], noun: list[str], **columns: Any) -> list[Verdict]:
    texts = [completion[-1]["content"] for completion in completions]
    return [verify(*sample) for sample in zip(texts, word, noun, strict=True)]


def first_word_probability(policy: Checkpoint, rows: Sequence[dict[str, Any]]) -> float:
    """Mean probability of the required word's first token as the first token of the answer."""
    prompt_ids, *further_ids = [policy.encode(row["prompt"]) for row in rows]
    probabilities = next_token_logps(policy.student, TokenContexts(prompt_ids, further_ids), []).exp()
    required = [policy.tokenizer(row["word"], add_special_tokens=False)["input_ids"][0] for row in rows]
    return probabilities[range(len(rows)), required].mean().item()


def answer(policy: Checkpoint, rows: Sequence[dict[str, Any]], seed: int | None = None) -> list[list[int]]:
    """Token ids of one answer to each row: greedy, or sampled at temperature 1 where a seed is given."""
    sampling = SamplingConfig(
        temperature=0.0 if seed is None else 1.0,
        top_p=1.0,
        max_completion_length=OPTIONS["max_completion_length"],
        seed=seed or 0,
    )
    return policy.generate([policy.encode(row["prompt"]) for row in rows], sampling)


def answer_logps(policy: Checkpoint, rows: Sequence[dict[str, Any]], answers: list[list[int]]) -> torch.Tensor:
    """Log-probabilities at each token of the answers, (tokens, V)."""
    parts = []
    for row, ids in zip(rows, answers, strict=True):
        prompt = TokenContexts(policy.encode(row["prompt"]))
        parts += [logps[0] for _, (logps,) in vocabulary_logps([(policy.student, prompt)], ids)]
    return torch.cat(parts)


def perplexity(logps: torch.Tensor, answers: list[list[int]]) -> float:
    """Perplexity per token of the answers, from log-probabilities of shape (tokens, V)."""
    tokens = torch.tensor([token for ids in answers for token in ids])
    return logps.gather(-1, tokens[:, None]).mean().neg().exp().item()


def grade(policy: Checkpoint, rows: Sequence[dict[str, Any]], answers: list[list[int]]) -> list[Verdict]:
    """Verdicts of answers, which are token ids."""
    texts = policy.tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [verify(text, row["word"], row["noun"], row["constraint"]) for text, row in zip(texts, rows, strict=True)]


class Measurements(TrainerCallback):
    """Measures the probability after every step, or all columns of the table every `every` steps."""

    def __init__(self, trainer: CreditTrainer, arm: str, every: int | None, prompts: int) -> None:
        self.policy = Checkpoint.from_model(trainer.model, trainer.processing_class)
        self.arm = arm
        self.every = every
        self.rows = make_rows(HELD_OUT)[:prompts]
        self.trained = make_rows(WORDS)[: 2 * prompts]  # there are twice as many words
        self.others = make_rows(HELD_OUT, constraint="last")[: prompts // 2]
        self.others += make_rows(HELD_OUT, constraint="lower")[: prompts // 2]
        self.curve: list[float] = []
        self.table: list[dict[str, Any]] = []
        if every is not None:
            self.unrelated = UNRELATED[:prompts]
            self.base_answers = answer(self.policy, self.unrelated)
            self.base_logps = answer_logps(self.policy, self.unrelated, self.base_answers)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        step = state.global_step
        if self.every is not None and step % self.every != 0:
            return
        was_training = model.training
        model.eval()
        self.curve.append(first_word_probability(self.policy, self.rows))
        name = STYLES.get(self.arm, [self.arm])[0]
        print(f"{name:20} step {step:3}  p(required first word) {self.curve[-1]:.3f}", flush=True)
        if self.every is not None:
            self.table.append({"step": step, "probability": self.curve[-1]} | self._columns(step))
        model.train(was_training)

    def _columns(self, step: int) -> dict[str, float]:
        answers = answer(self.policy, self.rows, seed=step)
        graded = grade(self.policy, self.rows, answers)
        transfer = grade(self.policy, self.others, answer(self.policy, self.others, seed=step))
        logps = answer_logps(self.policy, self.unrelated, self.base_answers)
        return {
            "accuracy": mean(verdict.reward for verdict in graded),
            "transfer": mean(verdict.reward for verdict in transfer),
            "length": sum(map(len, answers)) / len(answers),
            "kl": (self.base_logps.exp() * (self.base_logps - logps)).sum(-1).mean().item(),
            "perplexity": perplexity(logps, self.base_answers),
            "trained": first_word_probability(self.policy, self.trained),
            "noun": mean(verdict.metrics["noun"] for verdict in graded),
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
    rows = Dataset.from_list(make_rows(WORDS))
    trainer = make_trainer(arm, OPTIONS | ARMS[arm] | options | {"seed": seed}, model, reward, rows, tokenizer)
    trainer.remove_callback(PrinterCallback)
    measurements = Measurements(trainer, arm, every, prompts)
    trainer.add_callback(measurements)
    trainer.train()
    return measurements


def predict(checkpoint: Checkpoint, prompts: int = 24) -> str:
    """Markdown of what each arm's target gives to the required first word, and of λ_hold of the teacher's first word.

    The privileged context is the feedback that the word is missing. The target has the buckets of the loss; a word in
    the tail has the policy's share of it.
    """
    rows = make_rows(HELD_OUT)[:prompts]
    z = PrivilegedContext(feedback=RULES["first"])
    config = analysis_config(contrastive_count=3, use_successful_as_teacher=False, **TEMPLATES)
    table = []
    for i, row in enumerate(rows):
        word = checkpoint.tokenizer(row["word"], add_special_tokens=False)["input_ids"][0]
        contrasts = tuple(rows[i - n]["prompt"] for n in (1, 2, 3))
        contexts = rollout_contexts(Rollout(str(i), row["prompt"], (word,), z, contrasts), config, checkpoint)
        ((_, logps),) = credit_logps(checkpoint, contexts, (word,), 1.0)
        values = {arm: target_probability(logps, word, arm) for arm in STUDIED}
        table.append({"policy": logps.student[0, word].exp().item()} | values | branch_of(logps, word))
    frame = pd.DataFrame(table)
    lines = ["| | probability of the required word |", "| --- | ---: |", f"| policy | {frame['policy'].mean():.3f} |"]
    lines += [f"| {STYLES[arm][0]} | {frame[arm].mean():.3f} |" for arm in STUDIED]
    log_odds, delta, s = frame[["log_odds", "delta", "s"]].median()
    holds = [holding_coef(log_odds, delta, s, form) for form in ("subtract", "guide")]
    texts = f"ℓ_0 {log_odds:.2f}, δ {delta:.2f}, s {s:.2f}", "λ_hold {:.2f}, of guide {:.2f}".format(*holds)
    return "\n".join([*lines, "", f"Medians over {len(rows)} prompts: {', '.join(texts)}."])


def target_probability(logps: CreditLogps, word: int, arm: str) -> float:
    """Probability of a token in an arm's target at the first position of the answer."""
    coef = ARMS[arm]["contrastive_coef"]
    form = ARMS[arm].get("contrastive_form", "subtract")
    distilled = logps.teacher[0]
    if arm.startswith("temper-only"):  # tempers the whole vocabulary, and has no contrast
        distilled, coef = ((1.0 - coef) * distilled).log_softmax(-1), 0.0
    support = distilled.topk(OPTIONS["distillation_topk"]).indices
    policy, teacher, *contrasts = (
        objective.add_tail_bucket(context_logps[support], context_logps.scatter(-1, support, -torch.inf).logsumexp(-1))
        for context_logps in (logps.student[0], distilled, *logps.contrasts[:, 0])
    )
    generic = objective.input_generic(torch.stack(contrasts))
    target = objective.credit_target(teacher, generic, coef, form).softmax(-1)
    if word in support:
        return target[:-1][support == word].item()
    return (target[-1] * (logps.student[0, word] - policy[-1]).exp()).item()


def branch_of(logps: CreditLogps, word: int) -> dict[str, float]:
    """ℓ_0, δ and s of the likeliest other first token of the teacher against the required word."""
    student, teacher = logps.student[0], logps.teacher[0]
    generic = objective.input_generic(logps.contrasts)[0]
    alternative = teacher.scatter(-1, torch.tensor([word]), -torch.inf).argmax()
    odds = [(distribution[alternative] - distribution[word]).item() for distribution in (student, teacher, generic)]
    return {"log_odds": odds[0], "delta": odds[1] - odds[0], "s": odds[2] - odds[1]}


def run_study(args: argparse.Namespace, load: Any) -> None:
    """Append the rows of the arms and seeds that the table does not have, with their versions, and print the means."""
    versions = made_by()
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    changes = read_options(args.set)
    for seed, arm in product(args.seeds, args.arms):
        name, _ = with_options(arm, changes)
        stored = pd.read_csv(args.csv) if args.csv.exists() else pd.DataFrame(columns=COLUMNS)
        known_steps = stored.loc[(stored["arm"] == name) & (stored["seed"] == seed), "step"]
        if (known_steps == args.steps).any():
            continue
        options = changes | {"max_steps": args.steps, "output_dir": str(args.output_dir / f"{name}-seed{seed}")}
        measured = train(*load(), arm, seed, args.every, **options)
        rows = pd.DataFrame([{"arm": name, "seed": seed} | row | versions for row in measured.table], columns=COLUMNS)
        rows = rows[~rows["step"].isin(known_steps)]  # a longer run repeats those of a shorter one
        rows.to_csv(args.csv, mode="a", header=not args.csv.exists(), index=False)
    print(study_table(pd.read_csv(args.csv), args.steps))


def study_table(rows: pd.DataFrame, step: int, baseline: str = "SDPO") -> str:
    """Markdown of the measurements at a step: means over seeds ± the half of Student's 95 % interval.

    The last two columns are the differences from the baseline on the same seeds.
    """
    compared = ("probability", "accuracy")
    lines = [f"| | seeds | {' | '.join((*MEASURED, *(f'{name}, minus {baseline}' for name in compared)))} |"]
    lines.append("| --- |" + " ---: |" * (1 + len(MEASURED) + len(compared)))
    base = rows[(rows["step"] == 0) & (rows["arm"] == rows["arm"].iloc[0])]
    rows = rows[rows["step"] == step].set_index("seed")
    reference = rows[rows["arm"] == baseline]
    for arm, arm_rows in [("base", base), *rows.groupby("arm", sort=False)]:
        cells = [mean_text(arm_rows[name]) for name in MEASURED]
        differences = (
            [] if arm in ("base", baseline) else [(arm_rows[name] - reference[name]).dropna() for name in compared]
        )
        lines.append(f"| {arm} | {len(arm_rows)} | {' | '.join([*cells, *map(mean_text, differences)])} |")
    return "\n".join(lines)


def mean_text(values: pd.Series) -> str:
    """Mean with the half of its interval, if there are two different values or more; rows may lack the measurement."""
    values = values.dropna()
    mean = f"{values.mean():.3f}"
    if values.nunique() < 2:
        return mean
    return f"{mean} ± {stats.t.ppf(0.975, len(values) - 1) * values.sem():.3f}"


def demonstrate(args: argparse.Namespace, load: Any) -> Path:
    """Train the arms of the demonstration and write the page."""
    curves = {}
    model, tokenizer = load()
    rows = make_rows(HELD_OUT)[:5]
    base = Checkpoint.from_model(model.eval(), tokenizer, name="base")
    base_answers = answer(base, rows)
    columns = {"prompt": [escape(row["prompt"][0]["content"]) for row in rows]}
    for arm in args.arms:
        columns[f"before, R_t of {STYLES[arm][0]}"] = [
            colored(base, arm, rows, i, ids) for i, ids in enumerate(base_answers)
        ]
    for arm in args.arms:
        folder = args.output_dir / arm
        measured = train(*load(), arm, args.seeds[0], None, max_steps=args.steps, output_dir=str(folder))
        curves[arm] = measured.curve
        trained_answers = tokenizer.batch_decode(answer(measured.policy, rows), skip_special_tokens=True)
        columns[f"after {args.steps} steps of {STYLES[arm][0]}"] = list(map(escape, trained_answers))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    file = args.output_dir / "first_word.html"
    file.write_text(page(curves, pd.DataFrame(columns)), encoding="utf-8")
    return file


def colored(base: Checkpoint, arm: str, rows: Sequence[dict[str, Any]], i: int, ids: list[int]) -> str:
    """HTML of an answer to row i, each token colored by R_t minus the policy's mean: a step raises red ones."""
    row = rows[i]
    text = base.tokenizer.decode(ids, skip_special_tokens=True)
    z = PrivilegedContext(feedback=verify(text, row["word"], row["noun"]).feedback)
    contrasts = tuple(contrast_row["prompt"] for contrast_row in rows if contrast_row is not row)
    config = analysis_config(**ARMS[arm], **TEMPLATES, distillation_topk=OPTIONS["distillation_topk"])
    token_map = map_response(base, Rollout(str(i), row["prompt"], tuple(ids), z, contrasts), config)
    spans = []
    for token, value in zip(token_map.tokens, token_map.scores.centred.tolist(), strict=True):
        color = f"rgba({'214,47,39' if value > 0 else '33,102,190'},{min(1.0, abs(value) / 3.0):.2f})"
        spans.append(f'<span style="background:{color}" title="{value:+.2f}">{escape(token.text)}</span>')
    return "".join(spans)


def page(curves: dict[str, list[float]], answers: pd.DataFrame) -> str:
    """HTML with the curve of every arm and the answers beside each other, whose cells are HTML."""
    lines, legend = [], []
    for arm, curve in curves.items():
        name, color = STYLES[arm]
        width = 560 / max(len(curve) - 1, 1)
        points = " ".join(f"{40 + width * step:.0f},{220 - 200 * p:.0f}" for step, p in enumerate(curve))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        legend.append(f'<span style="color:{color}">{escape(name)}: {curve[0]:.3f} → {curve[-1]:.3f}</span>')
    with pd.option_context("display.max_colwidth", None):
        table = answers.to_html(index=False, escape=False, border=0, justify="left")
    return f"""<!doctype html><meta charset="utf-8"><title>First word</title><style>:root{{color-scheme:light dark}}
body{{font:16px sans-serif;max-width:75em;margin:2em auto}}svg{{max-width:620px}}text{{fill:currentColor}}
td,th{{text-align:left;vertical-align:top;padding:.4em;border-top:1px solid gray}}</style>
<h1>Begin with the given word</h1>
<p>Probability of the required first word, by step, on words that are not trained. {" · ".join(legend)}</p>
<svg viewBox="0 0 620 240"><path d="M40 20V220H600" fill="none" stroke="gray"/>
<text x="2" y="26">1</text><text x="2" y="224">0</text>{"".join(lines)}</svg>
<h2>Greedy answers</h2><p>Tokens before training are colored by R_t minus its mean under the policy: a step raises red
ones and lowers blue ones.</p>{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name (default: SmolLM2-135M-Instruct, from hub or wheel)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(SHOWN), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="the demonstration uses the first")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every", type=int, default=10, help="steps between rows of the table")
    parser.add_argument("--predict", action="store_true", help="print the targets before training and train nothing")
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="options of every arm of a study")
    parser.add_argument("--csv", type=Path, help="run a study: append a row per measured step to this table")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/first_word"))
    args = parser.parse_args()

    def load() -> tuple[Any, Any]:
        from smollm2 import smollm2_directory

        directory = args.model or smollm2_directory()
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(directory)

    if args.predict:
        model, tokenizer = load()
        print(predict(Checkpoint.from_model(model.eval(), tokenizer, name="base")))
    elif args.csv:
        run_study(args, load)
    else:
        print(f"The curves and five answers: {demonstrate(args, load).resolve()}")


if __name__ == "__main__":
    main()
