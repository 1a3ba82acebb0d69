"""`trl credit-map`: token credit of responses as an HTML page, with JSON and a summary."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from credit_trl.cli.options_file import read_options
from credit_trl.cli.run_folder import add_run_arguments, model_of_run, option_names, read_run, task_of_run
from credit_trl.run_directory import MAPS_FOLDER, RUN_FILE
from credit_trl.sandbox import choose_sandbox

if TYPE_CHECKING:
    from credit_trl.config import CreditConfig
    from credit_trl.lab.analysis.tokenmap import TokenMap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample and verify responses, and map the credit of every token: ΔV_t, S_t, Ĝ_t, R_t and the alternatives. "
        "Writes maps.html, maps.json and summary.md, which also predicts which λ holds generic tokens and how often "
        "they come after training. With --checkpoint, the model and each checkpoint score the same responses, with "
        "the options of the last one's run; RUN stands for its model, checkpoint, data and options."
    )
    add_run_arguments(parser)
    parser.add_argument("--checkpoint", metavar="PATH", action="append", default=[], help="of a run; may be repeated")
    parser.add_argument("--max_prompts", metavar="N", type=int, default=4, help="default 4")
    parser.add_argument("--samples", metavar="N", type=int, default=2, help="responses per prompt (default 2)")
    parser.add_argument("--config", metavar="FILE", help="options of R_t: YAML or run.json (default: the last run's)")
    parser.add_argument("--contrastive_coef", metavar="L", type=float, help="λ (default: the run's, or 0.1)")
    parser.add_argument("--generation_batches", metavar="T", type=int, default=100, help="predicted (default 100)")
    parser.add_argument("--seed", metavar="N", type=int, help="of responses and contrast prompts (default: the run's)")
    parser.add_argument("--output_dir", metavar="PATH", help=f"default RUN/{MAPS_FOLDER}, or credit_map")


def run(args: argparse.Namespace) -> int:
    from credit_trl.contexts.images import with_local_images
    from credit_trl.contexts.prompts import check_rows, images_of, row_prompt
    from credit_trl.lab.analysis import Checkpoint, map_response, sample_rollouts
    from credit_trl.lab.analysis.responses import teacher_contexts
    from credit_trl.lab.analysis.token_classes import task_classes
    from credit_trl.lab.report.runs import short_names

    choose_sandbox(args.sandbox, args.allow_unsandboxed)
    if args.run is not None:
        args.model = args.model or read_run(args.run)["model"]
        args.checkpoint = args.checkpoint or [str(model_of_run(args.run))]
        args.output_dir = args.output_dir or str(Path(args.run) / MAPS_FOLDER)
    elif args.model is None or args.task is None:
        raise ValueError("give a run directory, or --model and --task.")
    if min(args.max_prompts, args.samples) < 1:
        raise ValueError("`--max_prompts` and `--samples` must be at least 1.")
    for path in args.checkpoint or ():
        if not Path(path).is_dir():
            raise FileNotFoundError(f"`--checkpoint {path}`: there is no such folder.")
    config = measuring_config(args)
    task = task_of_run(args.run, args.task, args.reward_funcs)
    print(f"λ = {config.contrastive_coef:g}, C = {config.contrastive_count}")
    dataset = task.build(args.split, args.path)
    dataset = with_local_images(dataset)
    rows = list(dataset.take(args.max_prompts))
    check_rows("the data", (row.get("prompt") for row in rows))
    if any(images_of(row_prompt(row)) for row in rows):
        raise ValueError("The prompts have images. Map them with `CreditMapCallback` during training.")
    population = list(dataset["prompt"])
    names = [None, *short_names(args.checkpoint, parts=2)]  # `runs/first/checkpoint-50` → `first/checkpoint-50`
    loaded = {"teacher": config.teacher_model_kind, "chat_template_kwargs": config.chat_template_kwargs}
    checkpoints = []
    for path, name in zip([None, *args.checkpoint], names, strict=True):
        checkpoints.append(Checkpoint.load(args.model, path, name=name, **loaded))
    prompt_count = len(rows)
    print(f"sampling {args.samples} responses to each of {prompt_count} prompts", flush=True)
    sampled = sample_rollouts(checkpoints[-1], task, rows, config, samples=args.samples, population=population)
    contexts = teacher_contexts(sampled, config, checkpoints[-1])
    responses = []
    for response, prompts in zip(sampled, contexts, strict=True):
        if prompts is not None:
            responses.append((response, prompts))
    print(f"{len(sampled)} responses to {prompt_count} prompts, {len(responses)} with a teacher")
    classify = task_classes(task, checkpoints[-1].tokenizer)
    maps = []
    mapped = list(itertools.product(checkpoints, responses))
    for checkpoint, (response, prompts) in tqdm(mapped, desc="maps", unit="map"):
        built = prompts if checkpoint is checkpoints[-1] else None
        maps.append(map_response(checkpoint, response, config, classify=classify, contexts=built))
    if not maps:
        raise ValueError("no response has a teacher: no feedback that fits, and no rollout that succeeded.")
    _write(Path(args.output_dir or "credit_map"), maps, config, args.generation_batches)
    return 0


def measuring_config(args: argparse.Namespace) -> CreditConfig:
    """Options of `--config`, else of the run of the last checkpoint, overridden by those of the command line."""
    from credit_trl.lab.analysis.responses import analysis_config

    last_checkpoint = Path(args.checkpoint[-1] if args.checkpoint else "").resolve()
    # In the folder of a final model, or beside a checkpoint.
    path = args.config
    for folder in (last_checkpoint, last_checkpoint.parent) if args.checkpoint else ():
        if path is None and (folder / RUN_FILE).is_file():
            path = folder / RUN_FILE
    options = {} if path is None else read_options(path)
    if options.get("teacher_model_kind") == "model" or options.get("teacher_prompt") == "student":
        raise ValueError(
            f"{path}: no checkpoint contains the teacher of this run, another model or one that reads the student's "
            "prompt. Map it with `CreditMapCallback` during training."
        )
    # Those on which the teacher's prompt, R_t and the predicted drift depend.
    measured = option_names() | {"chat_template_kwargs", "max_completion_length", "seed", "temperature"}
    measured -= {"distillation_weight"}
    selected = {"contrastive_count": 4}
    for name in options.keys() & measured:
        selected[name] = options[name]
    for name in ("contrastive_coef", "seed"):
        if getattr(args, name) is not None:
            selected[name] = getattr(args, name)
    if args.max_prompts == 1 and selected.get("contrastive_source") == "batch":  # which has no other prompt
        selected["contrastive_source"] = "dataset"
    return analysis_config(**selected)


def _write(directory: Path, maps: list[TokenMap], config: CreditConfig, generation_batches: int) -> None:
    from credit_trl.lab.analysis import format_summary, summarize_maps, write_maps
    from credit_trl.lab.analysis.drift import branch_table
    from credit_trl.lab.report import write_token_maps
    from credit_trl.tasks.escaping import pluralized

    directory.mkdir(parents=True, exist_ok=True)
    write_token_maps(maps, directory / "maps.html")
    write_maps(maps, directory / "maps.json")
    average = (config.teacher_update_rate or 0.0) / (config.teacher_sync_steps or 1)  # in a step
    rate = {"live": 1.0, "base": 0.0}.get(config.teacher_model_kind, average)
    summaries = []
    for name in dict.fromkeys(token_map.checkpoint for token_map in maps):
        checkpoint_maps = [token_map for token_map in maps if token_map.checkpoint == name]
        drift = branch_table(checkpoint_maps, rate, generation_batches)
        summary = format_summary(summarize_maps(checkpoint_maps))
        summaries.append(f"## {name}\n\n{summary}\n{drift}")
    (directory / "summary.md").write_text("\n".join(summaries), encoding="utf-8")
    print("\n".join(summaries))
    print(f"{directory / 'maps.html'}: {pluralized(len(maps), 'map')}, with maps.json and summary.md beside it")
