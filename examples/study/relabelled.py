"""The embedded task, tested on one more group: hold-out cues under every topic that they might have had.

A hold-out cue's topic is a label that nothing was trained on: the base saw the cue with random topics, training never
sees it. Whether a model happens to guess it is luck, the same for a cue's every prompt, and of twelve cues the luck is
larger than what methods differ by. The group `relabelled` asks for each hold-out cue under all twelve topics in turn,
which takes the luck out: the expectation is that of the group `holdout`, over the worlds that differ in these labels.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

from datasets import Dataset, concatenate_datasets

from credit_trl.tasks import quickstart
from credit_trl.tasks.registry import Task

NAME = "relabelled:TASK"
GROUP = "relabelled"
ROWS_PER_PAIR = 4


def build(split: str, path: None = None, *, seed: int = 0, **options: Any) -> Dataset:
    """`quickstart.build`; the test split has 576 rows more, four for each pair of hold-out cue and topic."""
    rows = quickstart.build(split, path, seed=seed, **options)
    rows = rows.remove_columns("task").add_column("task", [NAME] * len(rows))
    return rows if split == "train" else concatenate_datasets([rows, every_topic(seed)])


def every_topic(seed: int = 0) -> Dataset:
    """Each hold-out cue with each topic as the right one, among three others and in a test city drawn at random."""
    rng = random.Random(f"{NAME}/{seed}")
    pairs = product(quickstart.GROUPS["holdout"], quickstart.TOPICS, range(ROWS_PER_PAIR))
    return Dataset.from_list(
        [_row(draw_question(rng, cue, topic), f"{NAME}-{seed}-{cue}-{topic}-{row}") for cue, topic, row in pairs]
    )


def draw_question(rng: random.Random, cue: str, topic: str) -> quickstart.Question:
    others = rng.sample([other for other in quickstart.TOPICS if other != topic], len(quickstart.LETTERS) - 1)
    options = rng.sample([topic, *others], len(quickstart.LETTERS))
    return quickstart.Question(cue, rng.choice(quickstart.cities_of(cue, "test")), tuple(options), topic)


def _row(question: quickstart.Question, identifier: str) -> dict[str, Any]:
    return {
        "prompt": question.prompt,
        "answer": question.answer,
        "id": identifier,
        "group": GROUP,
        "cue": question.cue,
        "city": question.city,
        "task": NAME,
    }


TASK = Task(name=NAME, build=build, verify=quickstart.verify, reward=quickstart.reward)
