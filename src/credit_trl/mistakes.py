"""Mistakes that a user may make in options and arguments, and the errors that say what to do about them."""

import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK
from trl import GRPOConfig

_HERE = Path(__file__).parent
# Options of other trainers, and other names of ours -> what to set here.
OTHER_NAMES: dict[str, str] = yaml.safe_load((_HERE / "other_names.yaml").read_text("utf-8"))
_REFUSALS: dict[str, str] = yaml.safe_load((_HERE / "refused.yaml").read_text("utf-8"))


def refusal(cause: str, error: type[Exception] = ValueError, /, **values: Any) -> Exception:
    """The error of a cause in `refused.yaml`, with the values that its message names."""
    return error(_REFUSALS[cause].format(**values))


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """``Did you mean `steps`?`` for the candidate whose spelling is nearest, or an empty string."""
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    return f"Did you mean `{close[0]}`?" if close else ""


def refuse_unknown(owner: str, kind: str, names: Iterable[str], valid_names: Collection[str]) -> None:
    """Refuse all unknown names at once, with their counterpart in `OTHER_NAMES` or the most similar known name.

    Raises:
        TypeError: a name is not known; the message begins with the owner and what the names are.
    """
    advice = []
    for name in [name for name in names if name not in valid_names]:
        remedy = OTHER_NAMES.get(name) or did_you_mean(name, valid_names)
        advice.append(f"`{name}`. {remedy or f'Remove it; `help({owner})` lists what there is.'}")
    if advice:
        raise TypeError(f"`{owner}` has no {kind} {' '.join(advice)}")


def check_option_type(name: str, value: Any, kinds: Collection[Any]) -> None:
    """Check that a number, a flag and loading options are no text, which later code would read otherwise."""
    numbers = kinds & {int, float}
    if isinstance(value, str) and str not in kinds and (numbers or bool in kinds):
        expected = "a number" if numbers else "True or False"
        raise ValueError(f"`{name}` must be {expected}, got {value!r}. Write it without quotes.")
    is_whole = not isinstance(value, float) or value.is_integer()
    if numbers == {int} and not is_whole:
        raise ValueError(f"`{name}` must be an integer, got {value!r}.")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and str in kinds and not numbers:
        raise ValueError(f"`{name}` must be text, got {value!r}. Write it in quotes.")
    if name.endswith("_kwargs") and value is not None:
        options = value
        with suppress(ValueError, TypeError):
            options = json.loads(value)
        if not isinstance(options, dict):
            raise ValueError(f"`{name}` must be a dictionary, such as {{'key': value}}, got {value!r}.")
        for key, value in options.items():
            if value in ("True", "False"):  # which Jinja takes for true
                raise refusal("text_flag", name=name, key=key, value=value)


def check_rewards_and_loggers(config: GRPOConfig) -> None:
    weights = config.reward_weights
    is_list = isinstance(weights, list | tuple) and all(isinstance(weight, int | float) for weight in weights)
    if weights is not None and not (is_list and any(weights) and all(map(math.isfinite, weights))):
        raise refusal("reward_weights", c=config)
    loggers = [config.report_to] if isinstance(config.report_to, str) else config.report_to or []
    supported = {*INTEGRATION_TO_CALLBACK, "all", "none"}
    for name in loggers:
        if name not in supported:
            close = did_you_mean(name, supported)
            raise ValueError(f"`report_to` has no logger {name!r}. {close} Loggers: {', '.join(sorted(supported))}.")


# Argument of the trainer -> types that it may have, in words, and what to do about another.
_ROWS = "Make one with `Dataset.from_list(rows)` or `load_dataset('json', data_files='rows.jsonl')`."
_KINDS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "model": (
        (str, nn.Module),
        "a model, or the name or folder of one",
        "The order of the arguments is model, reward_funcs, args, train_dataset.",
    ),
    "reward_funcs": (
        (Callable, str),
        "a function, a list of functions, or the name of a reward model",
        "Define `def verifier(completions, **columns)`, which returns a list.",
    ),
    "args": ((GRPOConfig,), "a `CreditConfig` (it extends `GRPOConfig`)", "Write `CreditConfig(option=value)`."),
    "token_weight": ((Callable,), "a function", "Import it; `trl credit --token_weight` takes its name."),
    "train_dataset": ((Dataset, IterableDataset, dict), "a `Dataset` or `IterableDataset`", _ROWS),
    "eval_dataset": (
        (Dataset, IterableDataset, dict),
        "a `Dataset`, `IterableDataset` or a dictionary of them",
        _ROWS,
    ),
    "processing_class": (
        (PreTrainedTokenizerBase, ProcessorMixin),
        "a tokenizer or a processor",
        "Load it with `AutoTokenizer.from_pretrained(name)`, or remove it.",
    ),
    "rollout_func": ((Callable,), "a function", "See TRL's documentation of `rollout_func`."),
    "callbacks": ((list, tuple), "a list of callbacks", "Write [callback]."),
    "callback": ((TrainerCallback,), "a `TrainerCallback`", "Derive it from that class."),
    "tools": ((list, tuple), "a list of functions", "Write [function]."),
}

