"""Checks of data, prompts and machine, before the first rollout, of what would train on wrong numbers or fail late."""

import inspect
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import AutoConfig

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import find_source, source_columns
from credit_trl.contexts.prompts import check_rows, first_streamed_row, images_of, row_prompt, user_text
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.loss.sampling import SamplingDistribution, unknown_option
from credit_trl.mistakes import check_vocabulary, refusal
from credit_trl.rollout.batch import Prompt
from credit_trl.rollout.verdict import parameters_of, takes
from credit_trl.teacher.external import teacher_place
from credit_trl.teacher.sharding import is_zero3
from credit_trl.training.step import engine_role
from credit_trl.trl_compat import get_callable_name


def check_paths(args: CreditConfig, model: Any, reward_funcs: Any) -> None:
    """Check the models that arguments name, and make `output_dir`.

    Raises:
        OSError: see `check_models`.
        ValueError: `output_dir` is a file or a link to nothing, or cannot be made.
    """
    check_models(args, model, reward_funcs)
    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, RuntimeError) as error:  # a file, a loop of links, a null character
        cause = getattr(error, "strerror", None) or error
        raise refusal("output_dir", name=str(args.output_dir)[:200], cause=cause) from error


def check_models(args: CreditConfig, model: Any, reward_funcs: Any) -> None:
    """Read the configurations of the models that arguments name, so that none fails after another has loaded.

    Raises:
        OSError: one cannot be read, in one line that names the argument.
    """
    place = {"trust_remote_code": args.trust_remote_code}
    _check_loads("model", model, revision=(args.model_init_kwargs or {}).get("revision"), **place)
    _check_loads("teacher_model_name_or_path", args.teacher_model_name_or_path, **teacher_place(args))
    for func in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        _check_loads("reward_funcs", func, **place)


def _check_loads(option: str, name: Any, **place: Any) -> None:
    if not isinstance(name, str):
        return
    try:
        AutoConfig.from_pretrained(name, **place)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split()).rstrip(".") + "."
        raise refusal("not_loaded", OSError, option=option, name=name, cause=cause) from error


def reads_engine(args: CreditConfig) -> bool:
    """Whether log-probabilities that a vLLM engine reports enter the loss."""
    corrects = args.vllm_importance_sampling_correction or engine_role(args) == "old"
    return args.use_vllm and (corrects or args.off_policy_mask_threshold is not None)


def check_engine_options(args: CreditConfig) -> None:
    """Raise a `ValueError` where the engine's log-probabilities cannot be compared with the policy's."""
    if not reads_engine(args):
        return
    if option := unknown_option(args):
        raise refusal("engine_option", name=option)
    if SamplingDistribution.from_config(args).is_policy:
        return
    if args.distillation_weight == 0.0:
        raise refusal("truncated_grpo")
    if args.off_policy_mask_threshold is not None and not args.vllm_importance_sampling_correction:
        raise refusal("truncated_off_policy")


def check_server(trainer: Any) -> None:
    """Raise a `ValueError` where a vLLM server reports log-probabilities of a distribution that it does not sample."""
    generation = trainer.vllm_generation
    if generation.mode != "server" or not trainer.accelerator.is_main_process or not reads_engine(trainer.args):
        return
    mode = generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
    is_same = trainer.args.temperature == 1.0 and SamplingDistribution.from_config(trainer.args).is_policy
    if mode != "processed_logprobs" and not (mode == "raw_logprobs" and is_same):
        raise refusal("logprobs_mode", mode=mode)


def named_datasets(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """The datasets by the name that errors give them; None where there is none."""
    datasets = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, dict):
        for name, dataset in eval_dataset.items():
            datasets[f"eval_dataset[{name!r}]"] = dataset
    else:
        datasets["eval_dataset"] = eval_dataset
    return datasets


