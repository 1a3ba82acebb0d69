"""Instruction following on a public benchmark: SmolLM2-135M-Instruct learns rules, graded by IFEval's checkers.

    python examples/ifeval/run.py    # `make ifeval`: answers of the base, GRPO and guide to 20 held-out prompts
    python examples/ifeval/run.py --base_rates
    python examples/ifeval/run.py --predict --csv results/predicted.csv
    python examples/ifeval/run.py --rates 3e-6 1e-5 3e-5 --seeds 100 --csv results/rates.csv --official none
    python examples/ifeval/run.py --arms GRPO SDPO --seeds 0 1 2 --rates_from results/rates.csv --csv results/runs.csv
    python examples/ifeval/run.py --table results/runs.csv

A study trains each arm on each seed and appends a row for each set of prompts and instruction type: `topics`
(held-out topics and arguments), `rules` (rule types that are not trained), `official` (IFEval's prompts with one
instruction), all with greedy answers, and `unrelated`, with the KL divergence from the base and the perplexity of the
base's answers. The base has rows, too. Runs that are in the file are skipped, so an interrupted study continues.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from ifeval_task import MISTAKE_STATED, ORIGINAL_TEXT, RULE_NAMED
from prompts import TRAINED_TYPES
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from credit_trl.evaluation import SamplingConfig
from credit_trl.evaluation.statistics import holm
from credit_trl.lab.analysis import Checkpoint
from credit_trl.tasks.registry import as_task

sys.path.append(str(Path(__file__).parents[1] / "smollm"))
sys.path.append(str(Path(__file__).parents[1] / "study"))
import first_word
from arms import ARMS, STYLES, made_by, make_trainer, read_options, with_options

STUDIED = (
    *("GRPO", "SDPO", "CREDIT λ=0.1", "CREDIT λ=0.5", "CREDIT form=guide λ=1"),
    *("CREDIT form=guide λ=1.5", "GRPO and guide λ=1.5"),
)
SHOWN = ("GRPO", "CREDIT form=guide λ=1.5")  # arms of the demonstration
SHOWN_PROMPTS = 20
OPTIONS: dict[str, Any] = first_word.OPTIONS | {
    "per_device_train_batch_size": 16,  # 2 prompts × 8 rollouts
    "num_generations": 8,
    "max_completion_length": 64,
}
TASKS = {"A": RULE_NAMED, "B": MISTAKE_STATED, "original": ORIGINAL_TEXT}  # by feedback, or by what is rewarded
SPLITS = {"topics": "test", "rules": "rules", "official": "official"}
SCORES = ["strict", "loose", "topic", "copied", "original"]
RUN = ["arm", "feedback", "learning_rate", "seed", "step"]
COLUMNS = [
    *RUN,
    *("set", "type", "prompts", *SCORES, "length", "kl", "perplexity"),
    *("version", "commit", "torch", "transformers", "trl"),
]
# Columns of the table: set of prompts, whether their types are trained (None for all), and measurement.
CELLS = {
    "topics": ("topics", None, "strict"),
    "rules": ("rules", None, "strict"),
    "official, trained types": ("official", True, "strict"),
    "loose": ("official", True, "loose"),
    "official, others": ("official", False, "strict"),
    "topic kept": ("topics", None, "topic"),
    "copied": ("topics", None, "copied"),
    "original": ("topics", None, "original"),
    "tokens": ("topics", None, "length"),
    "KL": ("unrelated", None, "kl"),
    "perplexity": ("unrelated", None, "perplexity"),
}
Load = Callable[[], tuple[Any, Any]]


@dataclass(frozen=True)
class Measurement:
    """The prompts that a study measures, and the base's answers to unrelated ones with their log-probabilities."""

    sets: dict[str, list[dict[str, Any]]]
    base_answers: list[list[int]]
    base_logps: torch.Tensor

    @classmethod
    def of_base(cls, base: Checkpoint, official: str | None, prompts: int | None) -> "Measurement":
        """Prompts of the sets, at most `prompts` each; `official` is IFEval's file, "hub", or None for none."""
        sets = {}
        for name, split in SPLITS.items():
            if name != "official":
                sets[name] = RULE_NAMED.build(split).to_list()[:prompts]
            elif official is not None:
                path = None if official == "hub" else official
                sets[name] = RULE_NAMED.build(split, path).to_list()[:prompts]
        unrelated = first_word.UNRELATED[:prompts]
        answers = first_word.answer(base, unrelated)
        return cls(sets, answers, first_word.answer_logps(base, unrelated, answers))

    def rows(self, policy: Checkpoint) -> list[dict[str, Any]]:
        """A row for each set and instruction type, and one for unrelated prompts."""
        rows = []
        for name, prompts in self.sets.items():
            answers = answers_to(policy, prompts)
            graded = pd.DataFrame(grade(policy, prompts, answers))
            for instruction, group in graded.groupby("type", sort=False):
                means = group.drop(columns="type").mean().to_dict()
                rows.append({"set": name, "type": instruction, "prompts": len(group)} | means)
        unrelated = first_word.UNRELATED[: len(self.base_answers)]
        logps = first_word.answer_logps(policy, unrelated, self.base_answers)
        kl = (self.base_logps.exp() * (self.base_logps - logps)).sum(-1).mean().item()
        perplexity = first_word.perplexity(logps, self.base_answers)
        rows.append({"set": "unrelated", "type": "all", "prompts": len(unrelated), "kl": kl, "perplexity": perplexity})
        return rows


