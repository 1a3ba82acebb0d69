"""`trl credit-report`: one HTML page for one run, or for several side by side."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write report.html with curves, rollouts and token maps of a run, or a comparison of several with paired "
        "intervals, and the same as Markdown and JSON beside it. Reads run directories only and needs no network."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories; the first is the baseline")
    parser.add_argument("--output", metavar="FILE", help="default: report.html in the run, or here for several")


def run(args: argparse.Namespace) -> int:
    from credit_trl.lab.report import write_report

    page = write_report(args.runs, args.output)
    print(page.with_suffix(".md").read_text("utf-8"))
    print(f"report: {page}")
    return 0
