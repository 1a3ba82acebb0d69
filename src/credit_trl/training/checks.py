"""Checks of data and model against a configuration: a failure is one error that names the fix, before any rollout."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from credit_trl.config import CreditConfig
from credit_trl.contexts.prompts import has_images
from credit_trl.loss.blocks import accumulation_dtype
from credit_trl.loss.head import lm_head
from credit_trl.loss.projection import project
from credit_trl.teacher.causal_lm import backbone, unwrap_adapters
from credit_trl.teacher.sharding import full_shape


def check_vocabulary(args: CreditConfig, model: nn.Module) -> int:
    """The size of the vocabulary, which K must not exceed."""
    vocabulary = full_shape(model.get_output_embeddings().weight)[0]
    if "topk" in args.distillation_support and args.distillation_topk > vocabulary:
        raise ValueError(
            f"`distillation_topk={args.distillation_topk}` exceeds the model's vocabulary of {vocabulary}. Lower "
            "it, or use `distillation_support='full'`."
        )
    return vocabulary


def check_machine(args: CreditConfig, model: nn.Module, accelerator: Accelerator) -> None:
    """The model can be wrapped, and the kernels that were asked for run, where it is trained.

    Raises:
        ValueError: FSDP is of version 1; or Triton's kernels were asked for, and there is no GPU, or the model is in
            fp64.
    """
    if accelerator.distributed_type == "FSDP" and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise ValueError("FSDP version 1 is not supported here: set `fsdp_version: 2` in the accelerate file.")
    device = accelerator.device
    if args.distillation_kernels != "triton":
        return
    from credit_trl.loss import triton_rows

    otherwise = "set `distillation_kernels='torch'`, which runs everywhere"
    if not triton_rows.runs_on(device):
        raise ValueError(
            f"`distillation_kernels='triton'` needs a GPU, and this trains on {device.type!r}. Train on one, or "
            f"{otherwise}. For a test without a GPU, TRITON_INTERPRET=1 in the environment runs them in Triton's "
            "interpreter, slowly."
        )
    if model.dtype == torch.float64:
        raise ValueError(
            "`distillation_kernels='triton'` computes in fp32, and the model is in fp64: load it in another dtype, or "
            f"{otherwise}."
        )


# The finest eps that a family's own logits can be held to: TF32's, in which a GPU may multiply fp32.
_FINEST_EPS = 2.0**-10
# Of the largest logit: what padding before a prompt may change. A state that pads run through moves a little.
_PADDING_TOLERANCE = 0.01
_PADDING = 8
_PROMPTS = 4


def check_model(model: nn.Module, accelerator: Accelerator) -> None:
    """What distillation needs of a model, before anything is generated.

    Raises:
        ValueError: the model is spread over devices, its logits are not its head's (`check_logits`), or change with
            what pads a prompt.
    """
    _check_one_device(model)
    check_logits(model, accelerator)
    _check_padding(model, accelerator)


def _check_one_device(model: nn.Module) -> None:
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        raise ValueError(
            f"The model is spread over the devices {', '.join(devices)} by `device_map`, which is how one process "
            "loads a model by name where it sees several GPUs. Start one process a GPU (`accelerate launch`, `trl "
            "credit`; with FSDP2 where a GPU is too small), or let it see one: `CUDA_VISIBLE_DEVICES=0`."
        )


def _check_padding(model: nn.Module, accelerator: Accelerator) -> None:
    """Prompts of the student are padded on the left, and those of the teacher are not."""
    if not _is_whole(model, accelerator):
        return
    input_ids = _ordinary_ids(model, 4 * _PROMPTS).view(_PROMPTS, 4)
    padded = torch.cat([input_ids[:, :1].repeat(1, _PADDING), input_ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :_PADDING] = 0
    with _at_rest(model), accelerator.autocast():
        own = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits[:, -1]
        behind = model(input_ids=padded, attention_mask=mask, use_cache=False).logits[:, -1]
    eps = max(_FINEST_EPS, torch.finfo(own.dtype).eps)
    own, behind = own.float().nan_to_num(), behind.float().nan_to_num()
    changes, largest = (own - behind).abs().amax(dim=-1), own.abs().amax(dim=-1)
    # Rounding may send a token to another expert, of one prompt or another; what padding does it does to all.
    if (changes > (_PADDING_TOLERANCE + 4 * eps) * largest).all():
        changed = changes.max().item()
        raise ValueError(
            f"The logits of `{type(unwrap_adapters(model)).__name__}` change by {changed:.2g} when its prompt is "
            "padded on the left, as those of learned positions and of some recurrent states do: the student would be "
            "trained on another distribution than it answers with. Use a family with rotary or relative positions, "
            "or TRL's `GRPOTrainer`."
        )


@contextmanager
def _at_rest(model: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients; modes and random states are left as they were."""
    training = [module for module in model.modules() if module.training]
    device = model.device
    try:
        model.eval()
        with (
            torch.no_grad(),
            torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type),
        ):
            yield
    finally:
        for module in training:
            module.training = True


