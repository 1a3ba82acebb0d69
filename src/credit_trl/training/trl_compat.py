"""Check of TRL's version and of the private hooks that this package overrides.

A minor version of TRL may rename or change a private method, which would silently disable the override. The check runs
when the trainer is imported and raises an error instead.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version

from packaging.version import Version
from trl import GRPOTrainer

TESTED_TRL = ("1.16",)

# Overridden method -> its parameters.
HOOKS = {
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("self", "model", "inputs"),
    "_generate": ("self", "prompts"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_generate_single_turn": tuple("self prompt_ids images multimodal_fields num_generations has_tool_images".split()),
    "_get_output_dir": ("self", "trial"),
    "_get_train_sampler": ("self", "dataset"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_set_signature_columns_if_needed": ("self",),
    "log": ("self", "logs", "start_time"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
}


def check_trl(trainer_class: type = GRPOTrainer, installed: str | None = None) -> None:
    """Check TRL's version and the hooks of its GRPO trainer.

    Raises:
        ImportError: TRL has an untested minor version, or a hook is missing or has other parameters. The message
            names the version to install.
    """
    installed = installed or version("trl")
    release = Version(installed)
    fix = f'Install a tested version: pip install "trl=={TESTED_TRL[-1]}.*".'
    if f"{release.major}.{release.minor}" not in TESTED_TRL:
        raise ImportError(
            f"credit_trl is tested with TRL {', '.join(TESTED_TRL)}; TRL {installed} is installed. {fix}"
        )
    for name, parameters in HOOKS.items():
        hook = getattr(trainer_class, name, None)
        if hook is None or tuple(inspect.signature(hook).parameters) != parameters:
            raise ImportError(
                f"TRL {installed} has no `GRPOTrainer.{name}({', '.join(parameters)})`, which credit_trl overrides. "
                f"{fix}"
            )
