"""Are predictions with and without feedback conditionals of one joint distribution (Appendix E)?

    python examples/compatibility.py --model Qwen/Qwen3-0.6B --model Qwen/Qwen3-8B --task sciknoweval:material

On multiple-choice questions, the distribution over answer letters is compared with the nearest mixture of the
distributions given each letter as feedback. Writes the paper's table to table.md and every record to records.jsonl.
"""

import argparse
import json
from pathlib import Path

from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.compatibility import (
    ANSWER_PREFIX,
    FEEDBACK,
    balanced,
    format_compatibility,
    measure_compatibility,
    questions_of,
)
from credit_trl.tasks import load_task


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
                file.write(json.dumps({"model": model, **record.to_json()}) + "\n")
            del checkpoint  # the next model takes the memory
    (args.output_dir / "table.md").write_text(format_compatibility(records), encoding="utf-8")
    print(format_compatibility(records))


if __name__ == "__main__":
    main()
