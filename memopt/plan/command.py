"""`python -m memopt plan`: a fate for each block of a model, within a budget."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from memopt.anatomy import command, presets
from memopt.anatomy.api import anatomy
from memopt.anatomy.hollow import DependsOnValues
from memopt.anatomy.report import Anatomy
from memopt.plan.api import plan
from memopt.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    command.add_model_arguments(parser)
    parser.add_argument("--budget", required=True, help="of the step's peak: 24GiB, 80GB, or bytes")
    parser.add_argument("--offload", action="store_true", help="activations may go to the host")
    parser.add_argument("--largest-batch", action="store_true", help="also how many rows fit")
    for name in ("json", "html", "png"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {name.upper()}")


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 0, or 2 for arguments that cannot be run."""
    try:
        job = command.job_of(args)
        found = _plan(args, job)
        if args.json is not None:
            found.save(args.json)
        if args.html is not None:
            found.to_html(args.html, _anatomy(args, job))
        if args.png is not None:
            found.pareto(args.png)
        print(found)
        if args.largest_batch:
            print(f"Within the budget fit {found.largest_batch():,} rows")
    except (presets.UsageError, ValueError, DependsOnValues, OSError) as error:
        print(f"memopt plan: {error}", file=sys.stderr)
        return command.USAGE_ERROR
    return 0


def _anatomy(args: argparse.Namespace, job: presets.Job) -> Anatomy:
    """Of the step without the plan, for the page."""
    return anatomy(
        job.model,
        job.batch,
        optimizer=command.OPTIMIZERS[args.optimizer],
        autocast=None if args.autocast is None else command.DTYPES[args.autocast],
        micro_batches=args.micro_batches,
        device=args.device or (None if args.measure else "cuda"),
        measure=False,
    )


def _plan(args: argparse.Namespace, job: presets.Job) -> Plan:
    found = plan(
        job.model,
        job.batch,
        args.budget,
        optimizer=command.OPTIMIZERS[args.optimizer],
        offload="cpu" if args.offload else None,
        autocast=None if args.autocast is None else command.DTYPES[args.autocast],
        micro_batches=args.micro_batches,
        device=args.device or (None if args.measure else "cuda"),
        measure=args.measure,
    )
    return dataclasses.replace(found, notes=(*found.notes, job.note)) if job.note else found
