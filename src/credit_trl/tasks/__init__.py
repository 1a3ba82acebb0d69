"""Tasks: sources of prompts with the verifiers that grade responses to them.

`load_task` resolves a name; `mixed_reward` and `mix_datasets` combine several tasks in one run. A task's module is
imported when its name is loaded.
"""

from credit_trl.tasks.registry import (
    Task,
    TaskOption,
    as_task,
    batch_of,
    known_tasks,
    load_task,
    mix_datasets,
    mixed_reward,
)

__all__ = ["Task", "TaskOption", "as_task", "batch_of", "known_tasks", "load_task", "mix_datasets", "mixed_reward"]
