"""`python -m memopt bench`: the CPU's benchmarks, in a checkout of the repository."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys

from memopt._errors import USAGE_ERROR


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--report",
        action="store_true",
        help="measure nothing: make the tables and figures of README and docs/ from the results",
    )
    parser.add_argument("--check", action="store_true", help="with --report: write nothing")
    parser.add_argument("--quick", action="store_true", help="smallest cases: a check, no result")


def bench_command(args: argparse.Namespace) -> int:
    """Runs the command. Returns its status, or 2 outside of a checkout."""
    if importlib.util.find_spec("benchmarks") is None:
        print(
            "memopt bench: runs in a checkout of the repository, whose folder `benchmarks` is not "
            f"in {os.getcwd()}",
            file=sys.stderr,
        )
        return USAGE_ERROR
    name, flag = ("report", "check") if args.report else ("cpu", "quick")
    options = [f"--{flag}"] if getattr(args, flag) else []
    status: int = importlib.import_module(f"benchmarks.{name}").main(options)
    return status
