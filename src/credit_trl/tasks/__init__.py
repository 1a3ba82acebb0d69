"""Tasks: sources of prompts with the verifiers that grade responses to them.

`load_task` resolves a name. A task's module is imported when its name is loaded.
"""

from credit_trl.quickstart_model import model_path
from credit_trl.tasks.registry import as_task, load_task
from credit_trl.tasks.task import Task, batch_of

__all__ = ["Task", "as_task", "batch_of", "load_task", "model_path"]
