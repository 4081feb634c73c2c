"""`python -m memopt plan`: a fate for each block of a model, within a budget."""

from __future__ import annotations

import argparse
from pathlib import Path

from memopt._anatomy.api import anatomy
from memopt._plan.api import plan
from memopt._plan.plan import Plan
from memopt.command.anatomy import (
    Output,
    add_files,
    add_measure,
    add_place,
    add_step_arguments,
    job_of,
    place_of,
    step_options,
    with_note,
)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add_step_arguments(parser)
    add_measure(parser)
    add_files(parser, "json", "html", "png")
    parser.add_argument("--budget", required=True, help="of the step's peak: 24GiB, 80GB, or bytes")
    add_place(parser, "activations may wait there")
    parser.add_argument("--largest-batch", action="store_true", help="also how many rows fit")


def plan_output(args: argparse.Namespace) -> Output:
    """The plan."""
    job = job_of(args)
    options = step_options(args)
    found: Plan = with_note(
        plan(
            job.model,
            job.batch,
            args.budget,
            offload=place_of(args.offload),
            measure=args.measure,
            **options,
        ),
        job,
    )

    def write_page(path: Path) -> None:
        """Write the plan's page, with the anatomy of the step without the plan."""
        found.to_html(path, anatomy(job.model, job.batch, measure=False, **options))

    text = str(found)
    if args.largest_batch:
        text += f"\nWithin the budget fit {found.largest_batch():,} rows"
    return Output(text, {"json": found.save, "html": write_page, "png": found.pareto})
