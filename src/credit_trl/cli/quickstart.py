"""`trl credit-quickstart`: train the embedded task on a CPU and report accuracy and credit before and after.

The embedded model is part of the package, the data are generated.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame
from transformers.utils.logging import disable_progress_bar

from credit_trl.cli.options_file import read_options
from credit_trl.config import CreditConfig
from credit_trl.evaluation import EvaluationCallback
from credit_trl.lab import analysis
from credit_trl.lab.analysis.token_classes import task_classes
from credit_trl.lab.report import write_report
from credit_trl.lab.report.callback import defer_link, report_link
from credit_trl.lab.report.logs import LogLines
from credit_trl.run_directory import EVALUATIONS_FOLDER, MAPS_FOLDER, RESULT_FILE, describe_data, read_json
from credit_trl.tasks import quickstart
from credit_trl.tasks.registry import load_task
from credit_trl.teacher.models import Teacher
from credit_trl.trainer import CreditTrainer

CLASSES = ("cue", "topic", "tool", "city")  # of tokens, besides "generic"

SAMPLES = 4  # k of the held-out avg@k
EVALUATIONS = 5  # those before the first and after the last step included
ROWS_PER_CUE = 4  # of the held-out prompts
SCORED_PROMPTS = 32  # with two responses each, of the table of S_t
SHOWN = 16  # responses on the page of token maps
OPTIONS = Path(__file__).with_suffix(".yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train the embedded model on the embedded task, on one CPU core in two to three minutes. Prints held-out "
        "accuracy before and after and S_t by token class, and writes a page with learning curves and token maps."
    )
    parser.add_argument("--output_dir", metavar="PATH", default="runs/quickstart", help="default runs/quickstart")
    parser.add_argument("--steps", metavar="N", type=int, default=130, help="optimizer steps (default 130)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of prompts and sampling (default 0)")
    parser.add_argument("--contrastive_coef", metavar="L", type=float, default=0.1, help="λ; 0 is SDPO (default 0.1)")


def run(args: argparse.Namespace) -> int:
    disable_progress_bar()  # of the libraries
    print(run_quickstart(args.output_dir, args.steps, seed=args.seed, contrastive_coef=args.contrastive_coef))
    return 0


def run_quickstart(output_dir: str | Path, steps: int = 130, **options: Any) -> str:
    """Train the embedded base with options of `CreditConfig`, and return the table of results before and after."""
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    torch.set_num_threads(1)  # more gain little for this model
    directory = Path(output_dir)
    options = read_options(OPTIONS) | quickstart.TEMPLATES | {"max_steps": steps} | options
    trainer = quickstart_trainer(CreditConfig(str(directory), **options))
    maps_before = token_maps(trainer, "before")
    trainer.train()
    maps_after = token_maps(trainer, "after")
    taught = [token_map for token_map in maps_before if token_map.response.privileged]
    taught.sort(key=lambda token_map: token_map.response.reward)
    responses = [token_map.response for token_map in taught[:SHOWN]]
    pairs = taught[:SHOWN] + token_maps(trainer, "after", responses)
    analysis.write_maps(pairs, directory / MAPS_FOLDER / "before_and_after.json")
    trainer.save_model(str(directory / "model"))
    trainer.accelerator.end_training()
    evaluations = directory / EVALUATIONS_FOLDER
    result_before = read_json(evaluations / "step-000000" / RESULT_FILE)
    result_after = read_json(evaluations / f"step-{steps:06d}" / RESULT_FILE)
    credit = _credit_lines(analysis.summarize_maps(maps_before), analysis.summarize_maps(maps_after))
    write_report([directory])
    link = f"Report: {report_link(directory)} (open it in a browser)"
    return "\n".join([*_accuracy_lines(result_before, result_after), "", *credit, "", link])


def quickstart_trainer(config: CreditConfig) -> CreditTrainer:
    """The trainer of the embedded base with held-out evaluations, which prints no logs."""
    task = load_task(quickstart.TASK)
    trainer = CreditTrainer("quickstart", task.reward, config, task.build("train"))
    for callback in (LogLines, analysis.CreditMapCallback):  # the page shows `token_maps`
        trainer.remove_callback(callback)
    defer_link(trainer)
    evaluation = EvaluationCallback(
        trainer,
        task,
        SAMPLES,
        max(1, -(-config.max_steps // (EVALUATIONS - 1))),
        dataset=task.build("test", rows_per_cue=ROWS_PER_CUE),
        keep_best=False,
        batch_size=288,
        temperature=1.0,
        top_p=1.0,
        group_by="group",
        progress=False,
    )
    trainer.add_callback(evaluation)
    trainer.run_log.facts |= {"task": task.name, "data": describe_data([], task=task.name)}
    return trainer


def token_maps(
    trainer: CreditTrainer, name: str, responses: Sequence[analysis.Rollout] | None = None
) -> list[analysis.TokenMap]:
    """Token maps of responses under the current model and teacher, by default of new rollouts."""
    tokenizer = trainer.processing_class
    task = load_task(quickstart.TASK)
    checkpoint = analysis.Checkpoint(name, tokenizer, Teacher(trainer.model, trainer.accelerator), trainer.teacher)
    if responses is None:
        rows = trainer.train_dataset.to_list()[:SCORED_PROMPTS]
        responses = analysis.sample_rollouts(checkpoint, task, rows, trainer.args, samples=2)
    classify = task_classes(task, tokenizer)
    return [analysis.map_response(checkpoint, response, trainer.args, classify=classify) for response in responses]


def _accuracy_lines(result_before: Mapping[str, Any], result_after: Mapping[str, Any]) -> list[str]:
    """Table in per cent, with 95 % intervals over prompts."""
    lines = [f"held-out avg@{result_after['k']}, %     before -> after   95 % CI after      format before -> after"]
    for group in (name for name in quickstart.GROUPS if name in result_after["groups"]):
        score = {name: 100 * value for name, value in result_after["groups"][group].items()}
        interval = "[{low:.1f}, {high:.1f}]".format_map(score)
        format_before, format_after = (
            100 * result["group_metrics"][group]["format"] for result in (result_before, result_after)
        )
        lines.append(
            f"  {f'{group} cues':<20}{100 * result_before['groups'][group]['mean']:8.1f} -> {score['mean']:5.1f}   "
            f"{interval:<16}{format_before:9.1f} -> {format_after:5.1f}"
        )
    return lines


def _credit_lines(summary_before: DataFrame, summary_after: DataFrame) -> list[str]:
    """Table of the mean S_t in nats by token class."""
    lines = ["S_t, nats a token          before -> after   share of |S| before"]
    for name in (*CLASSES, "generic"):
        values = [
            f"{summary['specific'][name]:z.2f}" if name in summary.index else "none"
            for summary in (summary_before, summary_after)
        ]
        share = f"{100 * summary_before['of_specific'][name]:.1f} %" if name in summary_before.index else ""
        title = "generic (template)" if name == "generic" else name
        lines.append(f"  {title:<20}{values[0]:>8} -> {values[1]:>5}   {share:>12}")
    return lines
