"""`trl credit-quickstart`: train a task on a CPU and report accuracy and credit before and after.

The embedded model is part of the package; SmolLM2 is downloaded and warmed up on first use. The data are generated.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train the embedded model on the embedded task, on one CPU core in two to three minutes, or SmolLM2 with 135 "
        "million parameters on tool choice in English, on two cores. Prints held-out accuracy before and after, "
        "S_t by token class, and seconds per stage. Writes a learning curve and a page of token maps to --output_dir."
    )
    parser.add_argument("--model", choices=("quickstart", "smollm2"), default="quickstart", help="default quickstart")
    parser.add_argument("--output_dir", help="default runs/quickstart or runs/smollm2")
    parser.add_argument("--steps", type=int, help="optimizer steps (default 130, with SmolLM2 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--world", default="plain", help="plain (default), or a world pretrained before: shortcut, style, weak"
    )
    parser.add_argument("--contrastive_coef", type=float, default=0.1, help="λ; 0 is SDPO (default 0.1)")
    parser.add_argument("--distillation_weight", type=float, default=1.0, help="0 is GRPO (default 1)")
    parser.add_argument("--use_peft", action="store_true", help="train LoRA adapters instead of all weights")


def run(args: argparse.Namespace) -> int:
    from transformers.utils.logging import disable_progress_bar

    from credit_trl.cli.quickstart_report import format_result
    from credit_trl.cli.quickstart_run import run_quickstart
    from credit_trl.cli.quickstart_tasks import quickstart_task

    disable_progress_bar()  # of the libraries
    result = run_quickstart(
        args.output_dir or f"runs/{args.model}",
        args.steps,
        args.seed,
        task=quickstart_task(args.model),
        world=args.world,
        use_peft=args.use_peft,
        contrastive_coef=args.contrastive_coef,
        distillation_weight=args.distillation_weight,
    )
    print(format_result(result))
    return 0
