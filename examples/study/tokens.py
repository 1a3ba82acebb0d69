"""Credit before training: ΔV_t and S_t by token class, and log-probabilities at the first token of the thought.

The responses are correct answers of the task, each with its own thought and with the shortcut's thought. Every base
scores them as the teacher (with feedback), as the contrast (feedback with a contrast prompt) and as the student.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from worlds import WORLDS

from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.formula import CreditSettings
from credit_trl.lab.analysis.responses import Rollout, analysis_config, rollout_contexts
from credit_trl.lab.analysis.tokenmap import TokenScores, score_response
from credit_trl.lab.sweeps import read_spec
from credit_trl.tasks.quickstart import GROUPS, SHORTCUT_THOUGHT, Question, draw_question, token_classes
from credit_trl.training.run_directory import write_json

HERE = Path(__file__).parent
CLASSES = ("cue", "topic", "tool", "city", "generic", "shortcut")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"))
    parser.add_argument("--questions", type=int, default=60, help="prompts per base (default 60)")
    args = parser.parse_args()
    found = {}
    for base in bases_of_the_study(args.output_dir / "bases"):
        found[base.name] = measure(base, args.questions)
        print(base.name, {name: round(value["S"], 2) for name, value in found[base.name]["classes"].items()})
    write_json(args.output_dir / "tokens.json", found)


def bases_of_the_study(folder: Path) -> list[Path]:
    """The bases of the first two worlds and their reported seeds. Other sweeps keep bases in the same folder."""
    seeds = {world: read_spec(HERE / f"{world}.yaml").seeds for world in WORLDS}
    return [base for world in WORLDS for seed in seeds[world] if (base := folder / f"{world}-seed{seed}").is_dir()]


def measure(base: Path, count: int) -> dict[str, Any]:
    """Mean scores over `count` prompts, by token class and at the first token of the thought.

    Returns:
        `classes`: token class → means of `delta_v`, `S` and `G` in nats, and the number of `tokens`. `branch`: "own"
        and "shortcut" → mean log-probabilities `f`, `g` and `student` of the first token of the thought.
    """
    checkpoint = Checkpoint.load(str(base))
    config = analysis_config(max_completion_length=64)
    rng = random.Random("study/tokens")
    cues = GROUPS["known"] + GROUPS["unknown"]
    questions = [draw_question(rng, rng.choice(cues)) for _ in range(count)]
    sums: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    branch: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for number, question in enumerate(questions):
        other = rng.choice([q for q in questions if q.prompt != question.prompt])
        for kind, thought in (("own", None), ("shortcut", SHORTCUT_THOUGHT)):
            ids, scores = read(checkpoint, config, question, other, thought, f"{number}/{kind}")
            labels = classes_of(ids, checkpoint.tokenizer, thought)
            values = zip(scores.delta_v.tolist(), scores.specific.tolist(), scores.generic.tolist(), strict=True)
            for label, token in zip(labels, values, strict=True):
                if kind == "own" or label == "shortcut":
                    sums[label].append(token)
            first = len(prefix_ids(checkpoint.tokenizer))
            branch[kind].append(
                (
                    scores.teacher_logps[first].item(),
                    scores.generic[first].item(),
                    scores.student_logps[first].item(),
                )
            )
    return {
        "classes": {name: _means(sums[name], ("delta_v", "S", "G")) | {"tokens": len(sums[name])} for name in CLASSES},
        "branch": {kind: _means(values, ("f", "g", "student")) for kind, values in branch.items()},
    }


def read(
    checkpoint: Checkpoint, config: Any, question: Question, other: Question, thought: str | None, name: str
) -> tuple[list[int], TokenScores]:
    """Token ids of one response, with the end-of-turn token, and their scores."""
    tokenizer = checkpoint.tokenizer
    ids = tokenizer(question.response(thought), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    privileged = PrivilegedContext(feedback=question.feedback)
    response = Rollout(name, question.prompt, tuple(ids), privileged, (other.prompt,))
    contexts = rollout_contexts(response, config, checkpoint)
    return ids, score_response(checkpoint, contexts, ids, CreditSettings(config.contrastive_coef))


def classes_of(ids: list[int], tokenizer: Any, thought: str | None) -> list[str]:
    """Token classes of the task, with the tokens of a planted thought in the class `shortcut`."""
    labels = token_classes(ids, tokenizer)
    if thought is None:
        return labels
    planted = range(
        len(prefix_ids(tokenizer)), len(tokenizer(f"Thought: {thought}", add_special_tokens=False)["input_ids"])
    )
    return ["shortcut" if i in planted else label for i, label in enumerate(labels)]


def prefix_ids(tokenizer: Any) -> list[int]:
    """Token ids of the prefix `Thought:`."""
    return tokenizer("Thought:", add_special_tokens=False)["input_ids"]


def _means(rows: list[tuple[float, ...]], names: tuple[str, ...]) -> dict[str, float]:
    return dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))


if __name__ == "__main__":
    main()
