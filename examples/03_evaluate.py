"""Step 3 of 8: the score on prompts that were not trained, with its interval, before and after step 2.

python examples/03_evaluate.py
"""

from importlib import import_module

from credit_trl import Task, evaluate
from credit_trl.evaluation.statistics import paired_bootstrap

verifier = import_module("01_verifier")
TEST_CITIES = "Lima Tokyo Delhi Prague"
TASK = Task.from_dataset(verifier.make_rows(TEST_CITIES), verifier.check, name="desk")


def evaluated(model: str) -> list[float]:
    """Mean reward of each prompt's answers."""
    result = evaluate(model, TASK, k=4, temperature=1.0, top_p=1.0, max_completion_length=32, progress=False)
    score, low, high = 100 * result.score, 100 * result.low, 100 * result.high
    print(f"{model:12} avg@4 {score:5.1f} %   95 % interval {low:.1f} to {high:.1f}")
    return [prompt.score for prompt in result.prompts]


if __name__ == "__main__":
    scores = [evaluated("quickstart"), evaluated("runs/ladder")]
    gain = paired_bootstrap(scores[1:], scores[:1])  # both have the same prompts
    difference, low, high = 100 * gain.difference, 100 * gain.low, 100 * gain.high
    print(f"{'difference':12}{difference:+12.1f}     95 % interval {low:+.1f} to {high:+.1f}")
