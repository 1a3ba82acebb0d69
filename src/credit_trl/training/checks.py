"""Checks of data, model and machine against the configuration, before the first rollout. Errors name the fix."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.training_args import OptimizerNames
from trl.trainer.utils import get_callable_name

from credit_trl.config import CreditConfig
from credit_trl.contexts.prompts import has_images, user_text
from credit_trl.loss.blocks import accumulation_dtype
from credit_trl.loss.head import lm_head
from credit_trl.loss.projection import project
from credit_trl.rollout.verdict import parameters_of
from credit_trl.teacher.causal_lm import backbone, unwrap_adapters
from credit_trl.teacher.external import ModelTeacher
from credit_trl.teacher.models import Teacher, eval_mode
from credit_trl.teacher.packing import enable_packing
from credit_trl.teacher.sharding import full_shape

# Endings of the names of optimizers that step inside the backward pass.
_STEPS_IN_BACKWARD = ("layerwise", "lomo")


def check_vocabulary(args: CreditConfig, model: nn.Module) -> int:
    """Return the vocabulary size.

    Raises:
        ValueError: `distillation_topk` exceeds it.
    """
    vocabulary = full_shape(model.get_output_embeddings().weight)[0]
    if "topk" in args.distillation_support and args.distillation_topk > vocabulary:
        raise ValueError(
            f"`distillation_topk={args.distillation_topk}` exceeds the model's vocabulary of {vocabulary}. Lower "
            "it, or use `distillation_support='full'`."
        )
    return vocabulary


def check_machine(accelerator: Accelerator) -> None:
    """Check that the distributed wrapper is supported.

    Raises:
        ValueError: FSDP has version 1.
    """
    if accelerator.distributed_type == "FSDP" and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise ValueError("FSDP version 1 is not supported: set `fsdp_version: 2` in the accelerate configuration.")


def check_parts(
    args: CreditConfig, accelerator: Accelerator, router_loss: bool, warn: Callable[[str, str], None]
) -> None:
    """Check that micro-batches may be computed in parts; `warn(cause, message)` where GRPO has no parts.

    Raises:
        ValueError: `update_batch_tokens` is set under DeepSpeed, for a mixture of experts with a router loss, or with
            an optimizer that steps inside the backward pass.
    """
    if args.update_batch_tokens is None:
        return
    if args.distillation_weight == 0.0:
        warn(
            "no_parts",
            "`update_batch_tokens` has no effect at `distillation_weight=0`: GRPO's micro-batches are computed whole. "
            "Lower `per_device_train_batch_size` if they do not fit the memory.",
        )
        return
    remedy = "Remove `update_batch_tokens` and lower `per_device_train_batch_size`."
    if accelerator.distributed_type == "DEEPSPEED":
        raise ValueError(
            f"`update_batch_tokens` needs several backward passes in a micro-batch, which DeepSpeed does not allow. "
            f"{remedy}"
        )
    if (name := OptimizerNames(args.optim).value).endswith(_STEPS_IN_BACKWARD):
        raise ValueError(
            f"`optim={name!r}` changes the weights inside each backward pass, so a micro-batch in parts would be "
            f"several updates. {remedy}"
        )
    if router_loss:
        raise ValueError(
            "`update_batch_tokens` divides the micro-batch over which the router's load-balancing loss is a mean. "
            f"{remedy}"
        )


# Smallest eps that logits are compared with: that of TF32, in which a GPU may multiply fp32.
_MIN_EPS = 2.0**-10
# Allowed change of logits under left padding, relative to the largest logit: recurrent states change slightly.
_PADDING_TOLERANCE = 0.01
_PADDING = 8
_PROMPTS = 4


def check_model(model: nn.Module, accelerator: Accelerator) -> None:
    """Check that a model can be distilled.

    Raises:
        ValueError: no parameter is trained, the model is split over devices, its logits are not those of its backbone
            and head (`check_logits`), or they change with later tokens or when the prompt is padded on the left.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"No parameter of `{type(unwrap_adapters(model)).__name__}` has `requires_grad`, so nothing would be "
            "trained. Unfreeze some, or give a `peft_config`."
        )
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        raise ValueError(
            f"`device_map` splits the model over the devices {', '.join(devices)}, the default when one process "
            "loads a model by name and sees several GPUs. Start one process per GPU (`accelerate launch`, `trl "
            "credit`; with FSDP2 if the model does not fit), or select one GPU: `CUDA_VISIBLE_DEVICES=0`."
        )
    check_logits(model, accelerator)
    _check_logits_of_prompts(model, accelerator)