def check_logits(model: nn.Module, accelerator: Accelerator) -> None:
    """The model's own logits are those that its backbone and its head give, which are what is trained.

    Both are computed once after four tokens, in eval mode; modes and random states are left as they were. Allowed is,
    of the largest logit, four times the eps of the coarsest dtype on the way (TF32's at least). Under FSDP and
    DeepSpeed, and where parameters are sharded or on the meta device, no process can run the model yet: nothing is
    compared.

    Raises:
        ValueError: they differ: the family computes more than `softcap(scale · (h Wᵀ + b))`, or something else.
    """
    if not _is_whole(model, accelerator):
        return
    with _at_rest(model):
        difference, tolerance = _compare_logits(model, accelerator)
    if not difference <= tolerance:
        raise ValueError(
            f"`{type(unwrap_adapters(model)).__name__}` does more to its logits than to multiply its backbone's last "
            "hidden state with its output embeddings, add a bias, scale and soft-cap: what distillation trains, and "
            f"what the analysis reads, would not be the model's distribution. After four tokens its logits differ by "
            f"{difference:.2g} from that one's; {tolerance:.2g} is rounding. Train it with TRL's `GRPOTrainer`, or "
            "open an issue that names the class."
        )


def _is_whole(model: nn.Module, accelerator: Accelerator) -> bool:
    if accelerator.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        return False
    parts = (p.is_meta or isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())
    return not any(parts)


def _compare_logits(model: nn.Module, accelerator: Accelerator) -> tuple[float, float]:
    """The largest difference between the model's own and the trained logits of the last token, and what is allowed."""
    input_ids = _ordinary_ids(model, 4)
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "use_cache": False}
    with accelerator.autocast():
        own = model(**inputs).logits[0, -1:]
        hidden = backbone(model)(**inputs).last_hidden_state[0, -1:]
        dtypes = [own.dtype, hidden.dtype]
        if torch.is_autocast_enabled(own.device.type):
            dtypes.append(torch.get_autocast_dtype(own.device.type))
    head = lm_head(model, temperature=1.0)
    if own.shape[-1] != head.vocabulary_size or not head.weight.is_floating_point():
        return math.inf, 0.0
    hidden = hidden.to(head.weight.device)
    trained = hidden.new_empty(1, head.vocabulary_size, dtype=accumulation_dtype(hidden))
    project(head, hidden, out=trained, wants_entropy=False)
    own, trained = own.to(trained).nan_to_num(), trained.nan_to_num()
    eps = max(_FINEST_EPS, *(torch.finfo(dtype).eps for dtype in [*dtypes, head.weight.dtype]))
    return (own - trained).abs().max().item(), 4 * eps * own.abs().max().item()


