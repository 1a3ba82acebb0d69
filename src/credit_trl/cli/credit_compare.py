"""`trl credit-compare`: tables, paired tests and learning curves of runs, as one HTML page."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare runs on the prompts that they share: final and best-during-training scores with 95% intervals, "
        "paired bootstrap against a baseline with seeds as a second level, steps to a score, learning curves. Reads "
        "run directories only and needs no network."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or directories of runs")
    parser.add_argument("--output_dir", default="comparison", help="folder of the report (default: comparison)")
    parser.add_argument("--baseline", help="arm to compare with (default: SDPO, or the first)")
    parser.add_argument(
        "--target", type=float, action="append", default=[], help="score in [0, 1] whose first step is shown; repeat"
    )
    parser.add_argument("--measure", default="score", help="score (default), majority, or a metric of the verdicts")
    parser.add_argument("--arm", action="append", help="only this arm; repeat to select and order several")
    parser.add_argument("--include_unfinished", action="store_true", help="also compare runs that are still training")
    parser.add_argument("--title", default="Comparison of runs")


def run(args: argparse.Namespace) -> int:
    from credit_trl.lab.comparison import compare, write_report
    from credit_trl.lab.comparison.report import tables_markdown
    from credit_trl.lab.comparison.runs import MAJORITY, SCORE

    outside = [target for target in args.target if not 0.0 <= target <= 1.0]
    if outside and args.measure in (SCORE, MAJORITY):
        raise ValueError(f"--target {outside[0]:g}: scores are in [0, 1]; 45 % is --target 0.45.")
    comparison = compare(
        args.runs,
        baseline=args.baseline,
        targets=args.target,
        measure=args.measure,
        arms=args.arm,
        include_unfinished=args.include_unfinished,
    )
    page = write_report(comparison, args.output_dir, title=args.title)
    print(tables_markdown(comparison))
    print(f"report: {page}")
    return 0
