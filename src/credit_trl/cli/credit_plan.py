"""`trl credit-plan`: what a configuration needs of a GPU, without loading weights; refuses what cannot fit."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from credit_trl.lab.planning.report import Plan

NAME = "credit-plan"
# Whatever `trl credit` takes is taken here too: the words that this parser does not know are that command's.
TAKES_OTHER_WORDS = True
DEFAULT_GPU = "h100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the memory that each phase of a step needs on a GPU, the tokens that a generation batch moves and the "
        "time to expect, from the arguments of `trl credit` (--config FILE.yaml and overrides), without loading "
        "weights. Exits with 1 where the run cannot fit, and names the change that would make it fit."
    )
    parser.add_argument("--gpu", default=DEFAULT_GPU, help=f"kind of GPU (default {DEFAULT_GPU})")
    parser.add_argument("--gpu_memory", type=float, help="its memory in GiB, instead of the data sheet's")
    parser.add_argument("--model_config", help="config.json of the model, where its sizes are not known here")
    parser.add_argument("--max_prompt", type=int, default=2048, help="tokens of the longest prompt (default 2048)")
    parser.add_argument("--mean_prompt", type=int, help="mean tokens of a prompt (default: a quarter of the longest)")
    parser.add_argument("--mean_completion", type=int, help="mean tokens of an answer (default: the same)")
    parser.add_argument("--mean_context", type=int, help="mean tokens of a teacher prompt (default: both and 256)")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")


def run(args: argparse.Namespace, others: list[str]) -> int:
    from credit_trl.lab.planning.report import format_plan, plan_dict

    try:
        plan = plan_of(args, others)
    except (ValueError, TypeError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(plan_dict(plan), indent=2) if args.json else format_plan(plan))
    return 0 if plan.fits else 1


def plan_of(args: argparse.Namespace, words: list[str]) -> Plan:
    """The plan of a command line.

    Args:
        args: this command's own arguments.
        words: those of `trl credit`.

    Raises:
        ValueError: an argument out of range, unknown to both, or a model whose sizes are not known.
    """
    from credit_trl.lab.planning.report import make_plan
    from credit_trl.lab.planning.setup import GIB, GPUS, make_setup
    from credit_trl.lab.planning.shape import load_shape
    from credit_trl.lab.planning.work import default_lengths

    if args.gpu not in GPUS:
        raise ValueError(
            f"unknown GPU {args.gpu!r}; known: {', '.join(GPUS)}. Name the nearest and give --gpu_memory."
        )
    gpu = GPUS[args.gpu]
    if args.gpu_memory is not None:
        gpu = replace(gpu, memory=int(args.gpu_memory * GIB))
    training, model, launcher, mixed = parse_run(words)
    if model.model_name_or_path is None:
        raise ValueError("name a model: `--model_name_or_path`.")
    shape = load_shape(model.model_name_or_path, args.model_config)
    setup = make_setup(training, model, launcher, gpu, mixed=mixed, max_prompt=args.max_prompt)
    lengths = default_lengths(setup)
    prompt, completion = args.mean_prompt or lengths.prompt, args.mean_completion or lengths.completion
    context = args.mean_context or min(setup.context, prompt + completion + 256)
    return make_plan(shape, setup, replace(lengths, prompt=prompt, completion=completion, context=context))


def parse_run(words: list[str]) -> tuple[Any, Any, dict[str, Any], bool]:
    """(training configuration, model configuration, launcher's settings, bf16 or not) of `trl credit`'s words.

    The configuration is as each of the launcher's processes makes it. The machine that plans need not have a GPU, so
    precision is read beside the configuration, which is built for a CPU.
    """
    from credit_trl.cli.credit import config_file, launcher_of, parse, separate_config
    from credit_trl.cli.training import make_parser

    words = separate_config(words)
    launcher = launcher_of(words)
    parser = make_parser(prog=f"trl {NAME}", processes=int(launcher.get("num_processes") or 1))
    on_cpu = [*words, "--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--tf32", "false"]
    _, training, model, *_ = parse(parser, on_cpu)
    wanted = argparse.ArgumentParser(add_help=False, argument_default=None)
    wanted.add_argument("--bf16")
    asked = wanted.parse_known_args(words)[0].bf16 or config_file(words).get("bf16", True)
    return training, model, launcher, str(asked).lower() in ("true", "1", "yes")
