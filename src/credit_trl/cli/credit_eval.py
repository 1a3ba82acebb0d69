"""`trl credit-eval`: avg@k of a run or a model on a task, with bootstrap intervals. Resumable."""

import argparse
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from credit_trl.cli.run_folder import add_run_arguments, model_of_run, read_run, task_of_run
from credit_trl.run_directory import RUN_FILE
from credit_trl.sandbox import choose_sandbox
from credit_trl.tasks.registry import TRAINING_ROWS

EVALUATION_FOLDER = "credit_eval"  # of a run directory


def json_object(text: str) -> dict[str, object]:
    """Argument type of a JSON object."""
    with suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise argparse.ArgumentTypeError(f'expected a JSON object such as {{"key": "value"}}, got {text!r}')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample k responses to every prompt, verify them, and report avg@k with a 95% bootstrap interval over "
        "prompts, pass@k, lengths and truncation. The same command continues an interrupted evaluation."
    )
    add_run_arguments(parser)
    parser.add_argument("--k", metavar="K", type=int, default=16, help="samples per prompt (default 16)")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.6, help="default 0.6")
    parser.add_argument("--top_p", metavar="P", type=float, default=0.95, help="default 0.95")
    parser.add_argument("--top_k", metavar="K", type=int, default=0, help="0 for no limit (default)")
    parser.add_argument("--max_completion_length", metavar="N", type=int, help="tokens (default: the run's, or 4096)")
    parser.add_argument("--max_prompts", metavar="N", type=int, help="use the first prompts only")
    parser.add_argument("--group_by", metavar="COLUMN", help="column whose values are reported separately")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="sampling seed (default 0)")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--engine_options", type=json_object, default="{}", metavar="JSON", help="of the engine")
    parser.add_argument("--batch_size", metavar="N", type=int, help="responses generated at a time")
    parser.add_argument("--output_dir", metavar="PATH", help=f"of samples (default: RUN/{EVALUATION_FOLDER}, or none)")


def continues(args: argparse.Namespace) -> bool:
    """Whether samples are stored, so that the same command line continues an interrupted evaluation."""
    return bool(args.output_dir or args.run)


def run(args: argparse.Namespace) -> int:
    from credit_trl.evaluation import evaluate

    choose_sandbox(args.sandbox, args.allow_unsandboxed)
    options = dict(vars(args))
    for name in ("run", "model", "task", "reward_funcs", "sandbox", "allow_unsandboxed"):
        del options[name]
    if args.run is not None:
        config = read_run(args.run)["config"]
        args.model = args.model or str(model_of_run(args.run))
        options["output_dir"] = args.output_dir or str(Path(args.run) / EVALUATION_FOLDER)
        options["max_completion_length"] = args.max_completion_length or config["max_completion_length"]
        options["engine_options"].setdefault("chat_template_kwargs", config.get("chat_template_kwargs"))
    elif args.model is None or args.task is None:
        raise ValueError("give a run directory, or --model and --task.")
    options["max_completion_length"] = options["max_completion_length"] or 4096
    folder = options["output_dir"]
    if folder and (Path(folder) / RUN_FILE).is_file():
        raise ValueError(f"`--output_dir {folder}` is the folder of a training run; give another one.")
    task = task_of_run(args.run, args.task, args.reward_funcs)
    if args.path and args.task is None:
        task = replace(task, name=f"{task.name.removesuffix(TRAINING_ROWS)}, {Path(args.path).name}")
    print(evaluate(args.model, task, **options))
    if folder:
        print(f"  written to {folder}")
    return 0
