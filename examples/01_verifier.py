"""Step 1 of 8: a verifier, which returns a reward for each answer and feedback for the teacher.

python examples/01_verifier.py
"""

from datasets import Dataset

from credit_trl import Verdict

# Word of a request -> its tool. The shipped model has learnt others: that a doctor is about health.
TOOL_OF = {"doctor": "travel", "clinic": "travel", "hotel": "health", "passport": "health", "puppy": "music"}
TOOLS = ["health", "music", "travel", "animals"]


def check(completions, answer, **columns):
    """One verdict for each completion; `answer` is a column of the rows."""
    verdicts = []
    for completion, expected in zip(completions, answer, strict=True):
        letter, tool = expected.split()
        reward = float(f"Action: {tool}_api" in completion[-1]["content"])
        verdicts.append(Verdict(reward, f"Correct option: {letter}."))  # the prompt says which tool this is
    return verdicts


def make_rows(cities: str) -> Dataset:
    """Rows with a column `prompt` and the columns that the verifier reads."""
    rows = []
    for city in cities.split():
        for word, tool in TOOL_OF.items():
            tools = TOOLS[len(rows) % 4 :] + TOOLS[: len(rows) % 4]  # their letters change from row to row
            offered = ", ".join(f"{letter} {name}_api" for letter, name in zip("ABCD", tools, strict=True))
            question = {"role": "user", "content": f"Help me with {word} for {city}."}
            prompt = [{"role": "system", "content": f"Tools: {offered}."}, question]
            rows.append({"prompt": prompt, "answer": f"{'ABCD'[tools.index(tool)]} {tool}"})
    return Dataset.from_list(rows)


if __name__ == "__main__":
    answers = [[{"role": "assistant", "content": text}] for text in ("Action: travel_api", "I do not know.")]
    print(*check(answers, make_rows("Paris")["answer"][:1] * 2), sep="\n")