def answers_to(policy: Checkpoint, prompts: Sequence[dict[str, Any]], temperature: float = 0.0) -> list[list[int]]:
    """Token ids of an answer to each prompt, greedy by default."""
    length = OPTIONS["max_completion_length"]
    sampling = SamplingConfig(temperature=temperature, top_p=1.0, max_completion_length=length)
    return policy.generate([policy.encode(row["prompt"]) for row in prompts], sampling, batch_size=16)


def grade(policy: Checkpoint, prompts: Sequence[dict[str, Any]], answers: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Instruction type, scores and length in tokens of each answer; of several instructions the first type."""
    texts = policy.tokenizer.batch_decode(answers, skip_special_tokens=True)
    rows = []
    for row, ids, text in zip(prompts, answers, texts, strict=True):
        verdict = RULE_NAMED.verify(text, row["answer"])
        rows.append({"type": row["type"], "length": len(ids), **verdict.metrics})
    return rows


def train(load: Load, arm: str, feedback: str, options: dict[str, Any]) -> Checkpoint:
    """Train an arm from the base and return its policy."""
    model, tokenizer = load()
    task = as_task(TASKS[feedback], "ifeval")
    trainer = make_trainer(arm, OPTIONS | ARMS[arm] | options, model, task.reward, task.build("train"), tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.eval()
    return Checkpoint.from_model(model, tokenizer)


def run_study(args: argparse.Namespace, load: Load) -> None:
    """Append the rows of the base and of the runs that the table does not have."""
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    changes = read_options(args.set)
    chosen = chosen_rates(args.rates_from, args.seeds) if args.rates_from else {}
    model, tokenizer = load()
    base = Checkpoint.from_model(model.eval(), tokenizer, name="base")
    measurement = Measurement.of_base(base, None if args.official == "none" else args.official, args.prompts)
    if not is_stored(args.csv, {"arm": "base"}):
        append_rows(args.csv, {"arm": "base", "step": 0}, measurement.rows(base))
    for seed, feedback, arm in product(args.seeds, args.feedback, args.arms):
        name, _ = with_options(arm, changes)
        rates = args.rates or [chosen.get((name, feedback), OPTIONS["learning_rate"])]
        for rate in rates:
            run = {"arm": name, "feedback": feedback, "learning_rate": rate, "seed": seed, "step": args.steps}
            if is_stored(args.csv, run):
                continue
            folder = args.output_dir / f"{name}-{feedback}-{rate:g}-seed{seed}"
            steps = {"learning_rate": rate, "seed": seed, "max_steps": args.steps, "output_dir": str(folder)}
            append_rows(args.csv, run, measurement.rows(train(load, arm, feedback, changes | steps)))
            print(f"{name}, feedback {feedback}, learning rate {rate:g}, seed {seed}", flush=True)


def is_stored(file: Path, run: dict[str, Any]) -> bool:
    """Whether the table has a row of a run."""
    if not file.exists():
        return False
    rows = pd.read_csv(file)
    return bool((rows[list(run)] == pd.Series(run)).all(axis=1).any())


def append_rows(file: Path, run: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Append the rows of a run, at once, with commit and versions."""
    frame = pd.DataFrame([run | row | made_by() for row in rows], columns=COLUMNS)
    frame.to_csv(file, mode="a", header=not file.exists(), index=False)


def chosen_rates(file: Path, seeds: Sequence[int]) -> dict[tuple[str, str], float]:
    """The learning rate of each arm and feedback with the best strict score on held-out topics.

    Raises:
        ValueError: the table has rows of a seed that is to be reported.
    """
    rows = pd.read_csv(file)
    if reported := sorted(set(rows["seed"].dropna().astype(int)) & set(seeds)):
        raise ValueError(f"{file} chose learning rates on the seeds {reported}. Report other seeds.")
    scores = by_run(rows[rows["arm"] != "base"])["topics"].dropna()
    means = scores.groupby(["arm", "feedback", "learning_rate"]).mean()
    best = means.groupby(["arm", "feedback"]).idxmax()
    return {key: rate for key, (*_, rate) in best.items()}


def by_run(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns `CELLS` of each run: means over prompts."""
    rows = rows.fillna({"feedback": "", "learning_rate": 0.0, "seed": -1})  # of the base
    is_trained = rows["type"].isin(TRAINED_TYPES)
    columns = {}
    for name, (prompts, trained, measure) in CELLS.items():
        chosen = rows[(rows["set"] == prompts) & (True if trained is None else is_trained == trained)]
        chosen = chosen.dropna(subset=[measure])
        runs = chosen.assign(total=chosen[measure] * chosen["prompts"]).groupby(RUN)
        columns[name] = runs["total"].sum() / runs["prompts"].sum()
    order = pd.MultiIndex.from_frame(rows[RUN].drop_duplicates())
    return pd.DataFrame(columns).reindex(order)


def study_table(rows: pd.DataFrame, baseline: str = "SDPO", measure: str = "topics") -> str:
    """Markdown of `CELLS`: means over seeds ± the half of Student's 95 % interval, and paired differences.

    The differences of `measure` from the baseline (feedback A, or the only one that it has) are on the same seeds,
    with p of a paired t test and Holm's adjustment over the arms.
    """
    runs = by_run(rows).reset_index()
    reference = (
        runs[runs["arm"] == baseline].sort_values("feedback").drop_duplicates("seed").set_index("seed")[measure]
    )
    arms = list(runs.groupby(["arm", "feedback"], sort=False))
    differences = {}
    for (arm, feedback), arm_runs in arms:
        difference = (arm_runs.set_index("seed")[measure] - reference).dropna()
        if len(difference) > 1 and difference.any():
            differences[arm, feedback] = difference
    p_values = [stats.ttest_1samp(difference, 0.0).pvalue for difference in differences.values()]
    adjusted = dict(zip(differences, holm(p_values), strict=True)) if differences else {}
    lines = [f"| | seeds | {' | '.join(CELLS)} | {measure}, minus {baseline} | p (Holm) |"]
    lines.append("| --- |" + " ---: |" * (len(CELLS) + 3))
    for (arm, feedback), arm_runs in arms:
        name = " ".join([arm, feedback]).strip()
        cells = [str(len(arm_runs)), *(first_word.mean_text(arm_runs[cell]) for cell in CELLS)]
        if (arm, feedback) in differences:
            cells += [first_word.mean_text(differences[arm, feedback]), f"{adjusted[arm, feedback]:.3f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def type_table(rows: pd.DataFrame) -> str:
    """Text of the mean strict score of each arm, by set and instruction type."""
    rows = rows[rows["set"] != "unrelated"].fillna({"feedback": ""})
    table = rows.pivot_table("strict", ["set", "type"], ["arm", "feedback"], sort=False)
    return table.round(3).to_string()


def order_text(predicted: pd.DataFrame, rows: pd.DataFrame) -> str:
    """Predicted against measured order of the arms with a target, on the seeds that have all of them."""
    targets = predicted.set_index(["arm", "feedback"])["target"]
    measured = by_run(rows).reset_index().pivot_table("topics", ["arm", "feedback"], "seed")
    measured = measured.reindex(targets.index).dropna(axis=1)
    if measured.empty:
        return "No seed has all arms with a predicted target."
    taus = [stats.kendalltau(targets, measured[seed]).statistic for seed in measured]
    equal = sum(tau == 1.0 for tau in taus)
    mean = sum(taus) / len(taus)
    return (
        f"Predicted order of {len(targets)} targets: on {equal} of {len(taus)} seeds; Kendall's τ {mean:.2f} (mean)."
    )


def base_rates(args: argparse.Namespace, load: Load) -> pd.DataFrame:
    """Mean scores of the base's sampled answers to training prompts and to those of held-out rules, by type."""
    model, tokenizer = load()
    base = Checkpoint.from_model(model.eval(), tokenizer, name="base")
    prompts = [row for split in ("train", "rules") for row in RULE_NAMED.build(split).to_list()[: args.prompts]]
    graded = pd.DataFrame(grade(base, prompts, answers_to(base, prompts, temperature=1.0)))
    rates = graded.groupby("type", sort=False).mean()
    return rates.assign(prompts=graded["type"].value_counts(), **made_by()).reset_index()


def predict(args: argparse.Namespace, load: Load) -> None:
    """Probe held-out prompts before training; write the success of answers drawn from each arm's target."""
    from credit_trl.lab.analysis.probing import ProbeSettings, probe
    from credit_trl.lab.analysis.targets import Arm

    rows = []
    for feedback in args.feedback:
        arms = [arm for arm in args.arms if ARMS[arm].get("distillation_weight", 1.0) == 1.0]
        targets = [
            Arm(arm, ARMS[arm]["contrastive_coef"], ARMS[arm].get("contrastive_form", "subtract")) for arm in arms
        ]
        task = as_task(TASKS[feedback], "ifeval")
        prompts = task.build("test")
        folder = args.output_dir / f"predicted-{feedback}"
        options = OPTIONS | read_options(args.set) | {"contrastive_coef": 0.5, "output_dir": str(folder / "run")}
        model, tokenizer = load()
        trainer = make_trainer("SDPO", options, model, task.reward, prompts, tokenizer)
        settings = ProbeSettings(min(args.prompts or len(prompts), len(prompts)), tuple(targets))
        document = probe(trainer, task, settings, folder=folder)
        (folder / "probe.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        for result in document["arms"]:
            target = {"target": result["ceiling"]["mean"], "policy": result["ceiling"]["baseline"]}
            target |= {"gated": result["gated"]["mean"], "leads": result["leads"], "prompts": document["prompts"]}
            rows.append({"arm": result["name"], "feedback": feedback} | target | made_by())
    table = pd.DataFrame(rows)
    print(table.iloc[:, :7].to_string(index=False))
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(args.csv, index=False)


def demonstrate(args: argparse.Namespace, load: Load) -> Path:
    """Train the arms of the demonstration and write a page with the answers to held-out prompts beside each other."""
    model, tokenizer = load()
    policies = {"base": Checkpoint.from_model(model.eval(), tokenizer, name="base")}
    prompts = RULE_NAMED.build("test").to_list()[:SHOWN_PROMPTS]
    columns = {"prompt": [escape(row["prompt"][0]["content"]) for row in prompts]}
    counts = []
    for arm in (None, *args.arms):
        if arm is not None:
            options = {"seed": args.seeds[0], "max_steps": args.steps, "output_dir": str(args.output_dir / arm)}
            policies[STYLES[arm][0]] = train(load, arm, args.feedback[0], read_options(args.set) | options)
        name, policy = policies.popitem()
        texts = policy.tokenizer.batch_decode(answers_to(policy, prompts), skip_special_tokens=True)
        verdicts = [RULE_NAMED.verify(text, row["answer"]) for text, row in zip(texts, prompts, strict=True)]
        columns[name] = [answer_cell(text, verdict) for text, verdict in zip(texts, verdicts, strict=True)]
        counts.append(f"{escape(name)}: {sum(float(verdict) for verdict in verdicts):.0f} of {len(prompts)}")
        print(counts[-1], flush=True)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    file = args.output_dir / "ifeval.html"
    file.write_text(page(pd.DataFrame(columns), counts, args.steps), encoding="utf-8")
    return file


def answer_cell(text: str, verdict: Any) -> str:
    """HTML of an answer with its verdict."""
    is_right = float(verdict) == 1.0
    notes = ["follows the rule" if is_right else "breaks the rule"]
    if not verdict.metrics["topic"]:
        notes.append("leaves the topic")
    if verdict.metrics["copied"]:
        notes.append("copies the example")
    return f'<b class="{"right" if is_right else "wrong"}">{", ".join(notes)}</b><br>{escape(text)}'


def page(answers: pd.DataFrame, counts: Sequence[str], steps: int) -> str:
    """HTML of the answers, whose cells are HTML."""
    with pd.option_context("display.max_colwidth", None):
        table = answers.to_html(index=False, escape=False, border=0, justify="left")
    return f"""<!doctype html><meta charset="utf-8"><title>Instruction following</title><style>
:root{{color-scheme:light dark}}body{{font:15px sans-serif;margin:2em}}td{{white-space:pre-wrap}}
td,th{{text-align:left;vertical-align:top;padding:.4em;border-top:1px solid gray}}
.right{{color:#2a8a2a}}.wrong{{color:#c33}}
</style><h1>Instruction following: {len(answers)} held-out prompts</h1>
<p>Greedy answers before and after {steps} steps, graded by IFEval's checkers. Rules followed: {"; ".join(counts)}.
One seed and few steps: an illustration, no result.</p>{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name (default: SmolLM2-135M-Instruct, from hub or wheel)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), metavar="ARM", help="default: those of the study")
    parser.add_argument(
        "--feedback", nargs="+", choices=list(TASKS), default=["A"], help="A names the rule, B says more"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="the demonstration uses the first")
    parser.add_argument("--steps", type=int, help="default: 40, 6 of the demonstration")
    parser.add_argument(
        "--rates", nargs="+", type=float, help="learning rates to compare, on seeds that are not reported"
    )
    parser.add_argument("--rates_from", type=Path, help="table of such a comparison, whose best rates are used")
    parser.add_argument("--official", default="hub", help="IFEval's input_data.jsonl, `hub` or `none`")
    parser.add_argument("--prompts", type=int, help="prompts of each set (default: all)")
    parser.add_argument(
        "--base_rates", action="store_true", help="print the base's sampled scores by instruction type"
    )
    parser.add_argument("--predict", action="store_true", help="probe the targets before training and train nothing")
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="options of every arm")
    parser.add_argument("--csv", type=Path, help="run a study: append its rows to this table")
    parser.add_argument("--table", type=Path, help="print the tables of these rows and train nothing")
    parser.add_argument("--predicted", type=Path, help="with --table: predictions, whose order is compared")
    parser.add_argument("--baseline", default="SDPO", help="with --table: arm of the paired differences")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/ifeval"))
    args = parser.parse_args()
    is_study = args.predict or args.csv is not None
    args.arms = args.arms or list(STUDIED if is_study else SHOWN)
    args.steps = args.steps or (40 if is_study else 6)

    def load() -> tuple[Any, Any]:
        from smollm2 import smollm2_directory

        directory = args.model or smollm2_directory()
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(directory)

    if args.base_rates:
        rates = base_rates(args, load)
        print(rates.round(3).to_string(index=False))
        if args.csv:
            rates.to_csv(args.csv, index=False)
    elif args.table:
        rows = pd.read_csv(args.table)
        print(study_table(rows, args.baseline), type_table(rows), sep="\n\n")
        if args.predicted:
            print(order_text(pd.read_csv(args.predicted), rows))
    elif args.predict:
        predict(args, load)
    elif args.csv:
        run_study(args, load)
        print(study_table(pd.read_csv(args.csv), args.baseline))
    else:
        print(f"The answers: {demonstrate(args, load).resolve()}")


if __name__ == "__main__":
    main()
