"""`trl credit-eval`: avg@k of a model on a task, with bootstrap intervals. Resumable."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from credit_trl.cli.arguments import add_sandbox_arguments, json_object
from credit_trl.sandbox import choose_sandbox
from credit_trl.training.run_directory import RUN_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample k responses to every prompt of a task, verify them, and report avg@k with a 95% bootstrap interval "
        "over prompts, pass@k, maj@k for tasks whose answers are letters, lengths and truncation. An interrupted "
        "evaluation continues when started again with the same --output_dir."
    )
    parser.add_argument("--model", required=True, help="hub name or directory of the model, smollm2 or quickstart")
    parser.add_argument(
        "--task", required=True, help="such as sciknoweval:chemistry, toolalpaca, my_package.task:Task"
    )
    parser.add_argument("--k", type=int, default=16, help="samples per prompt (default 16)")
    parser.add_argument("--temperature", type=float, default=0.6, help="default 0.6")
    parser.add_argument("--top_p", type=float, default=0.95, help="default 0.95")
    parser.add_argument("--top_k", type=int, default=0, help="0 for no limit (default)")
    parser.add_argument("--max_completion_length", type=int, default=4096, help="tokens per response (default 4096)")
    parser.add_argument("--split", default="test", help="split of the task's data (default test)")
    parser.add_argument("--path", help="local data file or folder, instead of the hub")
    parser.add_argument("--max_prompts", type=int, help="use the first prompts only")
    parser.add_argument("--group_by", help="column whose values are reported separately")
    parser.add_argument("--seed", type=int, default=0, help="sampling seed (default 0)")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument(
        "--engine_options", type=json_object, default={}, help="JSON, such as '{\"chat_template_kwargs\": {...}}'"
    )
    parser.add_argument("--batch_size", type=int, help="responses generated at a time")
    parser.add_argument("--output_dir", help="folder of samples and result (default: not saved)")
    add_sandbox_arguments(parser)


def continues(args: argparse.Namespace) -> bool:
    """Whether samples are stored, so that the same command line continues an interrupted evaluation."""
    return bool(args.output_dir)


def run(args: argparse.Namespace) -> int:
    from credit_trl.evaluation import EvaluationConfig, evaluate

    if args.output_dir and (Path(args.output_dir) / RUN_FILE).is_file():
        raise ValueError(f"`--output_dir {args.output_dir}` is the folder of a training run; give another one.")
    accepted = {field.name for field in fields(EvaluationConfig)}
    choose_sandbox(args.sandbox, args.allow_unsandboxed, args.sandbox_packages)
    print(evaluate(args.model, args.task, **{name: value for name, value in vars(args).items() if name in accepted}))
    if args.output_dir:
        print(f"  written to {args.output_dir}")
    return 0
