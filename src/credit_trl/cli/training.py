"""Training module of `trl credit`, run in each process of `accelerate launch`."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from credit_trl.cli.data import (
    CreditScriptArguments,
    check_one_source,
    describe,
    drop_long_prompts,
    import_function,
    load_data,
    load_reward_funcs,
)
from credit_trl.cli.errors import USER_ERRORS, is_user_error, report_user_error, spell_unencodable
from credit_trl.cli.options_file import config_file
from credit_trl.tasks.registry import task_of_data

if TYPE_CHECKING:
    from credit_trl.config import CreditConfig
    from credit_trl.evaluation import EvaluationCallback
    from credit_trl.trainer import CreditTrainer


ENDED = "CREDIT_TRL_ENDED"


def make_parser(prog: str | None = None, processes: int | None = None) -> TrlParser:
    """Parser of `CreditScriptArguments`, `CreditConfig`, and TRL's model and dataset options.

    `processes` is the number of training processes, by default that of the current launch.
    """
    from credit_trl.config import CreditConfig

    config = CreditConfig
    if processes is not None:  # from which TRL computes the batch sizes
        config = type("ConfigOfProcesses", (CreditConfig,), {"world_size": property(lambda self: processes)})
    parser = TrlParser((CreditScriptArguments, config, ModelConfig, DatasetMixtureConfig), prog=prog)
    parser.error = refuse  # argparse's own prints all options first
    return parser


def refuse(message: str) -> NoReturn:
    """Raise a parser's error as `ValueError`, with where to look."""
    raise ValueError(f"{message.rstrip('.')}. All options: trl credit --help all.")


def run(argv: list[str] | None = None) -> int:
    """`run_training`, whose end the file of the variable `ENDED` marks for the launcher."""
    code = run_training(argv)
    open(os.environ.get(ENDED, os.devnull), "w").close()
    return code


def run_training(argv: list[str] | None = None) -> int:
    """Train in a process of `trl credit`; user errors are reported without a traceback.

    Every `USER_ERRORS` exception before training is a user error. During training, exceptions of other code keep their
    traceback; those of a verifier name its file and line.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from credit_trl.teacher.sharding import wrapping

    spell_unencodable()
    trainer = None
    try:
        config_file(sys.argv[1:] if argv is None else argv)  # within the limits of the reader; TRL's has none
        parsed = make_parser().parse_args_and_config(argv, fail_with_unknown_args=False)
        script_args = parsed[0]
        trainer = make_trainer(*parsed)
        machine = f"{trainer.accelerator.num_processes} x {trainer.accelerator.device.type}"
        data = trainer.run_log.facts["task"]
        wrapped = wrapping(trainer.accelerator.state)
        trainer.accelerator.print(f"trl credit: {data} on {machine} ({wrapped}), output in {trainer.args.output_dir}")
        if script_args.check:
            trainer.check()
        else:
            train(trainer, script_args)
    except Exception as error:
        is_bug = trainer is not None or not isinstance(error, USER_ERRORS) or isinstance(error, RuntimeError)
        if is_bug and not is_user_error(error):
            raise
        get_error_handler().record_exception(error)  # for a launcher of several processes
        return report_user_error("trl credit", error, code=2)
    except KeyboardInterrupt:  # which the launcher receives and reports, too
        return 128 + signal.SIGINT
    return 0


def make_trainer(
    script_args: CreditScriptArguments,
    training_args: CreditConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> CreditTrainer:
    """Build the trainer with its data, verifier, model and evaluation."""
    from transformers import AutoProcessor
    from trl import get_peft_config, get_quantization_config

    from credit_trl.cli.preemption import SaveOnSigterm
    from credit_trl.quickstart_model import model_path, naming_model
    from credit_trl.trainer import CreditTrainer

    # Names are checked before the model loads, so that a wrong one fails at once.
    if model_args.model_name_or_path is None:
        raise ValueError("No model: give `--model_name_or_path Qwen/Qwen3-0.6B`, a path, or `quickstart`.")
    model = model_path(model_args.model_name_or_path)
    teacher = training_args.teacher_model_name_or_path
    training_args.teacher_model_name_or_path = teacher and model_path(teacher)
    wants_eval = training_args.eval_strategy != "no"
    check_one_source(script_args, dataset_args)
    reward_funcs = load_reward_funcs(script_args)
    train_dataset, eval_dataset = load_data(script_args, dataset_args, wants_eval)
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args)
    weight = script_args.token_weight
    with naming_model(model):
        if script_args.max_prompt_tokens is not None:
            place = {"revision": model_args.model_revision, "trust_remote_code": training_args.trust_remote_code}
            processor = AutoProcessor.from_pretrained(model, **place)  # the tokenizer of a model without images
            drop = partial(
                drop_long_prompts,
                processor=processor,
                limit=script_args.max_prompt_tokens,
                options=training_args.chat_template_kwargs or {},
            )
            train_dataset = drop("training", train_dataset)
            eval_dataset = eval_dataset and drop("evaluation", eval_dataset)
        trainer = CreditTrainer(
            model=model,
            reward_funcs=reward_funcs,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
            token_weight=None if weight is None else import_function(weight, "--token_weight"),
        )
    data = describe(script_args, training_args.reward_weights)
    name = script_args.task or script_args.dataset_name or script_args.dataset_path or "a mixture of datasets"
    trainer.run_log.facts |= {"task": name, "data": data}
    trainer.add_callback(SaveOnSigterm())  # before evaluations, which it skips
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
    from credit_trl.lab.report.callback import defer_link, report_link

    training_args = trainer.args
    defer_link(trainer)
    trainer.train(training_args.resume_from_checkpoint, resume_changes=script_args.resume_changes)
    if training_args.eval_strategy != "no":
        metrics = trainer.evaluate()
        for name in [name for name in metrics if metrics[name] is None]:  # of no samples
            del metrics[name]
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics, combined=False)
    trainer.save_state()
    is_uploaded = training_args.push_to_hub
    training_args.push_to_hub = False  # with which it would upload here, too
    trainer.save_model()
    folder = training_args.output_dir
    trainer.accelerator.print(f"Model saved to {folder}. Report: {report_link(folder)}")
    try:
        if is_uploaded:
            trainer.push_to_hub(dataset_name=script_args.dataset_name)
    except Exception as error:  # of the hub, the network or git
        cause = str(error).partition("\n")[0]
        raise OSError(
            f"The model is saved in {folder}, and its upload failed ({type(error).__name__}: {cause}). Upload it "
            f"with `hf upload {training_args.hub_model_id or 'NAME'} {folder}`."
        ) from error
    trainer.accelerator.end_training()


def evaluate_during_training(trainer: CreditTrainer, script_args: CreditScriptArguments) -> EvaluationCallback:
    """Add avg@k on the held-out rows of the run's data to a trainer, and return the evaluation callback."""
    from credit_trl.evaluation import EvaluationCallback

    data = describe(script_args, trainer.args.reward_weights)
    trainer.run_log.facts["data"] = data
    evaluation = EvaluationCallback(
        trainer,
        task_of_data(data),
        k=script_args.avg_at_k,
        eval_steps=script_args.avg_at_k_steps,
        temperature=script_args.avg_at_k_temperature,
        top_p=script_args.avg_at_k_top_p,
        split=script_args.dataset_test_split,
        max_prompts=script_args.max_eval_rows,
    )
    trainer.add_callback(evaluation)
    return evaluation


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.exit(record(run)())  # also records bugs for the launcher