def _check_logits_of_prompts(model: nn.Module, accelerator: Accelerator) -> None:
    """Neither later tokens nor left padding, which the student's prompts have, may change the logits."""
    if not _is_whole(model, accelerator):
        return
    input_ids = _regular_ids(model, 4 * _PROMPTS).view(_PROMPTS, 4)
    padded = torch.cat([input_ids[:, :1].repeat(1, _PADDING), input_ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :_PADDING] = 0
    with _inference(model), accelerator.autocast():
        own = model(input_ids=input_ids, attention_mask=mask[:, _PADDING:], use_cache=False).logits
        shorter = model(input_ids=input_ids[:, :3], attention_mask=mask[:, _PADDING:-1], use_cache=False).logits
        behind = model(input_ids=padded, attention_mask=mask, use_cache=False).logits
    name = type(unwrap_adapters(model)).__name__
    if changed := _change(own[:, 2], shorter[:, -1]):
        raise ValueError(
            f"The logits of `{name}` change by {changed:.2g} when a token follows, so the model is not causal. Use a "
            "causal language model, or check its configuration (`is_decoder`, `attn_type`)."
        )
    if behind[:, -1].isnan().any() and not own.isnan().any():
        raise ValueError(
            f"The logits of `{name}` in {str(own.dtype).removeprefix('torch.')} are NaN when its prompt is padded on "
            "the left. Use another dtype or `attn_implementation` (`model_init_kwargs`)."
        )
    if changed := _change(own[:, -1], behind[:, -1]):
        raise ValueError(
            f"The logits of `{name}` change by {changed:.2g} when its prompt is padded on the left, as with learned "
            "position embeddings and some recurrent states. The student would be trained on another distribution than "
            "the one it samples from. Use a model with rotary or relative positions, or TRL's `GRPOTrainer`."
        )


def _change(own: Tensor, other: Tensor) -> float:
    """Largest difference of the logits (P, V) of some prompts if it exceeds rounding in each of them, else 0.

    Rounding may route a token of a single prompt to another expert.
    """
    eps = max(_MIN_EPS, torch.finfo(own.dtype).eps)
    own, other = own.float().nan_to_num(), other.float().nan_to_num()
    changes, largest = (own - other).abs().amax(dim=-1), own.abs().amax(dim=-1)
    return changes.max().item() if (changes > (_PADDING_TOLERANCE + 4 * eps) * largest).all() else 0.0


def check_teacher(args: CreditConfig, teacher: Teacher, accelerator: Accelerator) -> None:
    """Check the model that scores: the logits of an external one, and whether packed passes are correct for it.

    Raises:
        ValueError: see `check_logits` and `teacher.packing.enable_packing`.
    """
    if isinstance(teacher, ModelTeacher):
        check_logits(teacher.unwrapped(teacher.model), accelerator)
    if args.packed:
        for model in teacher.models():
            enable_packing(model)


@contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; training modes and random states are restored afterwards."""
    device = model.device
    fork = torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type)
    with eval_mode(model), torch.no_grad(), fork:
        yield


def check_logits(model: nn.Module, accelerator: Accelerator) -> None:
    """Check that the model's logits are `softcap(scale · (h Wᵀ + b))` of its last hidden states h.

    Compares both after four tokens, with a tolerance of four times the eps of the coarsest dtype involved (at least
    TF32's) relative to the largest logit. Training modes and random states are unchanged. Skipped under FSDP and
    DeepSpeed and for sharded or meta parameters, where no process can run the model yet.

    Raises:
        ValueError: they differ, so the losses would not be those of the model's distribution.
    """
    if not _is_whole(model, accelerator):
        return
    with _inference(model):
        difference, tolerance = _compare_logits(model, accelerator)
    if not difference <= tolerance:
        raise ValueError(
            f"The logits of `{type(unwrap_adapters(model)).__name__}` are not the product of its last hidden states "
            "and output embeddings with a bias, a scale and a soft cap, so distillation and analysis would not use "
            f"the model's distribution. After four tokens they differ by {difference:.2g}; rounding explains "
            f"{tolerance:.2g}. Train it with TRL's `GRPOTrainer`, or open an issue that names the class."
        )


def _is_whole(model: nn.Module, accelerator: Accelerator) -> bool:
    if accelerator.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        return False
    parts = (p.is_meta or isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())
    return not any(parts)


def _compare_logits(model: nn.Module, accelerator: Accelerator) -> tuple[float, float]:
    """Return the largest difference between the model's logits and those of `project`, and the tolerance."""
    input_ids = _regular_ids(model, 4)
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "use_cache": False}
    with accelerator.autocast():
        own = model(**inputs).logits[0, -1:]
        hidden = backbone(model)(**inputs).last_hidden_state[0, -1:]
        dtypes = [own.dtype, hidden.dtype]
        if torch.is_autocast_enabled(own.device.type):
            dtypes.append(torch.get_autocast_dtype(own.device.type))
    head = lm_head(model, temperature=1.0)
    sizes = (own.shape[-1], hidden.shape[-1])
    if sizes != (head.vocabulary_size, head.weight.shape[1]) or not head.weight.is_floating_point():
        return math.inf, 0.0
    hidden = hidden.to(head.weight.device)
    trained = hidden.new_empty(1, head.vocabulary_size, dtype=accumulation_dtype(hidden))
    project(head, hidden, out=trained, wants_entropy=False)
    own, trained = own.to(trained).nan_to_num(), trained.nan_to_num()
    eps = max(_MIN_EPS, *(torch.finfo(dtype).eps for dtype in [*dtypes, head.weight.dtype]))
    return (own - trained).abs().max().item(), 4 * eps * own.abs().max().item()


def _regular_ids(model: nn.Module, count: int) -> Tensor:
    """Token ids spread over the vocabulary without special tokens, (1, count)."""
    config = unwrap_adapters(model).config
    text = config.get_text_config()
    marks = ("_token_id", "_token_ids", "_token_index")
    named = [value for part in (config, text) for name, value in vars(part).items() if name.endswith(marks)]
    special = {i for value in named for i in (value if isinstance(value, list | tuple) else [value])}
    ordinary = [i for i in range(text.vocab_size) if i not in special]
    spread = [ordinary[(2 * k + 1) * len(ordinary) // (2 * count)] for k in range(count)]
    return torch.tensor([spread], device=model.device)


def check_datasets(args: CreditConfig, train_dataset: Any, eval_dataset: Any, environment_factory: Any) -> None:
    """Check that the datasets have the columns that the configuration needs.

    Raises:
        ValueError: a dataset has no column `prompt` (or no `task` for `contrastive_source="same_task"`), has images or
            a `privileged_context` that is not text, or has no rows to draw contrast prompts from.
    """
    contrasts = args.distillation_weight > 0.0 and args.contrasts
    for name, dataset in named_datasets(train_dataset, eval_dataset).items():
        columns = getattr(dataset, "column_names", None)
        if columns is None:
            continue
        if name != "train_dataset" and hasattr(dataset, "__len__") and len(dataset) == 0:
            raise ValueError(f"`{name}` has no rows. Give rows, or set `eval_strategy='no'` without `eval_dataset`.")
        if "prompt" not in columns and environment_factory is None:
            raise ValueError(
                f"`{name}` has no column `prompt`; its columns are {', '.join(columns)}. Rename the one that holds the question: dataset.rename_column(..., 'prompt')."
            )
        if args.distillation_weight > 0.0 and {"image", "images"} & set(columns):
            raise ValueError(_NO_IMAGES)
        check_column_names(f"`{name}`", columns)
        _check_types(name, dataset, columns)
    has_rows = isinstance(train_dataset, Dataset) and "prompt" in train_dataset.column_names
    if contrasts and args.contrastive_source == "dataset" and not has_rows:
        raise ValueError(
            "`contrastive_source='dataset'` draws contrast prompts by row, which needs a `datasets.Dataset` with a "
            "`prompt` column. Use `contrastive_source='batch'` with two prompts or more in a generation batch, or "
            "`contrastive_source='none'`."
        )


def _check_types(name: str, dataset: Any, columns: Sequence[str]) -> None:
    """Raise where the first prompt is neither text nor messages, or `privileged_context` does not hold text."""
    has_prompts = isinstance(dataset, Dataset) and len(dataset) and "prompt" in columns
    if has_prompts and not isinstance(prompt := dataset[0]["prompt"], str | list):
        raise ValueError(
            f"The prompt of row 0 of `{name}` is {prompt!r}. A prompt is text, or a list of messages "
            "`{'role': 'user', 'content': '...'}`."
        )
    feature = (getattr(dataset, "features", None) or {}).get("privileged_context")
    if feature is not None and getattr(feature, "dtype", None) not in ("string", "large_string", "null"):
        raise ValueError(f"`{name}` column `privileged_context` must hold text, but holds {feature}.")


def named_datasets(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """The datasets by the name that errors give them; None where there is none."""
    if isinstance(eval_dataset, dict):
        return {"train_dataset": train_dataset} | {f"eval_dataset[{k!r}]": v for k, v in eval_dataset.items()}
    return {"train_dataset": train_dataset, "eval_dataset": eval_dataset}


# Rows whose prompts are measured at construction; larger datasets are measured at evenly spaced rows.
_MEASURED_ROWS = 10_000


def check_prompts(
    args: CreditConfig,
    datasets: dict[str, Any],
    encode: Callable[[Any], list[int]],
    vocabulary: int,
    positions: int | None,
    warn: Callable[[str, str], None],
) -> None:
    """Check that the chat template renders the first, shortest and longest prompt of each dataset, and their lengths.

    Streams are not read. Shortest and longest are those with fewest and most characters among `_MEASURED_ROWS` rows.

    Args:
        encode: prompt to token ids, as the rollout encodes it.
        vocabulary, positions: of the model; positions may be None.
        warn: takes the cause and the message of a warning.

    Raises:
        ValueError: a prompt has ids of another model, cannot be rendered, is empty, fills `vllm_max_model_length`, or,
            with a distillation loss, has images or no user turn.
    """
    for name, dataset in datasets.items():
        columns = set(dataset.column_names) if isinstance(dataset, Dataset) and len(dataset) else set()
        if "prompt" not in columns or columns & {"image", "images"}:
            continue
        step = max(len(dataset) // _MEASURED_ROWS, 1)
        prompts = dataset.select(range(0, len(dataset), step)).select_columns("prompt")["prompt"]
        lengths = [len(str(prompt)) if prompt else 0 for prompt in prompts]
        for row in dict.fromkeys((lengths.index(max(lengths)), lengths.index(min(lengths)), 0)):
            place = f"row {row * step} of `{name}`"
            if has_images(prompts[row] or ()):
                if args.distillation_weight > 0.0:
                    raise ValueError(_NO_IMAGES)
                continue
            ids = _encoded(args, place, prompts[row], encode)
            if ids and max(ids) >= vocabulary:
                raise ValueError(
                    f"The prompt of {place} has the token id {max(ids)}, and the model's vocabulary has {vocabulary} "
                    "tokens. Is `processing_class` the tokenizer of another model?"
                )
            _check_length(args, place, len(ids), positions, warn)


def _encoded(args: CreditConfig, place: str, prompt: Any, encode: Callable[[Any], list[int]]) -> list[int]:
    empty = f"The prompt of {place} is empty ({prompt!r}). Fill the column `prompt`, or drop the row."
    if not prompt:
        raise ValueError(empty)
    try:
        text = user_text(prompt) if args.distillation_weight > 0.0 else "unread"  # the teacher's turn
        ids = encode(prompt)
    except Exception as error:  # a template is a program
        raise ValueError(
            f"The prompt of {place} cannot be encoded ({type(error).__name__}: {error}). A prompt is text, or a list "
            "of messages `{'role': 'user', 'content': '...'}` that the tokenizer's chat template renders."
        ) from error
    if not text.strip():
        raise ValueError(empty)
    return ids


def _check_length(
    args: CreditConfig, place: str, tokens: int, positions: int | None, warn: Callable[[str, str], None]
) -> None:
    """Compare a prompt with the limits of engine, model and teacher."""
    limit = args.vllm_max_model_length if args.use_vllm and args.vllm_mode == "colocate" else None
    if limit is not None and tokens >= limit:
        raise ValueError(
            f"The prompt of {place} has {tokens} tokens, and `vllm_max_model_length={limit}` leaves none for the "
            "answer. Increase it, or drop longer prompts: dataset.filter(...)."
        )
    whole = tokens + args.max_completion_length
    if positions is not None and whole > positions:
        warn(
            "long_prompt",
            f"The prompt of {place} has {tokens} tokens; with `max_completion_length={args.max_completion_length}` it "
            f"exceeds the model's `max_position_embeddings={positions}`. Drop longer prompts, or lower "
            "`max_completion_length`.",
        )
    if args.distillation_weight > 0.0 and tokens >= args.max_reprompt_len:
        warn(
            "no_room",
            f"The prompt of {place} has {tokens} tokens, so neither demonstration nor feedback fits "
            f"`max_reprompt_len={args.max_reprompt_len}` beside it, and such samples have no teacher. Increase it, or "
            "drop longer prompts.",
        )


def check_enough_rows(args: CreditConfig, train_dataset: Any) -> None:
    """Check that the dataset fills one generation batch, as the sampler drops incomplete ones.

    Raises:
        ValueError: it has too few rows, so that training would end before its first step.
    """
    prompts = args.generation_batch_size // args.num_generations
    if hasattr(train_dataset, "__len__") and len(train_dataset) < prompts:
        raise ValueError(
            f"`train_dataset` has {len(train_dataset)} rows, but a generation batch of {args.generation_batch_size} "
            f"rollouts with `num_generations={args.num_generations}` needs {prompts}, so no step can be made. Add "
            "rows, or lower `gradient_accumulation_steps`, `per_device_train_batch_size` or "
            "`generation_batch_size`."
        )


# Arguments of a reward function beside the dataset columns; `truncated` only where it is accepted.
_PASSED = frozenset("prompts completions completion_ids trainer_state log_extra log_metric truncated".split())
# Columns of these names would take the place of another argument.
RESERVED_COLUMNS = _PASSED | {"environments"}
# Columns that TRL passes under the names in the plural.
_RENAMED = {"prompt": "prompts", "completion": "completions"}
# Columns that `remove_unused_columns` keeps.
_KEPT = frozenset("prompt image images privileged_context task".split())


def check_column_names(rows: str, columns: Iterable[str]) -> None:
    """Check that no column takes the place of another argument of reward functions, such as `completions`."""
    if taken := sorted(RESERVED_COLUMNS.intersection(columns)):
        raise ValueError(
            f"{rows} has the column `{taken[0]}`, the name of another argument of reward functions. Rename it: "
            f"dataset.rename_column({taken[0]!r}, 'my_{taken[0]}'), or remove it: "
            f"dataset.remove_columns({taken[0]!r})."
        )


def check_reward_columns(
    reward_funcs: Any,
    datasets: dict[str, Any],
    rollout_func: Callable[..., Any] | None,
    remove_unused: bool,
    has_environments: bool = False,
) -> None:
    """Check that each required parameter of a reward function is a column of each dataset that reaches it.

    Skipped with a `rollout_func`, because TRL also passes the fields that it returns.

    Raises:
        ValueError: a column is missing, `remove_unused_columns` drops it, or the function takes no argument of that
            name; or a reward function cannot be called. Without this check, the first call fails after a generation.
    """
    if rollout_func is not None:
        return
    funcs = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]
    funcs = [func for func in funcs if callable(func) and not isinstance(func, nn.Module)]
    passed = _PASSED | ({"environments"} if has_environments else set())
    for dataset_name, dataset in datasets.items():
        columns = getattr(dataset, "column_names", None)
        for func in funcs if columns is not None else ():
            func_name = get_callable_name(func)
            required = [name for name in _required(func) if name not in passed]
            if renamed := [name for name in required if name in _RENAMED]:
                raise ValueError(
                    f"Reward function `{func_name}` has the parameter `{renamed[0]}`, which it is not called with. "
                    f"Rename it to `{_RENAMED[renamed[0]]}`, which holds one for each rollout."
                )
            if missing := [name for name in required if name not in columns]:
                raise ValueError(
                    f"Reward function `{func_name}` needs the column {', '.join(f'`{m}`' for m in missing)}, which "
                    f"`{dataset_name}` does not have; its columns are {', '.join(columns)}. "
                    "Add it, rename the column or the parameter, or give it a default."
                )
            if remove_unused and (dropped := [name for name in required if name not in _KEPT]):
                raise ValueError(
                    f"`remove_unused_columns=True` drops the column `{dropped[0]}`, which reward function "
                    f"`{func_name}` needs. Set it to False, TRL's default."
                )


def _required(func: Callable[..., Any]) -> list[str]:
    """Names of the parameters without a default."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = parameters_of(func).values()
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


_NO_IMAGES = (
    "Prompts with images are not supported with distillation: teacher and contrast prompts exchange the text of a "
    "prompt only. Use prompts, environments and tools of text only, or `distillation_weight=0` (GRPO)."
)


# Fields of dataset rows and of TRL's rollouts that hold images.
_IMAGE_FIELDS = ("image", "images", "pixel_values", "num_images")


def check_no_images(rows: Sequence[Mapping[str, Any]], message: str = _NO_IMAGES) -> None:
    """Check that dataset rows, or a rollout to which environments and tools may add some, hold no images.

    Raises:
        ValueError: one holds an image; with this message.
    """
    for row in rows:
        fields = (row.get(name) for name in _IMAGE_FIELDS)
        if any(_has_images(field) for field in fields) or has_images(row.get("prompt") or ""):
            raise ValueError(message)


def _has_images(images: Any) -> bool:
    """Whether a field holds images: it is not None, 0 or a (nested) list of those."""
    if isinstance(images, list | tuple):
        return any(map(_has_images, images))
    return images is not None and not (isinstance(images, int) and images == 0)
