"""Files that the pages name: generated rows, modules, and YAML blocks with a file name."""

from __future__ import annotations

import json
import re
from pathlib import Path

from blocks import of_language

QUESTIONS = [{"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "answer": str(n + 1)} for n in range(4)]


def science(domain: str) -> list[dict]:
    """Synthetic rows in the hub's format; every letter is the gold letter of some row."""
    rows = []
    for n in range(20):
        texts = [str(n), str(n - 1), str(n - 2)]
        texts.insert(n % 4, str(n + 1))
        rows.append(
            {
                "question": f"Which is larger than {n}?",
                "choices": {"text": texts, "label": ["A", "B", "C", "D"]},
                "answerKey": "ABCD"[n % 4],
                "type": "mcq-4-choices",
                "domain": domain,
                "details": {"level": "L3"},
            }
        )
    return rows


TOOLS = [
    {
        "prompt": f"Tools: getWeather(city). Question: how is the weather in city {n}?",
        "answer": json.dumps([{"Action": "getWeather", "Action_Input": json.dumps({"city": str(n)})}]),
        "idx": n,
    }
    for n in range(8)
]
CAPITALS = [
    {"prompt": [{"role": "user", "content": f"What is the capital of {country}?"}], "answer": capital}
    for country, capital in {"France": "Paris", "Italy": "Rome"}.items()
]
SUMS = [{"prompt": [{"role": "user", "content": f"What is {n} + 9?"}], "answer": str(n + 9)} for n in range(8)]
CLOCK = {"Name": "Clock", "Description": "Tells the time", "NLDocumentation": "now: The time.\nParameters: {}\n"}
CLOCK_TRAIN = CLOCK | {
    "Instances": [
        {
            "input": f"What time is it in {city}?",
            "intermediate_steps": [[["now", "{}", "Action: now\nAction Input: {}"], "Status Code: 200"]],
        }
        for city in ("Lima", "Rome", "Oslo", "Cairo")
    ]
}
CLOCK_TEST = CLOCK | {
    "Instructions": ["What time is it?", "And now?"],
    "Golden_Answers": [[{"Action": "now", "Action_Input": "{}"}]] * 2,
}
FILES = {
    "questions.jsonl": QUESTIONS,
    "conversations.jsonl": [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]} for row in QUESTIONS
    ],
    "mine.jsonl": [json.loads(block.text) for block in of_language("json")],
    "capitals.jsonl": CAPITALS,
    "data/physics.jsonl": science("Physics"),
    "data/chemistry.jsonl": science("Chemistry"),
    "data/sciknoweval/physics.jsonl": science("Physics"),
    "data/sciknoweval/chemistry.jsonl": science("Chemistry"),
    "data/sciknoweval/material.jsonl": science("Material"),
    "data/toolalpaca/train.jsonl": TOOLS,
    "data/train_data.json": [CLOCK_TRAIN],
    "data/test.json": [CLOCK_TEST],
    "t.jsonl": TOOLS,
    "my/sums/train.jsonl": SUMS,
}
MODULES = {
    "my_task.py": """
from datasets import Dataset
from credit_trl import Verdict

class MyTask:
    def build(self, split, path=None):
        return Dataset.from_json("questions.jsonl")
    def verify(self, response, answer, *, truncated=False):
        return Verdict(float(response == answer), f"It is {answer}.")
""",
    "my_verifier.py": next(b.text for b in of_language("python") if "def capital_verifier" in b.text),
}


def write_files(folder: Path) -> None:
    """Write all files into a folder."""
    for name, rows in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in MODULES.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, text in named_blocks().items():
        (folder / name).write_text(text, encoding="utf-8")


def named_blocks() -> dict[str, str]:
    """YAML blocks whose first line is `# name.yaml`, by name."""
    found = ((re.match(r"# (\w+\.yaml)\n", block.text), block.text) for block in of_language("yaml"))
    return {match[1]: text for match, text in found if match}