def _columns(dataset: Any) -> list[str] | None:
    """Columns of the rows of a dataset, which a transform may change; None where it does not tell."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom" and len(dataset) > 0:
        return list(dataset[0])
    row = first_streamed_row(dataset)
    return getattr(dataset, "column_names", None) if row is None else list(row)


def check_stream_rows(name: str, dataset: Any, rows: Sequence[dict[str, Any]], *, needs_user: bool) -> None:
    """Check rows of a stream, of which the checks before a run see the first at most.

    Raises:
        ValueError: a row has no prompt, a reserved column or feedback that is no text, lacks a column of the first
            row, or see `check_rows`.
    """
    check_column_names(name, set().union(*rows))
    example = first_streamed_row(dataset) or rows[0]
    for number, row in enumerate(rows):
        if "prompt" not in row:
            raise refusal("no_prompt", name=name, columns=", ".join(row))
        if missing := sorted(example.keys() - row.keys() - {"image", "images", "privileged_context"}):
            raise ValueError(f"Row {number} of {name} has no column `{missing[0]}`, which the first row has. Add it.")
        feedback = row.get("privileged_context")
        if not isinstance(feedback, str | None):
            kind = type(feedback).__name__
            raise ValueError(f"{name} has the column `privileged_context` of {kind}. Write it as text.")
    form = type(example["prompt"])
    check_rows(name, (row["prompt"] for row in rows), needs_user=needs_user, form=form)


def check_datasets(
    args: CreditConfig, datasets: dict[str, Any], reward_funcs: Any, options: dict[str, Any], *, distills: bool
) -> None:
    """Check that the `named_datasets` have the columns that the configuration and the reward functions need.

    `options` are the trainer's other arguments; `distills` says whether a teacher scores. With a `rollout_func` among
    them reward functions are not checked, because TRL also passes the fields that it returns.

    Raises:
        ValueError: a dataset has no column `prompt` or none for a parameter of a reward function, has a
            column that hides an argument of reward functions, or has no rows or columns to draw contrast prompts
            from; or there is no such contrast source.
    """
    draws = distills and args.contrasts
    columns_of_source = source_columns(find_source(args.contrastive_source)) if draws else []
    has_environments = options.get("environment_factory") is not None
    funcs = []
    if options.get("rollout_func") is None:
        for func in reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]:
            if callable(func) and not isinstance(func, nn.Module):
                funcs.append(func)
    for name, dataset in datasets.items():
        if isinstance(dataset, dict):
            raise ValueError(f"`{name}` is a dictionary of splits: give one, dataset[{next(iter(dataset))!r}].")
        columns = _columns(dataset)
        if columns is None:
            continue
        if "prompt" not in columns and not has_environments:
            raise refusal("no_prompt", name=f"`{name}`", columns=", ".join(columns))
        check_column_names(f"`{name}`", columns)
        if isinstance(dataset, Dataset) and len(dataset) == 0:
            raise ValueError(f"`{name}` has no rows. Add some, or leave it out.")
        passed = set(columns)
        if args.remove_unused_columns:
            passed &= _KEPT
        for column in columns_of_source:
            if column not in passed:
                raise refusal("no_column", c=args, missing=column, name=name, passed=", ".join(sorted(passed)))
        passed -= {"prompt", "completion"}  # which TRL calls `prompts` and `completions`
        passed |= RESERVED_COLUMNS if has_environments else _PASSED
        for func in funcs:
            _check_arguments_of(func, passed, name, args)
    rows = datasets["train_dataset"]
    has_rows = isinstance(rows, Dataset) and "prompt" in _columns(rows)
    if draws and args.contrastive_source == "dataset" and not has_rows:
        raise refusal("no_rows_to_draw")


def _check_arguments_of(func: Any, passed: Set[str], dataset_name: str, args: CreditConfig) -> None:
    """Check that a reward function takes the arguments that are passed, and needs no other one."""
    for argument in sorted(passed - {"truncated"}):
        if not takes(func, argument):
            raise refusal("extra_argument", func=get_callable_name(func), extra=argument)
    for parameter in parameters_of(func).values():
        is_needed = parameter.kind in _NAMED and parameter.default is parameter.empty
        if is_needed and parameter.name not in passed:
            values = {"func": get_callable_name(func), "passed": ", ".join(sorted(passed))}
            raise refusal("missing_argument", c=args, missing=parameter.name, name=dataset_name, **values)


def check_truncated(trainer: Any, share: float) -> None:
    """Warn where more than 90 % of a generation batch did not end, naming an end of turn that is no EOS id."""
    if share <= 0.9:
        return
    turn = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "@"}]
    unknown = ""
    with suppress(Exception):  # no template, or one that takes other turns only
        end_text = trainer.context_builder.render(turn, add_generation_prompt=False).rpartition("@")[2].strip()
        end = trainer._tokenizer(end_text, add_special_tokens=False)["input_ids"][:1]
        if end and end[0] not in trainer.eos_token_ids:
            unknown = (
                f" The chat template ends a turn with {trainer._tokenizer.decode(end)!r}, where generation does not "
                f"end: add its id {end[0]} to the `eos_token_id` of the model's `generation_config`."
            )
    trainer.alarms.raise_if(True, "truncated", share=share, unknown=unknown)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Arguments of a reward function beside the dataset columns; `truncated` only where it is accepted.
_PASSED = frozenset("prompts completions completion_ids trainer_state log_extra log_metric truncated".split())
# Columns of these names would take the place of another argument.
RESERVED_COLUMNS = _PASSED | {"environments"}
# Columns that `remove_unused_columns` keeps.
_KEPT = frozenset("prompt image images privileged_context task".split())


def check_column_names(rows: str, columns: Iterable[str]) -> None:
    """Check that no column takes the place of another argument of reward functions, such as `completions`."""
    if reserved := sorted(RESERVED_COLUMNS.intersection(columns)):
        raise refusal("reserved_column", rows=rows, taken=reserved[0])


def check_image_options(trainer: Any) -> None:
    """Raise a `ValueError` where a run cannot train on prompts with images."""
    if not trainer._is_vlm:
        raise refusal("no_processor")
    if trainer.accelerator.distributed_type == "FSDP" or is_zero3(trainer.accelerator):
        raise refusal("sharded_images")


def check_prompts(trainer: Any, datasets: dict[str, Any], *, distills: bool) -> None:
    """Check the form of all prompts and static feedback, and more of each first prompt; of streams only the columns.

    Prompts that environments or a `rollout_func` change are not checked. Warns where one ends in an EOS id, and where
    an EOS id is ordinary text, so that completions end inside a sentence.

    Raises:
        ValueError: there is no EOS token, a prompt cannot be encoded, the chat template does not take its parts, or
            the teacher cannot read it: it has no user turn, or images that the configuration does not support.
    """
    if None in trainer.eos_token_ids:
        raise ValueError("The tokenizer has no EOS token, which ends a completion: set `tokenizer.eos_token`.")
    added = trainer._tokenizer.added_tokens_decoder
    for token_id in trainer.eos_token_ids:
        is_ordinary = bool(added) and token_id not in added
        trainer.alarms.raise_if(is_ordinary, "ordinary_end", text=trainer._tokenizer.decode([token_id]))
    is_changed = trainer.environment_factories is not None or trainer.rollout_func is not None
    for name, dataset in datasets.items():
        _check_feedback_column(name, dataset)
        streamed = first_streamed_row(dataset)
        if streamed is not None and not is_changed:
            check_stream_rows(f"`{name}`", dataset, [streamed], needs_user=distills)
        has_prompts = isinstance(dataset, Dataset) and len(dataset) > 0 and "prompt" in (_columns(dataset) or ())
        if has_prompts and not is_changed:
            check_rows(f"`{name}`", _all_prompts(dataset), needs_user=distills)
        row = dataset[0] if has_prompts else streamed or {"prompt": ""}
        prompt = row_prompt(row) if distills else row.get("prompt", "")
        has_images = bool(images_of(prompt) or row.get("image") or row.get("images"))
        if distills and has_images:
            check_image_options(trainer)
        if has_prompts:
            trainer.context_builder.read_images(prompt)
        if not is_changed and has_prompts and (distills or not has_images):
            if distills:
                user_text(prompt)
            _check_first_prompt(trainer, name, prompt)


def _is_made_by_function(dataset: Any) -> bool:
    """Whether a function forms the rows of a data set as they are read."""
    return isinstance(dataset, Dataset) and dataset.format["type"] == "custom"


def _check_feedback_column(name: str, dataset: Any) -> None:
    """Check by the features of a data set that its static feedback is text."""
    if _is_made_by_function(dataset):
        return
    features = getattr(dataset, "features", None) or {}
    feature = features.get("privileged_context")
    dtype = getattr(feature, "dtype", type(feature).__name__)  # a list or a struct has none
    if dtype not in ("string", "large_string", "null", "NoneType"):
        raise ValueError(f"`{name}` has the column `privileged_context` of {dtype}. Write it as text.")


def _all_prompts(dataset: Dataset) -> Iterator[Prompt]:
    """The prompts of a data set; the first alone where reading all would form rows or decode images."""
    if _is_made_by_function(dataset) or "Image(" in str(dataset.features["prompt"]):
        yield dataset[0]["prompt"]
        return
    for batch in dataset.select_columns("prompt").iter(1000):
        yield from batch["prompt"]


def _check_first_prompt(trainer: Any, name: str, prompt: Prompt) -> None:
    """Check that a prompt is encoded as the teacher reads it, within the vocabulary, and does not end in an EOS id."""
    builder = trainer.context_builder
    [ids] = trainer._tokenize_prompts([prompt])[0]
    if images_of(prompt):
        _check_prompt(f"The first prompt of `{name}`", prompt, ids, builder, trainer.tools or None, True)
    elif not trainer._is_vlm:
        _check_parts(f"The first prompt of `{name}`", prompt, builder.student_text(prompt))
    check_vocabulary(trainer, ids)
    last_id = ids[-1] if ids else None
    trainer.alarms.raise_if(last_id in trainer.eos_token_ids, "prompt_ends", name=name, last=last_id)


def _check_parts(name: str, prompt: Prompt, text: str) -> None:
    """Check that the rendered text of a prompt has its content parts as text."""
    for message in () if isinstance(prompt, str) else prompt:
        part = message.get("content")
        if isinstance(part, list) and (str(part) in text or user_text(prompt).strip() not in text):
            raise refusal("parts_as_text", name=name, part=part, text=text[-80:])


def check_rollout_images(
    trainer: Any, prompts: list[Prompt], prompt_ids: list[list[int]], tools: list[Any], tool_images: list[Any]
) -> None:
    """Check that only prompts have images, that the teacher reads the same ids, and at first that z has room."""
    if any(tool_images):
        raise refusal("image_of_tool")
    needs_room = trainer.state.global_step == 0  # later ones without room count in `credit/frac_without_teacher`
    checked = set()
    for ids, prompt, sample_tools in zip(prompt_ids, prompts, tools or [None] * len(prompts), strict=True):
        if images_of(prompt) and tuple(ids) not in checked:
            checked.add(tuple(ids))
            _check_prompt("A prompt", prompt, ids, trainer.context_builder, sample_tools, needs_room)


def _check_prompt(
    name: str, prompt: Prompt, ids: Sequence[int], builder: ContextBuilder, tools: list[Any] | None, needs_room: bool
) -> None:
    """Check that the student's ids of a prompt are the teacher's without z, and that they leave room for z."""
    encoded = builder.encode(prompt, PrivilegedContext(), tools)
    if encoded != list(ids):
        raise refusal("other_ids", name=name, student=len(ids), teacher=len(encoded))
    budget = builder.config.max_reprompt_len
    if needs_room and len(ids) >= budget:
        raise refusal("no_room", name=name, tokens=len(ids), budget=budget)
