"""`trl credit-map`: which tokens the credit falls on, as a page, pictures, a table and in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yaml import YAMLError

from credit_trl.cli.sandbox_options import add_sandbox_arguments, apply_sandbox_arguments
from credit_trl.training.run_directory import RUN_FILE

if TYPE_CHECKING:
    from credit_trl.config import CreditConfig
    from credit_trl.lab.analysis.checkpoints import Checkpoint
    from credit_trl.lab.analysis.responses import Response
    from credit_trl.lab.analysis.tokenmap import TokenMap

NAME = "credit-map"
QUANTITIES = ("specific", "delta_v", "advantage", "generic", "student_logps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample and grade responses of a task (or read yours), and map the credit of every token: ΔV_t, S_t, Ĝ_t, "
        "R_t, log π_θ and the alternatives. Writes maps.html, maps.parquet, summary.md and PNGs to --output_dir. "
        "With --checkpoint, the model and each checkpoint read the same responses, side by side."
    )
    source = parser.add_argument_group("what is mapped")
    source.add_argument("--model", help="hub name, directory, or `quickstart` for the model that the package brings")
    source.add_argument(
        "--checkpoint", action="append", default=[], help="checkpoint of a run of that model; may be repeated"
    )
    source.add_argument("--task", help="such as sciknoweval:chemistry, quickstart, my_package.task:Task")
    source.add_argument("--split", default="test", help="of the task's data (default test)")
    source.add_argument("--path", help="local data file or folder, instead of the hub")
    source.add_argument("--max_prompts", type=int, default=4, help="prompts to sample responses of (default 4)")
    source.add_argument("--samples", type=int, default=2, help="responses a prompt (default 2)")
    source.add_argument("--responses", help="JSON lines with prompt, response, feedback, instead of sampling")
    source.add_argument("--maps", nargs="+", default=[], help="Parquet files of earlier maps, to draw together")
    credit = parser.add_argument_group("how it is measured")
    credit.add_argument(
        "--config",
        help="YAML or run.json of a training run; all that R_t depends on is taken from it (default: the run.json "
        "beside each --checkpoint, where there is one)",
    )
    credit.add_argument("--contrastive_coef", type=float, help="λ (default 0.1)")
    credit.add_argument("--contrastive_form", choices=("subtract", "guide"), help="default subtract")
    credit.add_argument(
        "--contrastive_source",
        choices=("batch", "dataset", "hard", "same_task", "none"),
        help="other questions: of the task's data (dataset, the default), of the sampled prompts, or no question",
    )
    credit.add_argument("--contrastive_count", type=int, help="C, other questions a response (default 4)")
    credit.add_argument("--temperature", type=float, help="of the rollout (default 1)")
    credit.add_argument("--max_completion_length", type=int, help="tokens of a response (default 512)")
    credit.add_argument("--seed", type=int, help="of responses and contrasts (default 42)")
    credit.add_argument("--alternatives", type=int, default=5, help="tokens beside each realised one (default 5)")
    credit.add_argument("--pmi", action="store_true", help="also what whole responses earn (pmi.md; Eq. 9)")
    output = parser.add_argument_group("what is written")
    output.add_argument("--output_dir", default="credit_map", help="default credit_map")
    output.add_argument("--quantity", choices=QUANTITIES, default="specific", help="in the terminal (default S_t)")
    output.add_argument("--palette", choices=("red-blue", "orange-purple"), default="red-blue")
    output.add_argument("--pictures", type=int, default=4, help="how many PNGs (default 4)")
    output.add_argument("--terminal", type=int, default=1, help="how many maps to print (default 1)")
    output.add_argument("--title", default="Token credit")
    add_sandbox_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        apply_sandbox_arguments(args)
        maps = _read_maps(args.maps) if args.maps else _make_maps(args)
        if not maps:
            raise ValueError("no response has a teacher: the task gave no feedback and no rollout succeeded.")
        _write(args, maps)
    except (ValueError, OSError, ImportError, YAMLError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    return 0


def measuring_config(args: argparse.Namespace, run_file: Path | None = None) -> CreditConfig:
    """The configuration to measure with: a run's options, then the line's.

    Args:
        args: of the line.
        run_file: of the run; `--config` wins.

    Raises:
        ValueError: the file is no mapping of options, or an option has a value that no run could have.
    """
    from credit_trl.config import CreditConfig
    from credit_trl.lab.analysis.responses import analysis_config

    given: dict[str, Any] = {}
    if path := args.config or run_file:
        read = _read_options(Path(path))
        names = [
            n
            for n in CreditConfig.__dataclass_fields__
            if n.endswith("_template") or n.startswith("contrastive_") or n in _MEASURED
        ]
        given |= {name: read[name] for name in names if name in read}
    given |= {name: getattr(args, name) for name in _OF_THE_LINE if getattr(args, name) is not None}
    given.setdefault("contrastive_count", 1 if given.get("contrastive_source") == "none" else 4)
    return analysis_config(**given)


def _read_options(path: Path) -> dict[str, Any]:
    import yaml

    read = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    if isinstance(read, dict) and path.name == RUN_FILE:
        read = read.get("config")
    if not isinstance(read, dict):
        raise ValueError(f"{path} is no mapping of options.")
    return read


_OF_THE_LINE = (
    "contrastive_coef",
    "contrastive_count",
    "contrastive_form",
    "contrastive_source",
    "temperature",
    "max_completion_length",
    "seed",
)
_MEASURED = (
    "chat_template_kwargs",
    "distillation_support",
    "distillation_tail",
    "distillation_topk",
    "dont_reprompt_on_self_success",
    "environment_feedback_only_without_solution",
    "include_environment_feedback",
    "max_completion_length",
    "max_reprompt_len",
    "remove_thinking_from_demonstration",
    "seed",
    "success_reward_threshold",
    "teacher_context",
    "teacher_hint",
    "temperature",
    "use_successful_as_teacher",
)


def _read_maps(paths: list[str]) -> list[TokenMap]:
    from credit_trl.lab.analysis.naming import tell_apart
    from credit_trl.lab.analysis.tokenmap_parquet import read_parquet

    return tell_apart(paths, [read_parquet(path) for path in paths])


def _make_maps(args: argparse.Namespace) -> list[TokenMap]:
    from credit_trl.lab.analysis.checkpoints import Checkpoint
    from credit_trl.lab.analysis.formula import CreditFormula, coefficient
    from credit_trl.lab.analysis.naming import short_names
    from credit_trl.lab.analysis.token_classes import default_classes, task_classes
    from credit_trl.lab.analysis.tokenmap import map_response
    from credit_trl.tasks.registry import load_task

    if args.model is None or (args.task is None) == (args.responses is None):
        raise ValueError("name a --model and either a --task or --responses (or draw earlier --maps).")
    sys.path.insert(0, os.getcwd())
    task = None if args.task is None else load_task(args.task)
    run_files = [Path(path).resolve().parent / RUN_FILE for path in args.checkpoint]
    configs = [measuring_config(args, file if file.is_file() else None) for file in run_files]
    configs = [configs[0] if configs else measuring_config(args), *configs]
    names = [None, *short_names(args.checkpoint, parts=2)]  # `runs/first/checkpoint-50` → `first/checkpoint-50`
    checkpoints = [
        Checkpoint.load(args.model, path, name=name, chat_template_kwargs=config.chat_template_kwargs)
        for path, name, config in zip([None, *args.checkpoint], names, configs, strict=True)
    ]
    if args.checkpoint:  # a run that adapts λ began at the model with this one
        checkpoints[0] = replace(checkpoints[0], contrastive_coef=configs[0].contrastive_auto_start)
    for checkpoint, config in zip(checkpoints, configs, strict=True):
        formula, coef = CreditFormula.of(config), coefficient(config, checkpoint.contrastive_coef)
        print(f"{checkpoint.describe()}; R_t = {formula.text}{formula.conditions}, λ = {coef:.4g}")
    responses = _responses(args, task, checkpoints[-1], configs[-1])
    classify = default_classes if task is None else task_classes(task, checkpoints[-1].tokenizer)
    if args.pmi:
        _write_pmi(args, checkpoints, responses, configs)
    return [
        map_response(checkpoint, response, config, alternatives=args.alternatives, classify=classify)
        for checkpoint, config in zip(checkpoints, configs, strict=True)
        for response in responses
    ]


def _responses(args: argparse.Namespace, task: Any, checkpoint: Checkpoint, config: CreditConfig) -> list[Response]:
    """Responses with a teacher; the last checkpoint samples them."""
    from credit_trl.lab.analysis.responses import read_responses, sample_responses

    if task is None:
        responses = [r for r in read_responses(args.responses, checkpoint, config) if r.privileged]
        if not responses:
            raise ValueError(f"no record of {args.responses} has feedback or a demonstration: a teacher needs one.")
        if not any(r.contrasts for r in responses):
            raise ValueError(
                f"the records of {args.responses} hold no other question, which S_t is measured against: give a "
                "record `contrasts`, a list of prompts, or add records with other prompts, or leave the question out "
                "(--contrastive_source none)."
            )
        return responses
    if min(args.max_prompts, args.samples) < 1:
        raise ValueError(f"--max_prompts {args.max_prompts} and --samples {args.samples} must be at least 1.")
    dataset = task.build(args.split, args.path)
    rows = list(dataset.take(args.max_prompts))
    sampled = sample_responses(
        checkpoint, task, rows, config, samples=args.samples, population=list(dataset["prompt"])
    )
    responses = [r for r in sampled if r.privileged and r.token_ids]
    if config.contrasts and responses and not any(r.contrasts for r in responses):
        raise ValueError(
            f"the {len(rows)} prompts hold no other question for `contrastive_source={config.contrastive_source!r}`: "
            "raise --max_prompts, or draw from the task's data with --contrastive_source dataset."
        )
    print(f"{len(sampled)} responses to {len(rows)} prompts, {len(responses)} with a teacher")
    return responses


def _write_pmi(
    args: argparse.Namespace, checkpoints: list[Checkpoint], responses: list[Response], configs: list[CreditConfig]
) -> None:
    from credit_trl.lab.analysis import pmi
    from credit_trl.lab.analysis.formula import CreditFormula, coefficient

    texts = []
    for checkpoint, config in zip(checkpoints, configs, strict=True):
        reports = [pmi.measure(checkpoint, r, config) for r in responses if r.contrasts]
        formula, coef = CreditFormula.of(config), coefficient(config, checkpoint.contrastive_coef)
        texts.append(
            f"## {checkpoint.name}\n\nR_t = {formula.text}{formula.conditions}, λ = {coef:.4g}\n\n"
            f"{pmi.format_reports(reports)}"
        )
    path = _directory(args) / "pmi.md"
    path.write_text("\n".join(texts), encoding="utf-8")
    print(f"{path}: pMI, its contrast and the anti-genericity bonus of {len(responses)} responses")


def _write(args: argparse.Namespace, maps: list[TokenMap]) -> None:
    from credit_trl.lab.analysis.tokenmap import group_scales
    from credit_trl.lab.analysis.tokenmap_html import write_html
    from credit_trl.lab.analysis.tokenmap_parquet import write_parquet
    from credit_trl.lab.analysis.tokenmap_summary import format_summary, summarize
    from credit_trl.lab.analysis.tokenmap_terminal import print_map

    directory, scales = _directory(args), group_scales(maps)
    write_html(maps, directory / "maps.html", title=args.title)
    write_parquet(maps, directory / "maps.parquet")
    summaries = [
        f"## {name}\n\n{format_summary(summarize([m for m in maps if m.checkpoint == name]))}"
        for name in dict.fromkeys(m.checkpoint for m in maps)
    ]
    (directory / "summary.md").write_text("\n".join(summaries), encoding="utf-8")
    if args.pictures:
        from credit_trl.lab.analysis.tokenmap_png import draw_png

        for number, one in enumerate(maps[: args.pictures], 1):
            draw_png(one, directory / f"map-{number:03d}.png", scales[one.response.group], palette=args.palette)
    for one in maps[: args.terminal]:
        print_map(one, args.quantity, scales[one.response.group][args.quantity], palette=args.palette)
    print(f"{directory / 'maps.html'}: {len(maps)} maps, with maps.parquet, summary.md and pictures beside it")


def _directory(args: argparse.Namespace) -> Path:
    directory = Path(args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