def _ordinary_ids(model: nn.Module, count: int) -> Tensor:
    """Token ids, (1, count), spread over the vocabulary; none stands for padding, an image or the like."""
    config = unwrap_adapters(model).config
    text = config.get_text_config()
    marks = ("_token_id", "_token_ids", "_token_index")
    named = [value for part in (config, text) for name, value in vars(part).items() if name.endswith(marks)]
    special = {i for value in named for i in (value if isinstance(value, list | tuple) else [value])}
    ordinary = [i for i in range(text.vocab_size) if i not in special]
    spread = [ordinary[(2 * k + 1) * len(ordinary) // (2 * count)] for k in range(count)]
    return torch.tensor([spread], device=model.device)


def check_datasets(args: CreditConfig, train_dataset: Any, eval_dataset: Any, environment_factory: Any) -> None:
    """Columns that training needs are there and hold what they should.

    Raises:
        ValueError: no `prompt`, images, `privileged_context` that is not text, or no rows to draw contrasts from.
    """
    evals = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
    for name, dataset in {"train_dataset": train_dataset, **evals}.items():
        columns = getattr(dataset, "column_names", None)
        if columns is None:
            continue
        if "prompt" not in columns and environment_factory is None:
            raise ValueError(
                f"`{name}` has no column `prompt`; its columns are {', '.join(columns)}. Rename the column that holds "
                "the question: dataset.rename_column('question', 'prompt')."
            )
        if args.distillation_weight > 0.0 and {"image", "images"} & set(columns):
            raise ValueError(_NO_IMAGES)
        if args.contrastive_source == "same_task" and "task" not in columns:
            raise ValueError(
                f"`contrastive_source='same_task'` needs the column `task`, which `{name}` does not have; its columns "
                f"are {', '.join(columns)}. Add it, or use `contrastive_source='batch'`."
            )
        if "privileged_context" in columns:
            _check_text_column(name, dataset, "privileged_context")
    contrasts = args.distillation_weight > 0.0 and args.contrasts
    has_rows = isinstance(train_dataset, Dataset) and "prompt" in train_dataset.column_names
    if contrasts and args.contrastive_source == "dataset" and not has_rows:
        raise ValueError(
            "`contrastive_source='dataset'` draws other questions by row, which needs a `datasets.Dataset` with a "
            "`prompt` column. Use `contrastive_source='batch'`."
        )


def check_enough_rows(args: CreditConfig, train_dataset: Any) -> None:
    """There is a row for every question of a generation batch: the sampler drops what does not fill one.

    Raises:
        ValueError: not one batch can be filled, so that training would end before its first step.
    """
    questions = args.generation_batch_size // args.num_generations
    if hasattr(train_dataset, "__len__") and len(train_dataset) < questions:
        raise ValueError(
            f"`train_dataset` has {len(train_dataset)} rows, and a generation batch of {args.generation_batch_size} "
            f"rollouts with `num_generations={args.num_generations}` takes {questions}: not one step could be made. "
            "Give more rows, or lower `gradient_accumulation_steps`, `per_device_train_batch_size` or "
            "`generation_batch_size`."
        )


# What TRL and this trainer pass to a reward function beside the columns of the data.
_PASSED = frozenset(
    "prompts completions completion_ids trainer_state log_extra log_metric environments truncated".split()
)


def check_reward_columns(reward_funcs: Any, train_dataset: Any, rollout_func: Callable[..., Any] | None) -> None:
    """Every parameter that a reward function needs is a column of the training data.

    With a `rollout_func` nothing is known beforehand: TRL passes on what fields it returns.

    Raises:
        ValueError: it is not; without this check the first call would fail after a generation.
    """
    columns = getattr(train_dataset, "column_names", None)
    if columns is None or rollout_func is not None:
        return
    for func in reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]:
        if not callable(func) or isinstance(func, nn.Module):
            continue
        if missing := [name for name in _required(func) if name not in columns and name not in _PASSED]:
            name = getattr(func, "__name__", type(func).__name__)
            raise ValueError(
                f"Reward function `{name}` reads the column {', '.join(f'`{m}`' for m in missing)}, which "
                f"`train_dataset` lacks; its columns are {', '.join(columns)}. {_remedy(columns, missing[0])}"
            )


def _remedy(columns: Sequence[str], wanted: str) -> str:
    """What gives the data a column of this name, or the function another name for it."""
    spare = [name for name in columns if name not in ("prompt", "id", "task", "privileged_context")]
    if not spare:
        return f"Add it (dataset.add_column({wanted!r}, [...])), or give the parameter a default."
    return (
        f"Rename the column that holds it (dataset.rename_column({spare[0]!r}, {wanted!r})), name the parameter after "
        "that column, or give it a default."
    )


def _required(func: Callable[..., Any]) -> list[str]:
    """Names of the parameters that have to be passed by keyword and have no default."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature says nothing of itself
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


_NO_IMAGES = (
    "Prompts with images cannot be contrasted or shown to the teacher: another question's text under this question's "
    "image is neither. Use prompts, environments and tools of text only, or `distillation_weight=0` (GRPO)."
)


# Where rows of the data, and what TRL makes of a rollout, hold images.
_IMAGE_FIELDS = ("image", "images", "pixel_values", "num_images")


def check_no_images(rows: list[dict[str, Any]]) -> None:
    """Neither rows of the data nor a rollout, to which environments and tools may have added some, hold images.

    Raises:
        ValueError: one does.
    """
    for row in rows:
        fields = (row.get(name) for name in _IMAGE_FIELDS)
        if any(_is_there(field) for field in fields) or has_images(row.get("prompt") or ""):
            raise ValueError(_NO_IMAGES)


def _is_there(images: Any) -> bool:
    """Whether a field holds any: it is not None, 0, or a list of such."""
    if isinstance(images, list | tuple):
        return any(map(_is_there, images))
    return images is not None and not (isinstance(images, int) and images == 0)


def _check_text_column(name: str, dataset: Any, column: str) -> None:
    features = getattr(dataset, "features", None)
    dtype = getattr(features.get(column), "dtype", None) if features else "string"
    if dtype not in ("string", "large_string", "null"):
        raise ValueError(f"`{name}` column `{column}` must hold text, it holds {features[column]}.")
