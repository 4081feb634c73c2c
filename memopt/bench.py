"""`python -m memopt bench`: the CPU's benchmarks, in a checkout of the repository."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys

USAGE_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--report",
        action="store_true",
        help="measure nothing: make the tables and figures of README and docs/ from the results",
    )
    parser.add_argument("options", nargs=argparse.REMAINDER, help="for benchmarks.cpu or .report")


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns its status, or 2 outside of a checkout."""
    sys.path.insert(0, os.getcwd())
    if importlib.util.find_spec("benchmarks") is None:
        print(
            "memopt bench: runs in a checkout of the repository, whose folder `benchmarks` is not "
            f"in {os.getcwd()}",
            file=sys.stderr,
        )
        return USAGE_ERROR
    name = "report" if args.report else "cpu"
    status: int = importlib.import_module(f"benchmarks.{name}").main(args.options)
    return status
