"""Requests of people to real APIs as an out-of-distribution test of tool choice.

Reads records of ToolAlpaca's evaluation set in the form that SDPO trains on (Apache-2.0). A record's documentation
names the functions of one API. Records with one golden call and at least four functions become prompts of the form of
`tool_choice`: four functions under letters, the user's question as the request. Only the choice of the function is
graded, since the arguments of these functions are JSON.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from datasets import Dataset

from credit_trl import Verdict
from credit_trl.tasks.records import read_rows
from credit_trl.tasks.task import Task, batch_of
from credit_trl.tasks.tool_choice import OPTION_LETTERS, ToolRequest

_FUNCTION = re.compile(r"^(\w+): .*\nParameters: \{", re.MULTILINE)


def build(split: str, path: str | Path) -> Dataset:
    """Prompts of the records of a file."""
    found = []
    for row in read_rows(path):
        record, index = row.data, row.number
        names = list(dict.fromkeys(_FUNCTION.findall(record["prompt"])))
        calls = json.loads(record["answer"])
        question = record["prompt"].rpartition("Question: ")[2].strip()
        if len(calls) != 1 or calls[0]["Action"] not in names or len(names) < len(OPTION_LETTERS):
            continue
        rng = random.Random(f"real_requests/{index}")
        gold = calls[0]["Action"]
        others = rng.sample([name for name in names if name != gold], len(OPTION_LETTERS) - 1)
        request = ToolRequest(gold, "", question, tuple(rng.sample([gold, *others], len(OPTION_LETTERS))))
        found.append({"prompt": request.prompt, "answer": gold, "task": "real_requests", "id": f"real-{index}"})
    return Dataset.from_list(found)


def verify(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Reward 1 where the last call in the response is of the right function."""
    called = re.findall(r"(\w+)\(", response)
    return Verdict(float(bool(called) and called[-1] == answer))


TASK = Task(name="real_requests", build=build, verify=verify, reward=batch_of(verify))
