"""`trl credit-compat`: test whether predictions with and without feedback are conditionals of one joint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from credit_trl.cli.arguments import at_least, json_object
from credit_trl.training.run_directory import json_line, write_atomically

if TYPE_CHECKING:
    from credit_trl.lab.analysis.compatibility import Record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "On multiple-choice questions, compare the distribution over answer letters with the nearest mixture of the "
        "distributions given each letter as feedback (Appendix E). Writes table.md, figure.png and records.jsonl to "
        "--output_dir."
    )
    parser.add_argument(
        "--model", action="append", required=True, help="hub name or directory; repeat for several models"
    )
    parser.add_argument("--task", required=True, help="multiple choice, such as sciknoweval:material")
    parser.add_argument("--split", default="train", help="split of the task's data (default train)")
    parser.add_argument("--path", help="local data file or folder, instead of the hub")
    parser.add_argument("--per_letter", type=at_least(1), default=25, help="questions per gold letter (default 25)")
    parser.add_argument("--letters", help="such as ABCD; by default read from each prompt")
    parser.add_argument("--feedback", help="feedback text with {letter} (default: the paper's)")
    parser.add_argument("--feedback_template", help="template with {feedback_raw} (default: the paper's)")
    parser.add_argument("--answer_prefix", help="start of the response (default `<answer>` and a new line)")
    parser.add_argument(
        "--chat_template_kwargs", type=json_object, default={}, help="JSON, such as '{\"enable_thinking\": false}'"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of questions (default 0)")
    parser.add_argument("--output_dir", default="credit_compat", help="default credit_compat")


def run(args: argparse.Namespace) -> int:
    from credit_trl.config import check_template
    from credit_trl.contexts.builder import ContextBuilder
    from credit_trl.lab.analysis import compatibility as compat
    from credit_trl.lab.analysis.checkpoints import Checkpoint
    from credit_trl.lab.analysis.compatibility_report import format_compatibility
    from credit_trl.lab.analysis.naming import short_names
    from credit_trl.lab.analysis.responses import analysis_config
    from credit_trl.tasks.registry import load_task

    feedback = compat.FEEDBACK if args.feedback is None else args.feedback
    check_template("--feedback", feedback, ("letter",))
    if args.letters is not None and len(set(args.letters)) < max(len(args.letters), 2):
        raise ValueError(f"--letters {args.letters!r}: give two or more letters, each once, such as ABCD.")
    rows = load_task(args.task).build(args.split, args.path)
    found = compat.questions_of(rows, args.letters)
    questions = compat.balanced(found, args.per_letter, args.seed)
    letters = questions[0].letters
    skipped = sum(question.letters != letters for question in found)
    note = f"; {skipped} with options other than {', '.join(letters)} are skipped" if skipped else ""
    print(f"{len(questions)} questions of {len(rows)}, the same number per gold letter{note}")
    templates = dict(compat.TEMPLATES)
    if args.feedback_template is not None:
        templates["feedback_template"] = args.feedback_template.replace("\\n", "\n")
    prefix = compat.ANSWER_PREFIX if args.answer_prefix is None else args.answer_prefix.replace("\\n", "\n")
    directory = Path(args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    records = {}
    models = list(dict.fromkeys(args.model))
    for model, name in zip(models, short_names(models), strict=True):
        checkpoint = Checkpoint.load(model, name=name, chat_template_kwargs=args.chat_template_kwargs)
        builder = ContextBuilder(checkpoint.tokenizer, analysis_config(**templates), sorted(checkpoint.end_ids()))
        records[checkpoint.name] = compat.measure_compatibility(
            checkpoint, questions, builder, feedback=feedback, prefix=prefix, progress=True
        )
        _write(directory, records)  # after each model, so that a later failure loses nothing
        del checkpoint, builder  # the next model takes the memory
    print(format_compatibility(records))
    print(f"{directory}: table.md, figure.png, records.jsonl")
    return 0


def _write(directory: Path, records: Mapping[str, Sequence[Record]]) -> None:
    """Write table, figure and records of the models measured so far."""
    from credit_trl.lab.analysis.compatibility_report import format_compatibility, make_figure

    lines = [json_line({"model": name, **record.to_json()}) for name, own in records.items() for record in own]
    write_atomically(directory / "records.jsonl", "".join(lines))
    write_atomically(directory / "table.md", format_compatibility(records))
    make_figure(records).savefig(directory / "figure.png")
