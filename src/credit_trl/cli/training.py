"""The training module behind `trl credit`, one process of `accelerate launch`."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from trl import ScriptArguments

from credit_trl.cli.mistakes import MISTAKES, ignore_renamings, is_mistake, tell
from credit_trl.sandbox import choose_sandbox

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser

    from credit_trl.config import CreditConfig
    from credit_trl.trainer import CreditTrainer


@dataclass
class CreditScriptArguments(ScriptArguments):
    """
    What to train on: a task, or a dataset with reward functions.

    Args:
        task (`str`, *optional*):
            A task of the registry (`sciknoweval:physics`, `toolalpaca`, `livecodebench`, `math`, `quickstart`) or
            `package.module:attribute`. It brings its dataset and its verifier.
        dataset_path (`str`, *optional*):
            Local file or folder that the task reads instead of the hub.
        eval_dataset_path (`str`, *optional*):
            The same for evaluation; defaults to `dataset_path`.
        max_train_rows, max_eval_rows (`int`, *optional*):
            Use the first rows only.
        reward_funcs (`list[str]`, *optional*):
            Dotted import paths of reward functions (`my_module.my_reward`), which may return `Verdict`s. Beside a
            task they are added to its verifier.
        sandbox (`str`, *optional*):
            Where tasks that run model-written programs run them: `auto`, `bubblewrap`, `landlock`, or the address of
            a remote sandbox. Without it the first that holds on this machine; where none does, an error.
        avg_at_k (`int`, *optional*):
            The paper's evaluation: so many samples a prompt of the task's test split, before the first step, every
            `avg_at_k_steps` steps and after the last; the best model is kept, and a log of the run.
        avg_at_k_steps (`int`, *optional*, defaults to `5`):
            Optimizer steps between two evaluations.
        avg_at_k_temperature, avg_at_k_top_p (`float`, *optional*, default to `0.6` and `0.95`):
            How its answers are sampled.
        allow_unsandboxed (`bool`, *optional*, defaults to `False`):
            Run them with resource limits only, after a warning, where no sandbox holds.
    """

    task: str | None = field(
        default=None, metadata={"help": "Task of the registry, or package.module:attribute: dataset and verifier."}
    )
    dataset_path: str | None = field(
        default=None, metadata={"help": "Local file or folder that the task reads instead of the hub."}
    )
    eval_dataset_path: str | None = field(
        default=None, metadata={"help": "The same for evaluation; defaults to dataset_path."}
    )
    max_train_rows: int | None = field(
        default=None, metadata={"help": "Use the first rows of the training data only."}
    )
    max_eval_rows: int | None = field(
        default=None, metadata={"help": "Use the first rows of the evaluation data only."}
    )
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Dotted import paths of reward functions, which may return Verdicts."}
    )
    avg_at_k: int | None = field(
        default=None, metadata={"help": "k: evaluate avg@k on the task's test split during training."}
    )
    avg_at_k_steps: int = field(default=5, metadata={"help": "Optimizer steps between two evaluations."})
    avg_at_k_temperature: float = field(default=0.6, metadata={"help": "Sampling temperature of avg@k."})
    avg_at_k_top_p: float = field(default=0.95, metadata={"help": "Nucleus of avg@k's samples."})
    sandbox: str | None = field(
        default=None, metadata={"help": "auto, bubblewrap, landlock, or the address of a remote sandbox."}
    )
    allow_unsandboxed: bool = field(
        default=False, metadata={"help": "Run model-written programs unprotected where no sandbox holds."}
    )

    def __post_init__(self) -> None:
        choose_sandbox(self.sandbox, self.allow_unsandboxed)


def make_parser(prog: str | None = None, processes: int | None = None) -> TrlParser:
    """TRL's parser over our script arguments, `CreditConfig`, and TRL's model and dataset options.

    Args:
        prog: the command, for messages.
        processes: how many will train; None for those that this one is of.
    """
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser

    from credit_trl.config import CreditConfig

    config = CreditConfig if processes is None else _config_of(processes)
    parser = TrlParser((CreditScriptArguments, config, ModelConfig, DatasetMixtureConfig), prog=prog)
    parser.error = refuse  # its own prints four hundred options first
    return parser


def _config_of(processes: int) -> type[CreditConfig]:
    """`CreditConfig` as each of so many processes makes it: TRL computes the sizes of batches from their number."""
    from credit_trl.config import CreditConfig

    class ConfigOfProcesses(CreditConfig):
        world_size = property(lambda self: processes)

    return ConfigOfProcesses


def refuse(message: str) -> NoReturn:
    """What a parser does with a line that it cannot read: raise, so that its caller says so as it says the rest."""
    raise ValueError(message)


def main(
    script_args: CreditScriptArguments,
    training_args: CreditConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> None:
    """Build data, verifier and trainer, train, evaluate where asked for, save."""
    train(make_trainer(script_args, training_args, model_args, dataset_args), script_args)


def run(argv: list[str] | None = None) -> int:
    """What a process of `trl credit` runs: `main`, with mistakes told without a traceback.

    Until there is a trainer, whatever is raised is about what the user gave. Once it trains, what other code raises is
    a bug, of a verifier perhaps, and keeps its traceback.
    """
    ignore_renamings()
    try:
        script_args, *others = make_parser().parse_args_and_config(argv, fail_with_unknown_args=False)
        trainer = make_trainer(script_args, *others)
    except MISTAKES as error:
        return _tell(error)
    try:
        train(trainer, script_args)
    except MISTAKES as error:
        if not is_mistake(error):
            raise
        return _tell(error)
    return 0


def _tell(error: BaseException) -> int:
    """Tell a mistake here, and to the launcher of several processes in the file that it reads."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    return tell("trl credit", error, code=2)


