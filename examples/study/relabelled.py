"""The embedded task with one more test group: every hold-out cue with each of the twelve topics as its label.

Neither pretraining nor training teaches the topic of a hold-out cue, so a model can only guess it. Each of the four
offered tools is equally often the label, and the prompt does not depend on the label: the expected score is a quarter
of the rate at which responses call an *offered* tool, whichever, with the city of the prompt (`offered_rate`).
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


def offered_rate(score: float) -> float:
    """Rate of the responses that call one of the offered tools, from the score on the rows of `GROUP`.

    An unbiased estimate, which sampling can place above 1.
    """
    return len(quickstart.LETTERS) * score


def build(split: str, path: None = None, *, seed: int = 0, **options: Any) -> Dataset:
    """Rows of `quickstart.build`; the test split has 576 more, four per pair of hold-out cue and topic."""
    rows = quickstart.build(split, path, seed=seed, **options)
    rows = rows.remove_columns("task").add_column("task", [NAME] * len(rows))
    return rows if split == "train" else concatenate_datasets([rows, every_topic(seed)])


def every_topic(seed: int = 0) -> Dataset:
    """Each hold-out cue with each topic as its label, with three random other topics and a random test city."""
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
