"""`trl credit-probe`: does the feedback teach, and what would each arm learn, before any training. Resumable."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from credit_trl.cli.options_file import read_options
from credit_trl.cli.run_folder import add_run_arguments, option_names, read_run, task_of_run
from credit_trl.run_directory import RUN_FILE, write_json
from credit_trl.sandbox import choose_sandbox

# Options of a run that count beside those of `CreditConfig` alone.
_OPTIONS = (
    "chat_template_kwargs max_completion_length seed temperature num_generations learning_rate loss_type".split()
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure on your prompts, verifier and model whether the feedback teaches, and what each arm would learn, "
        "before any training. Prints an advice with its rule, and writes probe.html and probe.json. --config takes "
        "the YAML of `trl credit`, with LoRA and vLLM; RUN is probed as it was before its training. Several processes "
        "share the work: accelerate launch -m credit_trl credit-probe. The same command continues."
    )
    add_run_arguments(parser)
    parser.set_defaults(split="train")
    parser.add_argument("--config", metavar="FILE", help="options of `trl credit`: YAML")
    parser.add_argument("--prompts", metavar="N", type=int, help="default: as many as 12 training steps afford")
    parser.add_argument("--arms", metavar="ARM", nargs="+", help="λ such as 0.1, or guide:0.2 (default: five)")
    parser.add_argument("--wordings", metavar="FILE", help="YAML: name -> templates of `CreditConfig`, to compare")
    parser.add_argument("--lookahead", metavar="K", type=int, default=0, help="real steps of each arm on two seeds")
    parser.add_argument("--output_dir", metavar="PATH", help="default RUN/probe, or credit_probe")


def continues(args: argparse.Namespace) -> bool:
    """Whether the same command line continues an interrupted probe: always."""
    return True


def run(args: argparse.Namespace) -> int:
    from credit_trl.lab.analysis.probing import ProbeSettings, probe
    from credit_trl.lab.report.write import write_html

    choose_sandbox(args.sandbox, args.allow_unsandboxed)
    default_folder = Path(args.run) / "probe" if args.run else "credit_probe"
    folder = Path(args.output_dir or default_folder)
    arms = tuple(map(read_arm, args.arms)) if args.arms else None
    wordings = read_options(args.wordings) if args.wordings else {}
    make = _of_config if args.config else _of_names
    trainer, task = make(args, folder, {"distillation_weight": 1.0})

    def make_trainer(changes: dict[str, Any]) -> Any:
        return make(args, folder, changes)[0]

    settings = ProbeSettings(args.prompts, arms, wordings, args.lookahead)
    document = probe(trainer, task, settings, folder=folder, make_trainer=make_trainer)
    if trainer.accelerator.is_main_process:
        write_json(folder / "probe.json", document)
        write_html({"title": document["title"], "probe": document}, folder / "probe.html")
        print(f"\n{document['advice']['sentence']}\n\n{document['rule']}\n\n{folder / 'probe.html'}, with probe.json")
    return 0


def read_arm(text: str) -> Any:
    """The arm of `0.1` or `guide:0.2`; λ = 0 is SDPO.

    Raises:
        ValueError: the text has another form.
    """
    from credit_trl.lab.analysis.targets import Arm

    form, _, coef = text.rpartition(":")
    try:
        value = float(coef)
    except ValueError:
        value = -1.0
    if form not in ("", "guide") or not value >= 0.0:
        raise ValueError(f"`--arms {text}`: expected λ such as 0.1, or guide:0.2.")
    if form:
        return Arm(f"guide {value:g}", value, "guide")
    return Arm(f"λ = {value:g}" if value else "SDPO", value)


def _of_config(args: argparse.Namespace, folder: Path, changes: dict[str, Any]) -> tuple[Any, Any]:
    """Trainer and task of a configuration of `trl credit` with changed options."""
    from credit_trl.cli.data import describe
    from credit_trl.cli.training import make_parser, make_trainer
    from credit_trl.tasks.registry import task_of_data

    words = ["--config", args.config, "--output_dir", str(folder / "run")]
    for name, value in changes.items():
        words += [f"--{name}", str(value)]
    parsed = make_parser().parse_args_and_config(words, fail_with_unknown_args=False)
    trainer = make_trainer(*parsed[:4])
    return trainer, task_of_data(describe(parsed[0], trainer.args.reward_weights))


def _of_names(args: argparse.Namespace, folder: Path, changes: dict[str, Any]) -> tuple[Any, Any]:
    """Trainer and task of a run or of `--model` and `--task`, for one process of this machine."""
    import torch

    from credit_trl.config import CreditConfig
    from credit_trl.quickstart_model import model_path
    from credit_trl.trainer import CreditTrainer

    if args.run is None and (args.model is None or args.task is None):
        raise ValueError("give a run directory, --config FILE, or --model and --task.")
    stored = read_options(Path(args.run) / RUN_FILE) if args.run else {}
    options = {}
    for name in stored.keys() & option_names().union(_OPTIONS):
        options[name] = stored[name]
    if args.run:  # of all processes of the run
        options["per_device_train_batch_size"] = stored["num_generations"]
        options["gradient_accumulation_steps"] = stored["generation_batch_size"] // stored["num_generations"]
    options |= {"report_to": "none", "save_strategy": "no"}
    if not torch.accelerator.is_available():
        options |= {"use_cpu": True, "bf16": False}
    task = task_of_run(args.run, args.task, args.reward_funcs)
    model = model_path(args.model or read_run(args.run)["model"])
    config = CreditConfig(str(folder / "run"), **options | changes)
    trainer = CreditTrainer(model, task.reward, config, task.build(args.split, args.path))
    return trainer, task
