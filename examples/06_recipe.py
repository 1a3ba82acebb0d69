"""Step 6 of 8: a recipe of the paper by its name, small enough for this machine.

python examples/06_recipe.py     # without `--small` the recipe needs eight GPUs

The questions are written here; without `--dataset_path` and `--eval_dataset_path` they come from the hub.
"""

import json
import shlex
import sys
from pathlib import Path

from credit_trl.cli import main

FILE = Path("runs/questions.jsonl")
COMMAND = f"credit --recipe sciknoweval_qwen3_8b --small --dataset_path {FILE} --eval_dataset_path {FILE}"
MACHINE = "--output_dir runs/recipe --use_cpu true --disable_tqdm true"


def write_questions(count: int = 16) -> None:
    """Multiple-choice questions in the form of the published data."""
    lines = []
    for number in range(count):
        text = f"Which number is larger?\n\nA: {number}\nB: {count - number}\nPlease reason step by step."
        row = {"idx": number, "kind": "mcq", "dataset": "sciknoweval", "prompt": text}
        row |= {"system": "Answer with <answer>letter</answer>.", "answer": "A" if 2 * number > count else "B"}
        lines.append(json.dumps(row))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write_questions()
    print("credit-trl", COMMAND, MACHINE)
    sys.exit(main(shlex.split(f"{COMMAND} {MACHINE}")))
