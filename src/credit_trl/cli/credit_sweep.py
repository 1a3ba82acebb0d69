"""`trl credit-sweep`: run the missing jobs of a sweep and compare all of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from credit_trl.cli.arguments import add_sandbox_arguments
from credit_trl.sandbox import choose_sandbox
from credit_trl.tasks.printable import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train every arm of a sweep with every seed, one after another, and write the comparison. An interrupted "
        "sweep continues when started again. Several processes on one directory share the jobs."
    )
    parser.add_argument("spec", help="YAML file of the sweep")
    parser.add_argument("--output_dir", help="folder of the jobs (default: runs/ and the name of the file)")
    parser.add_argument("--dry_run", action="store_true", help="only check every arm and list the jobs")
    parser.add_argument("--no_report", action="store_true", help="do not write the comparison at the end")
    add_sandbox_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from credit_trl.lab.sweeps import read_spec, run_sweep
    from credit_trl.lab.sweeps.job import is_done
    from credit_trl.lab.sweeps.launch import plan_sweep

    output_dir = Path(args.output_dir or Path("runs") / Path(args.spec).stem)
    choose_sandbox(args.sandbox, args.allow_unsandboxed, args.sandbox_packages)
    spec = read_spec(args.spec)
    folders = plan_sweep(spec, output_dir, write=not args.dry_run)
    if args.dry_run:
        for folder in folders:
            print(f"{'done   ' if is_done(folder) else 'missing'}  {printable(str(folder))}")
        return 0
    report = run_sweep(spec, output_dir)
    print(report)
    if report.done and not args.no_report:
        from credit_trl.lab.comparison import compare, write_report

        print(f"report: {write_report(compare([output_dir]), output_dir / 'report')}")
    return 1 if report.failed else 0
