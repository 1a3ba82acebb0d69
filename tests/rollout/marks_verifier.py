"""A reward function that another process imports by its name."""

import json

from credit_trl import Verdict, in_process
from credit_trl.rollout.thinking import marks_in_use


@in_process
def read_marks(completions, **columns):
    return [Verdict(0.0, json.dumps(marks_in_use())) for _ in completions]
