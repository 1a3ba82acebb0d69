"""`trl credit-plan`: memory, tokens and time of a configuration on a GPU, without loading weights."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from credit_trl.cli.arguments import at_least

if TYPE_CHECKING:
    from trl import ModelConfig

    from credit_trl.cli.training import CreditScriptArguments
    from credit_trl.config import CreditConfig
    from credit_trl.lab.planning.duration import Schedule
    from credit_trl.lab.planning.report import Plan

PASSES_UNKNOWN_ARGUMENTS = True  # the arguments of `trl credit`
ERROR_CODE = 2  # 1: the run does not fit
DEFAULT_GPU = "h100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the GPU memory of each phase of a step, the tokens of a generation batch and the expected time, from "
        "the arguments of `trl credit` (--config FILE.yaml and overrides), without loading weights. If the run does "
        "not fit, exit with code 1 and print the changes that would make it fit."
    )
    count = at_least(1)
    parser.add_argument("--gpu", default=DEFAULT_GPU, help=f"kind of GPU (default {DEFAULT_GPU})")
    parser.add_argument("--gpu_memory", type=float, help="memory in GiB (default: that of the GPU's data sheet)")
    parser.add_argument("--model_config", help="config.json of the model, if its sizes are unknown")
    parser.add_argument("--teacher_config", help="the same of `teacher_model_name_or_path`")
    parser.add_argument("--max_prompt", type=count, default=2048, help="tokens of the longest prompt (default 2048)")
    parser.add_argument("--mean_prompt", type=count, help="mean tokens per prompt (default: a quarter of the longest)")
    parser.add_argument("--mean_completion", type=count, help="mean tokens per completion (default: a quarter)")
    parser.add_argument("--mean_context", type=count, help="mean tokens per teacher prompt (default: both and 256)")
    parser.add_argument(
        "--rows", type=count, help="training rows (default: --max_train_rows), for the hours of the run"
    )
    parser.add_argument("--eval_rows", type=count, help="rows of an evaluation (default: --max_eval_rows)")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")


def run(args: argparse.Namespace, training_arguments: list[str]) -> int:
    from credit_trl.lab.planning.report import format_plan, plan_dict

    plan = plan_of(args, training_arguments)
    print(json.dumps(plan_dict(plan), indent=2) if args.json else format_plan(plan))
    return 0 if plan.fits else 1


def plan_of(args: argparse.Namespace, training_arguments: list[str]) -> Plan:
    """Plan of a command line."""
    from credit_trl.lab.planning.report import make_plan
    from credit_trl.lab.planning.setup import GIB, GPUS, make_setup
    from credit_trl.lab.planning.shape import load_shape
    from credit_trl.lab.planning.work import default_lengths, mean_context

    if args.gpu not in GPUS:
        raise ValueError(
            f"unknown GPU {args.gpu!r}; known: {', '.join(GPUS)}. Choose the most similar one and give --gpu_memory."
        )
    gpu = GPUS[args.gpu]
    if args.gpu_memory is not None:
        if not 0.0 < args.gpu_memory < math.inf:
            raise ValueError(f"--gpu_memory {args.gpu_memory:g}: give the memory of one GPU in GiB.")
        gpu = replace(gpu, memory=int(args.gpu_memory * GIB))
    run = parse_run(training_arguments)
    model = run.model
    if model.model_name_or_path is None:
        raise ValueError("give a model: `--model_name_or_path`.")
    shape = load_shape(model.model_name_or_path, args.model_config)
    teacher = run.training.teacher_model_name_or_path
    if teacher is not None:
        teacher = load_shape(teacher, args.teacher_config, "--teacher_config")
    sizes = {"max_prompt": args.max_prompt, "teacher": teacher}
    setup = make_setup(run.training, model, run.launcher, gpu, mixed=run.mixed, **sizes)
    lengths = default_lengths(setup)
    prompt, completion = args.mean_prompt or lengths.prompt, args.mean_completion or lengths.completion
    limits = (("--max_prompt", args.max_prompt), ("--max_completion_length", run.training.max_completion_length))
    for name, mean, (limit, longest) in zip(("prompt", "completion"), (prompt, completion), limits, strict=True):
        if mean > longest:
            raise ValueError(f"--mean_{name} {mean} exceeds `{limit} {longest}`. Raise that, or lower the mean.")
    context = args.mean_context or mean_context(setup, prompt, completion)
    lengths = replace(lengths, prompt=prompt, completion=completion, context=context)
    return make_plan(shape, setup, lengths, _schedule(args, run))


def _schedule(args: argparse.Namespace, run: ParsedRun) -> Schedule:
    from credit_trl.lab.planning.duration import Schedule

    training, script = run.training, run.script
    return Schedule(
        steps=training.max_steps if training.max_steps > 0 else None,
        epochs=training.num_train_epochs,
        rows=args.rows or script.max_train_rows,
        samples=script.avg_at_k,
        every=script.avg_at_k_steps,
        eval_rows=args.eval_rows or script.max_eval_rows,
        eval_batch=training.per_device_eval_batch_size,
    )


class ParsedRun(NamedTuple):
    """Arguments of `trl credit`: trainer, model, settings of accelerate, whether bf16 is asked for, data."""

    training: CreditConfig
    model: ModelConfig
    launcher: dict[str, Any]
    mixed: bool
    script: CreditScriptArguments


def parse_run(argv: list[str]) -> ParsedRun:
    """Parse the arguments of `trl credit`.

    The training configuration is that of one process of the launch. It is built for a CPU, because the planning
    machine may have no GPU, so the precision is read separately.
    """
    from credit_trl.cli.credit import check_names, config_file, launcher_of, one_config, parse
    from credit_trl.cli.training import make_parser

    with one_config(argv) as argv:
        launcher = launcher_of(argv)
        parser = make_parser(prog="trl credit-plan", processes=int(launcher.get("num_processes") or 1))
        own = argparse.ArgumentParser()
        add_arguments(own)
        check_names(parser, argv, own._option_string_actions)
        on_cpu = [*argv, "--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--tf32", "false"]
        script, training, model, *_ = parse(parser, on_cpu)
        wanted = argparse.ArgumentParser(add_help=False, argument_default=None)
        wanted.add_argument("--bf16")
        asked = wanted.parse_known_args(argv)[0].bf16 or config_file(argv).get("bf16", True)
    return ParsedRun(training, model, launcher, str(asked).lower() in ("true", "1", "yes"), script)