def make_trainer(
    script_args: CreditScriptArguments,
    training_args: CreditConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> CreditTrainer:
    """Data, verifier, model and evaluation, checked against one another."""
    from trl import get_peft_config, get_quantization_config

    from credit_trl.trainer import CreditTrainer
    from credit_trl.training.checkpoints import checkpoint_to_resume

    # Before a model is loaded: a checkpoint that does not exist is told at once.
    asked, output_dir = training_args.resume_from_checkpoint, training_args.output_dir
    training_args.resume_from_checkpoint = checkpoint_to_resume(asked, output_dir)
    wants_eval = training_args.eval_strategy != "no"
    train_dataset, eval_dataset, reward_funcs = load_data(script_args, dataset_args, wants_eval)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = CreditTrainer(
        model=resolve_model(model_args.model_name_or_path),
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if script_args.avg_at_k is not None:
        evaluate_during_training(trainer, script_args)
    return trainer


def train(trainer: CreditTrainer, script_args: CreditScriptArguments) -> None:
    """Train, from a checkpoint where asked for, evaluate, save."""
    training_args = trainer.args
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.accelerator.print("Training completed.")
    if training_args.eval_strategy != "no":
        metrics = trainer.evaluate()
        # transformers cannot print None, which stands for a number that this evaluation did not have
        trainer.log_metrics("eval", {name: value for name, value in metrics.items() if value is not None})
        trainer.save_metrics("eval", metrics, combined=False)
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()


def evaluate_during_training(trainer: Any, script_args: CreditScriptArguments) -> None:
    """Attach avg@k on the task's test split, and the run's log, to a trainer.

    Raises:
        ValueError: there is no task to evaluate on.
    """
    from credit_trl.evaluation import EvaluationCallback
    from credit_trl.evaluation.callback import RunLog

    if script_args.task is None:
        raise ValueError("`--avg_at_k` evaluates on a task's test split: give `--task NAME`.")
    trainer.add_callback(RunLog(task=script_args.task))
    evaluation = EvaluationCallback(
        trainer,
        script_args.task,
        k=script_args.avg_at_k,
        eval_steps=script_args.avg_at_k_steps,
        temperature=script_args.avg_at_k_temperature,
        top_p=script_args.avg_at_k_top_p,
        split=script_args.dataset_test_split,
        path=script_args.eval_dataset_path or script_args.dataset_path,
        max_prompts=script_args.max_eval_rows,
    )
    trainer.add_callback(evaluation)


def load_data(
    script_args: CreditScriptArguments, dataset_args: DatasetMixtureConfig, wants_eval: bool
) -> tuple[Dataset, Dataset | None, list[Any]]:
    """(training rows, evaluation rows, reward functions) from a task, or from TRL's dataset options.

    Raises:
        ValueError: neither a task nor a dataset with reward functions.
    """
    reward_funcs = [import_function(name) for name in script_args.reward_funcs or []]
    train_split, test_split = script_args.dataset_train_split, script_args.dataset_test_split
    if script_args.task is not None:
        from credit_trl.tasks.registry import load_task

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
        _first(train_dataset, script_args.max_train_rows),
        _first(eval_dataset, script_args.max_eval_rows),
        reward_funcs,
    )


def import_function(name: str) -> Any:
    """`"package.module.function"` → the function; the working directory is searched too.

    Raises:
        ValueError: not a dotted path, or nothing there.
    """
    module, _, function = name.rpartition(".")
    if not module:
        raise ValueError(f"`--reward_funcs {name}`: expected a dotted import path such as my_module.{name}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it imports is missing
        raise ValueError(
            f"`--reward_funcs {name}`: no module `{module}` in {os.getcwd()} or installed. Run where it lies."
        ) from error
    if not hasattr(found, function):
        raise ValueError(f"`--reward_funcs {name}`: {module} has no `{function}`.")
    return getattr(found, function)


def resolve_model(name: str | None) -> str:
    """The model to load: a path or hub name as it is; `"quickstart"` is the model that the package brings.

    Raises:
        ValueError: no model was named.
    """
    if name is None:
        raise ValueError("Name a model: `--model_name_or_path Qwen/Qwen3-0.6B`, a path, or `quickstart`.")
    from credit_trl.tasks.quickstart_model import model_path

    return model_path(name)


def _dataset(script_args: CreditScriptArguments, dataset_args: DatasetMixtureConfig) -> Any:
    from datasets import load_dataset
    from trl import get_dataset

    if dataset_args.datasets:
        return get_dataset(dataset_args)
    if script_args.dataset_name is None:
        raise ValueError("Nothing to train on: give `--task NAME`, `--dataset_name NAME`, or `datasets:` in the YAML.")
    return load_dataset(
        script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
    )


def _split(data: Any, name: str, option: str) -> Any:
    if name not in data:
        raise ValueError(f"`--{option} {name}`: the data has {', '.join(data)}. Name one of these.")
    return data[name]


def _first(dataset: Any, rows: int | None) -> Any:
    return dataset if dataset is None or rows is None else dataset.take(rows)


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.exit(record(run)())  # a bug is left to the launcher too
