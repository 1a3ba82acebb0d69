"""What defines a run: its data, seed, processes and options. A run that resumes with other values is another run."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset

# Options that do not change what is learnt: places, logs, evaluations, checkpoints, the length of the run, and how
# fast it is computed.
_FREE = frozenset(
    """
    output_dir run_name resume_from_checkpoint max_steps num_train_epochs disable_tqdm project
    log_level log_level_replica log_on_each_node log_completions log_multimodal log_unique_prompts
    log_completions_hub_repo num_completions_to_print report_to include_num_input_tokens_seen include_for_metrics
    bf16_full_eval fp16_full_eval batch_eval_metrics prediction_loss_only per_device_eval_batch_size
    num_generations_eval load_best_model_at_end metric_for_best_model greater_is_better enable_jit_checkpoint
    ignore_data_skip restore_callback_states_from_checkpoint use_cpu tf32 packed scoring_batch_tokens
    distillation_kernels gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing
    activation_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
    use_liger_kernel liger_kernel_config use_cache cache_implementation use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged accelerator_config parallelism_config
    deepspeed fsdp fsdp_config debug skip_memory_metrics do_train do_eval do_predict local_rank label_names
    model_init_kwargs teacher_model_init_kwargs trust_remote_code full_determinism pad_to_multiple_of
    ds3_gather_for_generation on_verifier_error verifier_timeout on_nonfinite auto_find_batch_size
    """.split()
)
_FREE_PREFIXES = ("logging_", "eval_", "save_", "hub_", "push_", "trackio_", "dataloader_", "ddp_", "vllm_")
# Options of vLLM that change the samples or the loss.
_OF_VLLM = ("vllm_importance_sampling_", "vllm_structured_outputs_")
# Fields of an adapter's configuration that determine its parameters and how they change the base.
_ADAPTER_FIELDS = (
    "peft_type r lora_alpha target_modules target_parameters layers_to_transform modules_to_save rank_pattern "
    "alpha_pattern use_dora use_rslora alpha trainable_token_indices".split()
)
# Rows of a data set of which the fingerprint reads all; of a larger one it reads as many, evenly spaced.
MAX_ROWS = 100_000
# First rows of a stream that are compared.
STREAM_ROWS = 8


def run_options(trainer: Any) -> dict[str, Any]:
    """Options that a checkpoint stores, and a run that resumes from it must have, as JSON.

    Those of the configuration that change what is learnt, `peft_config.…` of an adapter, `processes`, name and
    sizes of `model`, the names of `reward_funcs`, and `data`, see `fingerprint`.
    """
    options = {}
    for name, value in trainer.args.to_dict().items():
        if _changes_learning(name):
            options[name] = value
    model = trainer.accelerator.unwrap_model(trainer.model)
    if is_peft_model(model):
        adapter = model.peft_config[model.active_adapter].to_dict()
        for name in _ADAPTER_FIELDS:
            if adapter.get(name):
                options[f"peft_config.{name}"] = adapter[name]
    options["model"] = Path(getattr(model, "name_or_path", "") or type(model).__name__).name
    sizes = model.config.get_text_config()
    options["model.hidden_size"] = sizes.hidden_size
    options["model.num_hidden_layers"] = sizes.num_hidden_layers
    options["processes"] = trainer.accelerator.num_processes
    options["reward_funcs"] = trainer.reward_func_names
    options["data"] = fingerprint(trainer.train_dataset)
    return json.loads(json.dumps(options, default=_sorted_or_text))


def _changes_learning(name: str) -> bool:
    if name.startswith(_OF_VLLM):
        return True
    return name not in _FREE and not name.startswith(_FREE_PREFIXES)


def _sorted_or_text(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def fingerprint(dataset: Any) -> str | None:
    """Number and hash of the rows of a data set, in their order; of a stream of its first rows.

    The fingerprint of `datasets` depends on the functions that made the rows, and so on the process.
    """
    if isinstance(dataset, IterableDataset):
        stream = dataset if dataset.features is None else dataset.decode(False)
        text = json.dumps(list(stream.take(STREAM_ROWS)), default=lambda value: type(value).__name__, sort_keys=True)
        return f"a stream, {xxhash.xxh3_128(text.encode()).hexdigest()}"
    if not isinstance(dataset, Dataset):
        return None
    stride = max(math.ceil(len(dataset) / MAX_ROWS), 1)
    rows = dataset.select(range(0, len(dataset), stride))
    digest = xxhash.xxh3_128()
    for batch in rows.with_format("arrow").iter(batch_size=1000):
        for name in sorted(batch.column_names):
            text = json.dumps([name, batch[name].to_pylist()], default=str)
            digest.update(text.encode())
    return f"{len(dataset)} rows, {digest.hexdigest()}"


def describe_change(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Each option that differs, as `` `name`: old -> new ``.

    Options that the saved ones lack came with a later version. Of an adapter only the fields that are set are listed.
    """
    changes = []
    for name in current | saved:
        is_compared = name in saved or name.startswith("peft_config.")
        if is_compared and saved.get(name) != current.get(name):
            changes.append(f"`{name}`: {saved.get(name)!r} -> {current.get(name)!r}")
    return changes


def merged_options(segments: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The options at the end of the segments of `run.json`, of which later ones list what has changed."""
    options: dict[str, Any] = {}
    for segment in segments:
        options |= segment["options"]
    return options
