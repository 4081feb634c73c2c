"""`python -m memopt check`: whether what was asked of a model's blocks takes effect."""

from __future__ import annotations

import argparse

from memopt._check.api import check
from memopt.command.anatomy import (
    DTYPES,
    Output,
    add_files,
    add_measure,
    add_model_arguments,
    job_of,
)

WITHOUT_EFFECT = 1


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add_model_arguments(parser)
    add_measure(parser)
    add_files(parser, "json")


def check_output(args: argparse.Namespace) -> Output:
    """The report, with status 1 if something has no effect."""
    job = job_of(args)
    autocast = None if args.autocast is None else DTYPES[args.autocast]
    found = check(job.model, job.batch, autocast=autocast)
    return Output(str(found), {"json": found.to_json}, 0 if found.ok else WITHOUT_EFFECT)
