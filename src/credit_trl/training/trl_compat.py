"""Comparison of TRL's private methods that this package overrides with those of the tested versions."""

import inspect
import warnings
from functools import cache
from importlib.metadata import version

from packaging.version import Version
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

TESTED_TRL = ("1.15", "1.16")

# Class of TRL -> overridden method -> its parameters after `self`; None for any.
HOOKS: dict[type, dict[str, str | None]] = {
    GRPOTrainer: {
        "_calculate_rewards": "inputs prompts completions completion_ids_list",
        "_compute_loss": "model inputs",
        "_generate": "prompts",
        "_generate_and_score_completions": "inputs",
        "_generate_single_turn": "prompt_ids images multimodal_fields num_generations has_tool_images",
        "_get_grad_norm": "model grad_norm",  # of transformers
        "_get_output_dir": "trial",
        "_get_train_sampler": "dataset",
        "_load_optimizer_and_scheduler": "checkpoint",
        "_prepare_inputs": "generation_batch",
        "_push_from_checkpoint": "checkpoint_folder",  # of transformers
        "_save_checkpoint": "model trial",
        "log": "logs start_time",
        "save_model": "output_dir _internal_call",  # of transformers
        **dict.fromkeys(("_get_per_token_logps_and_entropies", "_run_epoch", "train")),
    },
    VLLMGeneration: {"_iter_named_params": "", "generate": "prompts images num_generations profiler"},
    VLLMClient: {"_post": "url kwargs", "reset_prefix_cache": "", "update_named_params": "metadata named_params"}
    | dict.fromkeys(["generate"]),
}


@cache
def check_trl(installed: str | None = None) -> None:
    """Raise an `ImportError` where an overridden method is missing or changed; warn once of an untested minor."""
    installed = installed or version("trl")
    for owner, methods in HOOKS.items():
        for name, expected in methods.items():
            method = getattr(owner, name, None)
            found = " ".join(list(inspect.signature(method).parameters)[1:]) if callable(method) else "missing"
            if not callable(method) or expected not in (None, found):
                raise ImportError(
                    f"`{owner.__name__}.{name}` of TRL {installed}, which credit_trl overrides, has the parameters "
                    f'"{found}" instead of "{expected}". Install a tested one: pip install "trl=={TESTED_TRL[-1]}.*".'
                )
    if "{0.major}.{0.minor}".format(Version(installed)) not in TESTED_TRL:
        message = f"TRL {installed} is installed, and credit_trl is tested with {' and '.join(TESTED_TRL)}."
        warnings.warn_explicit(message, UserWarning, "credit_trl", 0)  # no source line in the output
