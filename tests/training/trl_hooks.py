"""Check of TRL's version and of the private names that this package overrides, calls and reads.

A minor version of TRL may rename or change a private method, which would silently disable the override. The check runs
when the trainer is imported: a difference is an error, an untested minor version without a difference a warning.
"""

from __future__ import annotations

import dis
import inspect
import warnings
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float
from packaging.version import Version
from torch import Tensor
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import RepeatSampler

TESTED_TRL = ("1.15", "1.16")

# Class of TRL -> overridden method -> its parameters; None for any parameters.
HOOKS = {
    GRPOTrainer: {
        "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
        "_compute_loss": ("self", "model", "inputs"),
        "_generate": ("self", "prompts"),
        "_generate_and_score_completions": ("self", "inputs"),
        "_generate_single_turn": tuple(
            "self prompt_ids images multimodal_fields num_generations has_tool_images".split()
        ),
        "_get_output_dir": ("self", "trial"),
        "_get_per_token_logps_and_entropies": None,
        "_get_train_sampler": ("self", "dataset"),
        "_load_optimizer_and_scheduler": ("self", "checkpoint"),
        "_prepare_inputs": ("self", "generation_batch"),
        "_push_from_checkpoint": ("self", "checkpoint_folder"),
        "_run_epoch": None,  # of transformers
        "_save_checkpoint": ("self", "model", "trial"),
        "_set_signature_columns_if_needed": ("self",),
        "create_model_card": ("self", "model_name", "dataset_name", "tags"),
        "log": ("self", "logs", "start_time"),
        "train": None,  # of transformers
        "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    },
    RepeatSampler: {
        "__init__": ("self", "data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"),
        "__iter__": ("self",),
    },
    VLLMGeneration: {"_iter_named_params": ("self",)},
    VLLMClient: {
        "generate": tuple(
            "self prompts features n repetition_penalty temperature top_p top_k min_p max_tokens logprobs "
            "structured_outputs_regex generation_kwargs".split()
        ),
        "reset_prefix_cache": ("self",),
        "update_named_params": ("self", "metadata", "named_params"),
    },
}

# Class of TRL -> attributes that this package reads or sets.
ATTRIBUTES = {
    GRPOTrainer: tuple(
        "_batch_environments _buffered_inputs _dist _env_tools _get_per_token_logps_and_entropies _is_vlm "
        "_last_loaded_step _logs _metrics _pending_extra_logs _signature_columns _step _tokenize_prompts _tokenizer "
        "accelerator args aux_loss_enabled callback_handler chat_template chat_template_kwargs control "
        "current_gradient_accumulation_steps environment_factories environments eos_token_ids eval_dataset "
        "hub_model_id loss_type lr_scheduler max_completion_length model model_wrapped num_generations "
        "num_generations_eval num_iterations optimizer processing_class reward_funcs reward_weights "
        "router_aux_loss_coef shuffle_dataset state temperature tools train_dataset use_vllm vllm_generation "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction "
        "vllm_importance_sampling_mode".split()
    ),
    RepeatSampler: ("generator", "num_samples", "seed", "shuffle"),
    VLLMGeneration: tuple(
        "_dist _fix_param_name_to_vllm accelerator generate llm mode model server_timeout sync_weights "
        "tensor_parallel_size vllm_client".split()
    ),
    VLLMClient: ("base_url", "session"),
}


def check_trl(
    hooks: dict[type, dict[str, tuple[str, ...] | None]] = HOOKS,
    attributes: dict[type, tuple[str, ...]] = ATTRIBUTES,
    installed: str | None = None,
) -> None:
    """Check the names of TRL that this package overrides and reads, and warn once of an untested minor version.

    Args:
        installed: TRL's version; None reads it.

    Raises:
        ImportError: a hook is missing or has other parameters, or an attribute is missing. The message names it and
            the version to install.
    """
    installed = installed or version("trl")
    problems = [
        f"`{owner.__name__}.{name}({', '.join(parameters or ())})`, which credit_trl overrides"
        for owner, methods in hooks.items()
        for name, parameters in methods.items()
        if not _has_method(owner, name, parameters)
    ]
    problems += [
        f"`{owner.__name__}.{name}`, which credit_trl reads"
        for owner, names in attributes.items()
        for name in missing_attributes(owner, names)
    ]
    if problems:
        raise ImportError(
            f"TRL {installed} has no {'; no '.join(problems)}. Install a tested version: "
            f'pip install "trl=={TESTED_TRL[-1]}.*".'
        )
    release = Version(installed)
    if f"{release.major}.{release.minor}" not in TESTED_TRL:
        _warn_untested(installed)


@cache
def check_installed_trl() -> None:
    """`check_trl` once per process, since it reads the bytecode of TRL's trainer."""
    check_trl()


def missing_attributes(owner: type, names: tuple[str, ...]) -> list[str]:
    """Names that are neither attributes of a class nor set by one of its methods, from their bytecode."""
    missing = set(names) - set(dir(owner))
    methods = [getattr(value, "__func__", value) for base in owner.__mro__ for value in vars(base).values()]
    for code in (method.__code__ for method in methods if inspect.isfunction(method)):
        if missing.intersection(code.co_names):
            missing -= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return sorted(missing)


def _has_method(owner: type, name: str, parameters: tuple[str, ...] | None) -> bool:
    method = getattr(owner, name, None)
    return callable(method) and (parameters is None or tuple(inspect.signature(method).parameters) == parameters)


@cache
def _warn_untested(installed: str) -> None:
    message = (
        f"credit_trl is tested with TRL {', '.join(TESTED_TRL)}; TRL {installed} is installed. The methods and "
        "attributes of TRL that it uses are unchanged, and their behaviour is untested. Run `make test-trl "
        f'TRL={installed}` in a checkout, or install a tested version: pip install "trl=={TESTED_TRL[-1]}.*".'
    )
    warnings.warn_explicit(message, UserWarning, "credit_trl", 0)  # no source line in the output