# Names that `apply_chat_template` takes itself.
_TEMPLATE_OPTIONS = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def check_arguments(model: Any, reward_funcs: Any, args: Any, token_weight: Any, options: dict[str, Any]) -> None:
    """Check what kind of objects the arguments of a trainer are, before a model loads. `options` are the others.

    Raises:
        TypeError: an argument is another object, or a class instead of an instance.
        ValueError: a reward function is a name that is none of a reward model, or `model` is compiled.
    """
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    objects = [("model", model)]
    optional = {"args": args, "token_weight": token_weight, **options}
    objects += [(name, value) for name, value in optional.items() if name in _KINDS and value is not None]
    objects += [("reward_funcs", function) for function in functions if reward_funcs is not None]
    callbacks = options.get("callbacks")
    objects += (
        [("callback", value) for value in callbacks if not inspect.isclass(value)]
        if isinstance(callbacks, list)
        else []
    )
    for name, value in objects:
        kinds, expected, advice = _KINDS[name]
        if inspect.isclass(value):
            raise refusal("class_argument", TypeError, name=name, kind=value.__name__)
        is_of_trl = name == "args" and not hasattr(value, "contrastive_coef")
        if is_of_trl or not isinstance(value, kinds):
            text = f" {value!r:.60}" if isinstance(value, str | int | float | dict | list) else ""
            told = {"expected": expected, "kind": type(value).__name__, "value": text, "advice": advice}
            raise refusal("wrong_argument", TypeError, name=name, **told)
    if isinstance(model, nn.Module) and any(map(_is_compiled, model.modules())):
        raise refusal("compiled")
    for function in functions:
        is_unnamed = isinstance(function, nn.Module) and not getattr(function, "name_or_path", "")
        if is_unnamed and options.get("reward_processing_classes") is None:
            raise refusal("model_as_reward", kind=type(function).__name__)
        if isinstance(function, str) and "/" not in function and not (function and Path(function).exists()):
            module, _, called = function.replace(":", ".").rpartition(".")
            parts = {"module": module or "my_module", "function": called}
            raise refusal("no_function", name="reward_funcs", value=function, **parts)
    if token_weight is not None:
        try:
            inspect.signature(token_weight).bind("credit")
        except TypeError as error:
            called = getattr(token_weight, "__name__", type(token_weight).__name__)
            raise refusal("weight_signature", TypeError, name=called, error=error) from error
        except ValueError:  # a callable without a signature
            pass


def _is_compiled(module: nn.Module) -> bool:
    has_compiled_forward = hasattr(module.forward, "_torchdynamo_orig_callable")
    return has_compiled_forward or hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def check_model_of(trainer: Any) -> None:
    """Check that weights train, that the tokenizer is the model's, and that the chat template reads its options.

    Raises:
        ValueError: one of them is not so.
    """
    model = trainer.model
    name = getattr(model, "name_or_path", "") or type(model).__name__
    if not any(weight.requires_grad for weight in model.parameters()):
        raise refusal("frozen", name=name)
    check_vocabulary(trainer, [trainer._tokenizer.vocab_size - 1, *trainer.eos_token_ids])
    template = str(trainer.chat_template or trainer.processing_class.chat_template or "")
    words = set(re.findall(r"\w+", template))
    for key in trainer.chat_template_kwargs if template else ():
        if key not in words | _TEMPLATE_OPTIONS:
            advice = did_you_mean(key, words)
            if advice:
                raise refusal("template_option", key=key, advice=advice)
            trainer.alarms.raise_if(True, "template_option", key=key)


def check_vocabulary(trainer: Any, ids: Iterable[int | None]) -> None:
    """Raise a `ValueError` where the model has no embedding of an id."""
    size = trainer.model.config.get_text_config().vocab_size
    highest = max((token for token in ids if token is not None), default=0)
    if highest >= size:
        name = getattr(trainer.model, "name_or_path", "") or type(trainer.model).__name__
        raise refusal("other_tokenizer", token=highest, name=name, size=size)
