"""Are predictions with and without feedback conditionals of one joint distribution (Appendix E)?

    python examples/compatibility.py --model Qwen/Qwen3-0.6B --model Qwen/Qwen3-8B --task sciknoweval:material

On multiple-choice questions, the distribution over answer letters is compared with the nearest mixture of the
distributions given each letter as feedback. Writes the paper's table to table.md and every record to records.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from credit_trl.contexts.prompts import Prompt, user_text
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.compatibility import (
    ANSWER_PREFIX,
    FEEDBACK,
    ChoiceQuestion,
    Record,
    measure_compatibility,
    residual,
)
from credit_trl.tasks import load_task
from credit_trl.tasks.escaping import markdown_table

# Residuals below it count as compatible, as in the paper.
THRESHOLD = 1e-3
# Residuals below it are rounding; lower bound of the ratio's denominator.
_FLOOR = 1e-16
_OPTION = re.compile(r"^[(\s]*([A-Z])\s*[:.)]\s", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="hub name or directory; repeat for several")
    parser.add_argument("--task", required=True, help="multiple choice, such as sciknoweval:material")
    parser.add_argument("--split", default="train", help="split of the task's data (default train)")
    parser.add_argument("--path", help="local data file or folder, instead of the hub")
    parser.add_argument("--per_letter", type=int, default=25, help="questions per gold letter (default 25)")
    parser.add_argument("--letters", help="such as ABCD; by default read from each prompt")
    parser.add_argument("--feedback", default=FEEDBACK, help="feedback text with {letter} (default: the paper's)")
    parser.add_argument("--answer_prefix", default=ANSWER_PREFIX, help="start of the response, before the letter")
    parser.add_argument("--chat_template_kwargs", type=json.loads, default={}, help="JSON, such as {}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of questions (default 0)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/compatibility"))
    args = parser.parse_args()

    rows = load_task(args.task).build(args.split, args.path)
    questions = balanced(questions_of(rows, args.letters), args.per_letter, args.seed)
    print(f"{len(questions)} questions of {len(rows)}, the same number per gold letter")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    records = {}
    with (args.output_dir / "records.jsonl").open("w", encoding="utf-8") as file:
        for model in args.model:
            checkpoint = Checkpoint.load(model, chat_template_kwargs=args.chat_template_kwargs)
            records[model] = measure_compatibility(
                checkpoint, questions, feedback=args.feedback, prefix=args.answer_prefix, progress=True
            )
            for record in records[model]:
                line = {"model": model, **asdict(record)}
                file.write(json.dumps(line, default=np.ndarray.tolist) + "\n")  # arrays as lists
            del checkpoint  # the next model takes the memory
    (args.output_dir / "table.md").write_text(format_compatibility(records), encoding="utf-8")
    print(format_compatibility(records))


def option_letters(prompt: Prompt) -> tuple[str, ...]:
    """Letters at the start of option lines (`A: …`, `(B) …`, `C. …`): the alphabetical run from the last A."""
    run: list[str] = []
    for letter in _OPTION.findall(user_text(prompt)):
        if letter == "A":
            run = ["A"]
        elif run and ord(letter) == ord(run[-1]) + 1:
            run.append(letter)
    return tuple(run)


def questions_of(rows: Iterable[dict[str, Any]], letters: Sequence[str] | None = None) -> list[ChoiceQuestion]:
    """Questions from rows with `prompt` and `answer` (a letter); `letters` None reads them from each prompt.

    Raises:
        ValueError: a question has fewer than two letters, or its gold answer is not one of them.
    """
    questions = []
    for number, row in enumerate(rows):
        options = option_letters(row["prompt"]) if letters is None else tuple(letters)
        name = str(row.get("id", number))
        gold = row.get("answer")
        if len(options) < 2 or (gold is not None and gold not in options):
            raise ValueError(
                f"Question {name}: options {options} and answer {gold!r} are no multiple choice of letters. Use a "
                "task with lettered options such as sciknoweval:material."
            )
        questions.append(ChoiceQuestion(row["prompt"], options, gold, name))
    return questions


def balanced(questions: Sequence[ChoiceQuestion], per_letter: int, seed: int = 0) -> list[ChoiceQuestion]:
    """Random subset with equally many questions of each gold letter, at most `per_letter`, in the given order.

    Only questions with the most frequent set of letters are used.

    Raises:
        ValueError: one of these letters is the gold answer of no question.
    """
    letters = Counter(question.letters for question in questions).most_common(1)[0][0]
    order = np.random.default_rng(seed).permutation(len(questions))
    chosen = [i for i in order if questions[i].letters == letters]
    by_gold = {letter: [i for i in chosen if questions[i].gold == letter] for letter in letters}
    if missing := [letter for letter, rows in by_gold.items() if not rows]:
        raise ValueError(
            f"No question with the options {', '.join(letters)} has {', '.join(missing)} as its answer, so letters "
            "cannot be balanced. Take more rows, or another split."
        )
    size = min(per_letter, *map(len, by_gold.values()))
    return [questions[i] for i in sorted(i for rows in by_gold.values() for i in rows[:size])]


def compatibility_metrics(records: Sequence[Record]) -> dict[str, float | str]:
    """Rows of Table 4 for one model, by the paper's names; the questions have the same letters."""
    if not records:
        raise ValueError("There are no records to summarize.")
    residuals = np.array([r.residual for r in records])
    uniform = np.array([residual(r.student, r.teachers, np.full_like(r.student, 1 / len(r.student))) for r in records])
    per_letter = np.median([np.diagonal(r.teachers) for r in records], axis=0)  # T_{z→z}, the letter that z names
    letters = records[0].question.letters
    golds = [r.question.letters.index(r.question.gold) for r in records if r.question.gold is not None]
    return {
        "# records": len(records),
        f"Gold balance ({' / '.join(letters)})": " / ".join(str(golds.count(i)) for i in range(len(letters))),
        "Letter-token mass (median)": float(
            np.median(np.concatenate([[r.student_mass, *r.teacher_mass] for r in records]))
        ),
        "Teacher fidelity (median, worst z)": float(per_letter.min()),
        "Teacher fidelity (median, best z)": float(per_letter.max()),
        "LS L1 residual (median)": float(np.median(residuals)),
        f"Fraction residual < {THRESHOLD:g}": float((residuals < THRESHOLD).mean()),
        "Uniform-P L1 baseline (median)": float(np.median(uniform)),
        "Uniform / LS ratio (median)": float(np.median(uniform / residuals.clip(min=_FLOOR))),
        "Self-consistency argmax P̂ = argmax s": float(
            np.mean([r.posterior.argmax() == r.student.argmax() for r in records])
        ),
        "P̂ mass on student's argmax (median)": float(np.median([r.posterior[r.student.argmax()] for r in records])),
    }


def format_compatibility(models: Mapping[str, Sequence[Record]]) -> str:
    """Markdown table in the layout of Table 4, one column a model."""
    columns = [compatibility_metrics(records) for records in models.values()]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = ([label, *(_formatted(column.get(label, "–")) for column in columns)] for label in labels)
    return markdown_table(["Metric", *models], rows) + "\n"


def _formatted(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
