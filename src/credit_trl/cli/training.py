"""Training module of `trl credit`, run in each process of `accelerate launch`."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trl import ScriptArguments

from credit_trl.cli.errors import USER_ERRORS, is_user_error, report_user_error, suggest
from credit_trl.cli.output import output_is_closed, spell_unencodable
from credit_trl.sandbox import choose_sandbox
from credit_trl.training.future_warnings import ignore_future_warnings

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser

    from credit_trl.config import CreditConfig
    from credit_trl.evaluation import EvaluationCallback
    from credit_trl.trainer import CreditTrainer


logger = logging.getLogger(__name__)


@dataclass
class CreditScriptArguments(ScriptArguments):
    """Arguments of `trl credit` for data, verifier and evaluation, in addition to TRL's `ScriptArguments`."""

    task: str | None = field(
        default=None, metadata={"help": "Task of the registry, or package.module:attribute: dataset and verifier."}
    )
    dataset_path: str | None = field(
        default=None, metadata={"help": "Local data: of the task, or JSONL, JSON, CSV or Parquet without a task."}
    )
    eval_dataset_path: str | None = field(
        default=None, metadata={"help": "The same for the evaluation data; defaults to dataset_path."}
    )
    max_train_rows: int | None = field(
        default=None, metadata={"help": "Use the first rows of the training data only."}
    )
    max_eval_rows: int | None = field(
        default=None, metadata={"help": "Use the first rows of the evaluation data only."}
    )
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Drop rows whose prompt has more tokens, as SDPO's pipeline does (2048)."}
    )
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "my_module.my_reward: reward functions, in addition to a task's verifier."}
    )
    avg_at_k: int | None = field(
        default=None, metadata={"help": "k: evaluate avg@k on the task's test split, save the best model and a log."}
    )
    avg_at_k_steps: int = field(default=5, metadata={"help": "Generation batches between two evaluations."})
    avg_at_k_temperature: float = field(default=0.6, metadata={"help": "Sampling temperature of avg@k."})
    avg_at_k_top_p: float = field(default=0.95, metadata={"help": "Nucleus mass of avg@k."})
    sandbox: str | None = field(
        default=None, metadata={"help": "auto (default), bubblewrap, landlock, or the address of a remote sandbox."}
    )
    allow_unsandboxed: bool = field(
        default=False, metadata={"help": "Without a sandbox, run model-written programs with resource limits only."}
    )
    sandbox_packages: list[str] | None = field(
        default=None, metadata={"help": "Installed packages that model-written programs may import, such as numpy."}
    )

    def __post_init__(self) -> None:
        for name in ("avg_at_k", "avg_at_k_steps", "max_train_rows", "max_eval_rows", "max_prompt_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                unset = "avg_at_k` out to evaluate nothing" if name.startswith("avg") else f"{name}` out for no limit"
                raise ValueError(f"`--{name}` must be at least 1, got {value}; leave `--{unset}.")
        if isinstance(self.reward_funcs, str):  # `reward_funcs: my_module.my_reward` in a YAML file
            self.reward_funcs = [name.strip() for name in self.reward_funcs.split(",")]
        choose_sandbox(self.sandbox, self.allow_unsandboxed, self.sandbox_packages)


def make_parser(prog: str | None = None, processes: int | None = None) -> TrlParser:
    """Parser of `CreditScriptArguments`, `CreditConfig`, and TRL's model and dataset options.

    `processes` is the number of training processes, by default that of the current launch.
    """
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser

    from credit_trl.config import CreditConfig

    config = CreditConfig
    if processes is not None:  # from which TRL computes the batch sizes
        config = type("ConfigOfProcesses", (CreditConfig,), {"world_size": property(lambda self: processes)})
    parser = TrlParser((CreditScriptArguments, config, ModelConfig, DatasetMixtureConfig), prog=prog)
    parser.error = refuse  # argparse's own prints all options first
    return parser


def refuse(message: str) -> NoReturn:
    """Raise a parser's error as `ValueError`."""
    raise ValueError(message)


def run(argv: list[str] | None = None) -> int:
    """Train in a process of `trl credit`; user errors are reported without a traceback.

    Every `USER_ERRORS` exception before training is a user error. During training, exceptions of other code, such as a
    verifier, keep their traceback.
    """
    from credit_trl.training.preemption import requeue_on_sigterm

    ignore_future_warnings()
    spell_unencodable()
    trainer = None
    try:
        script_args, *others = make_parser().parse_args_and_config(argv, fail_with_unknown_args=False)
        with requeue_on_sigterm():
            trainer = make_trainer(script_args, *others)
            train(trainer, script_args)
    except USER_ERRORS as error:
        if isinstance(error, BrokenPipeError) and output_is_closed():
            message = "the reader of the output has ended, and the run with it"
            print(f"trl credit: {message}; `--resume_from_checkpoint latest` continues it", file=sys.stderr)
            return 128 + signal.SIGPIPE
        if trainer is not None and not is_user_error(error):
            raise
        return _report(error)
    except RuntimeError as error:  # of transformers, for an integration that is not installed
        if trainer is not None or not is_user_error(error):
            raise
        return _report(error)
    except KeyboardInterrupt:  # which the launcher receives and reports, too
        return 128 + signal.SIGINT
    return 0


def _report(error: BaseException) -> int:
    """Report a user error, and record it for a launcher of several processes."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    return report_user_error("trl credit", error, code=2)


def make_trainer(
    script_args: CreditScriptArguments,
    training_args: CreditConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> CreditTrainer:
    """Build the trainer with its data, verifier, model and evaluation."""
    from trl import get_peft_config, get_quantization_config

    from credit_trl.tasks.model_names import naming_model
    from credit_trl.trainer import CreditTrainer
    from credit_trl.training.checkpoints import checkpoint_to_resume
    from credit_trl.training.preemption import SaveOnSigterm

    # Before the model loads, so that a missing checkpoint fails at once.
    asked, output_dir = training_args.resume_from_checkpoint, training_args.output_dir
    training_args.resume_from_checkpoint = checkpoint_to_resume(asked, output_dir)
    wants_eval = training_args.eval_strategy != "no"
    train_dataset, eval_dataset, reward_funcs = load_data(script_args, dataset_args, wants_eval)
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args)
    model = resolve_model(model_args.model_name_or_path)
    if script_args.max_prompt_tokens is not None:
        limits = (model, script_args.max_prompt_tokens, training_args.chat_template_kwargs or {})
        train_dataset = drop_long_prompts("training", train_dataset, *limits)
        eval_dataset = eval_dataset and drop_long_prompts("evaluation", eval_dataset, *limits)
    if training_args.teacher_model_name_or_path is not None:
        training_args.teacher_model_name_or_path = resolve_model(training_args.teacher_model_name_or_path)
    with naming_model(model):
        trainer = CreditTrainer(
            model=model,
            reward_funcs=reward_funcs,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    if (data := script_args.task or script_args.dataset_name or script_args.dataset_path) is not None:
        trainer.run_log.facts["task"] = data
    trainer.add_callback(SaveOnSigterm(trainer.accelerator))  # before evaluations, which it skips
    if script_args.avg_at_k is not None:
        evaluate_during_training(trainer, script_args)
    return trainer


def model_init_kwargs(model_args: ModelConfig, training_args: CreditConfig) -> dict[str, Any]:
    """Loading options of the model: those of TRL's `ModelConfig`, overridden by `training_args.model_init_kwargs`."""
    return {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }


def train(trainer: CreditTrainer, script_args: CreditScriptArguments) -> None:
    """Train, optionally from a checkpoint, evaluate and save."""
    training_args = trainer.args
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.accelerator.print("Training completed.")
    if training_args.eval_strategy != "no":
        metrics = trainer.evaluate()
        # transformers cannot print None, the value of a metric without samples
        trainer.log_metrics("eval", {name: value for name, value in metrics.items() if value is not None})
        trainer.save_metrics("eval", metrics, combined=False)
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.accelerator.end_training()


def evaluate_during_training(trainer: CreditTrainer, script_args: CreditScriptArguments) -> EvaluationCallback:
    """Add avg@k on the task's test split to a trainer, and return the evaluation callback."""
    from credit_trl.evaluation import EvaluationCallback

    if script_args.task is None:
        raise ValueError("`--avg_at_k` evaluates on a task's test split: give `--task NAME`.")
    trainer.run_log.facts["task"] = script_args.task
    passes = trainer.args.steps_per_generation * trainer.num_iterations * script_args.avg_at_k_steps
    evaluation = EvaluationCallback(
        trainer,
        script_args.task,
        k=script_args.avg_at_k,
        eval_steps=max(1, passes // trainer.args.gradient_accumulation_steps),
        temperature=script_args.avg_at_k_temperature,
        top_p=script_args.avg_at_k_top_p,
        split=script_args.dataset_test_split,
        path=script_args.eval_dataset_path or script_args.dataset_path,
        max_prompts=script_args.max_eval_rows,
    )
    trainer.add_callback(evaluation)
    return evaluation


def load_data(
    script_args: CreditScriptArguments, dataset_args: DatasetMixtureConfig, wants_eval: bool
) -> tuple[Dataset, Dataset | None, list[Any]]:
    """(training rows, evaluation rows, reward functions) of a task, or of TRL's dataset options."""
    reward_funcs = [import_function(name) for name in script_args.reward_funcs or []]
    train_split, test_split = script_args.dataset_train_split, script_args.dataset_test_split
    if script_args.task is not None:
        from credit_trl.tasks.registry import load_task

        if other := script_args.dataset_name or dataset_args.datasets:
            raise ValueError(
                f"`--task {script_args.task}` builds its own data, which excludes {other!r} of `--dataset_name` or "
                "`datasets:`. Remove one; a local copy of the task's data is `--dataset_path`."
            )

        sys.path.insert(0, os.getcwd())
        task = load_task(script_args.task)
        reward_funcs.insert(0, task.reward)
        train_dataset = task.build(train_split, script_args.dataset_path)
        path = script_args.eval_dataset_path or script_args.dataset_path
        eval_dataset = task.build(test_split, path) if wants_eval else None
    else:
        if not reward_funcs:
            raise ValueError(
                "Nothing grades the answers: give `--task NAME`, or `--reward_funcs my_module.my_reward`."
            )
        data = _dataset(script_args, dataset_args)
        train_dataset = _split(data, train_split, "dataset_train_split")
        eval_dataset = _split(data, test_split, "dataset_test_split") if wants_eval else None
    return (
        first_rows(train_dataset, script_args.max_train_rows),
        first_rows(eval_dataset, script_args.max_eval_rows),
        reward_funcs,
    )


def import_function(name: str) -> Any:
    """Import the function of `module.name` or `module:name`, also from the working directory."""
    from credit_trl.tasks.registry import import_named

    module, _, function = name.replace(":", ".").rpartition(".")
    if not all(part.isidentifier() and part != "py" for part in (*module.split("."), function)):
        raise ValueError(f"`--reward_funcs {name}`: expected a dotted import path such as {_dotted_path(name)}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    missing = f"`--reward_funcs {name}`: no module `{module}` in {os.getcwd()} or installed. Run from its folder."
    found = import_named(module, ValueError(missing))
    if not hasattr(found, function):
        raise ValueError(f"`--reward_funcs {name}`: {module} has no `{function}`.{suggest(function, vars(found))}")
    return getattr(found, function)


def _dotted_path(name: str) -> str:
    """The dotted import path that was meant by a name without a module, or by a file with or without a function."""
    from trl import rewards

    file = re.fullmatch(r"(?:.*[/\\])?(\w+)(?:\.py|[.:])+(\w*)", name)
    if file is not None:
        return f"{file[1]}.{file[2] or 'my_reward'}"
    return f"{'trl.rewards' if hasattr(rewards, name) else 'my_module'}.{name if name.isidentifier() else 'my_reward'}"


def resolve_model(name: str | None) -> str:
    """Path of the model for `"quickstart"` and `"smollm2"`; any other path or hub name unchanged."""
    if name is None:
        raise ValueError("No model: give `--model_name_or_path Qwen/Qwen3-0.6B`, a path, `smollm2` or `quickstart`.")
    from credit_trl.tasks.model_names import model_path

    return model_path(name)


def _dataset(script_args: CreditScriptArguments, dataset_args: DatasetMixtureConfig) -> Any:
    from datasets import load_dataset
    from trl import get_dataset

    if dataset_args.datasets:
        return get_dataset(dataset_args)
    if script_args.dataset_path is not None:
        return _local_files(script_args)
    if script_args.dataset_name is None:
        raise ValueError(
            "No training data: give `--task NAME`, `--dataset_path questions.jsonl`, `--dataset_name NAME`, or "
            "`datasets:` in the YAML."
        )
    name, config = script_args.dataset_name, script_args.dataset_config
    return load_dataset(name, name=config, streaming=script_args.dataset_streaming)


# Loader of `datasets` by the suffix of a file.
_LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def _local_files(script_args: CreditScriptArguments) -> Any:
    """Rows of `--dataset_path` and `--eval_dataset_path` as splits, read by `datasets`."""
    from datasets import DatasetDict, IterableDatasetDict, load_dataset
    from datasets.exceptions import DatasetGenerationError

    paths = {script_args.dataset_train_split: ("dataset_path", script_args.dataset_path)}
    if script_args.eval_dataset_path is not None:
        paths[script_args.dataset_test_split] = ("eval_dataset_path", script_args.eval_dataset_path)
    splits, streams = {}, script_args.dataset_streaming
    for split, (option, path) in paths.items():
        loader = _LOADERS.get(Path(path).suffix)
        if loader is None or not Path(path).is_file():
            problem = "no such file" if loader else f"expected one of {', '.join(_LOADERS)}"
            raise ValueError(f"`--{option} {path}`: {problem}.")
        if loader != "parquet" and not streams:
            _check_encoding(option, path)
        try:
            splits[split] = load_dataset(loader, data_files=path, split="train", streaming=streams)
        except (DatasetGenerationError, StopIteration, ValueError) as error:  # StopIteration: an empty file
            problem = _unreadable_line(path) or error.__cause__ or str(error) or "it is empty"
            raise ValueError(f"`--{option} {path}` cannot be read: {problem}") from error
    return (IterableDatasetDict if streams else DatasetDict)(splits)


def _check_encoding(option: str, path: str) -> None:
    """Raise for a file that is not UTF-8, which `datasets` would notice when a row is read."""
    try:
        with open(path, encoding="utf-8") as file:
            for _ in file:
                pass
    except UnicodeDecodeError as error:
        raise ValueError(f"`--{option} {path}` is not text in UTF-8 ({error}). Save it as UTF-8.") from error


def _unreadable_line(path: str) -> str:
    """`line 3 is no JSON object (…): '…'` for the first such line of a file of JSON lines, or an empty string."""
    if Path(path).suffix != ".jsonl":
        return ""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                read = json.loads(line) if line.strip() else {}
            except ValueError as error:
                read = error
            if not isinstance(read, dict):
                why = f" ({read})" if isinstance(read, ValueError) else ""
                return f"line {number} is no JSON object{why}: {line.strip()[:80]!r}"
    return ""


def _split(data: Any, name: str, option: str) -> Any:
    if name not in data:
        files = " Name a file with `--eval_dataset_path`." if option == "dataset_test_split" else ""
        raise ValueError(f"`--{option} {name}`: no such split; the data has {', '.join(data)}.{files}")
    return data[name]


def first_rows(dataset: Any, rows: int | None) -> Any:
    """The first rows of a dataset, or all of them for `rows=None`."""
    return dataset if dataset is None or rows is None else dataset.take(rows)


def drop_long_prompts(name: str, dataset: Any, model: str, limit: int, options: dict[str, Any]) -> Any:
    """The rows whose prompt has at most `limit` tokens, with the chat template's generation prompt.

    `name` is that of the rows in messages, `options` are `chat_template_kwargs`.
    """
    from transformers import AutoTokenizer

    from credit_trl.evaluation.generation import encode_prompt
    from credit_trl.tasks.model_names import naming_model

    with naming_model(model):
        tokenizer = AutoTokenizer.from_pretrained(model)
    kept = dataset.filter(lambda row: len(encode_prompt(tokenizer, row["prompt"], **options)) <= limit)
    if hasattr(kept, "__len__"):
        if len(kept) == 0:
            raise ValueError(f"`--max_prompt_tokens {limit}` drops all {len(dataset)} {name} rows. Raise it.")
        logger.info(f"{len(dataset) - len(kept)} of {len(dataset)} {name} rows have more than {limit} prompt tokens.")
    return kept


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.exit(record(run)())  # also records bugs for the launcher
