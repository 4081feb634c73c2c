"""`python -m memopt fits`: whether a training step fits into a device's memory."""

from __future__ import annotations

import argparse
from functools import partial

from memopt._fits.api import fits
from memopt.command.anatomy import (
    Output,
    add_files,
    add_step_arguments,
    add_what_if,
    checkpoint_of,
    job_of,
    place_of,
    step_options,
    write_fields,
)

DOES_NOT_FIT = 1


def add_fits_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add_step_arguments(parser)
    add_what_if(parser)
    parser.add_argument("--memory", required=True, help="of one device: 80GB, 24GiB, or bytes")
    parser.add_argument("--ranks", type=int, default=1, help="devices that train together")
    parser.add_argument("--parallel", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument(
        "--weight-bits", type=int, choices=(4, 8), help="frozen linear weights are stored so"
    )
    parser.add_argument("--reserve", help="not the step's (default: 1GiB on CUDA, else none)")
    add_files(parser, "json")


def fits_output(args: argparse.Namespace) -> Output:
    """The report, with status 1 where it does not fit."""
    job = job_of(args)
    found = fits(
        job.model,
        job.batch,
        args.memory,
        recipes=args.recipes,
        checkpoint=checkpoint_of(args.checkpoint),
        offload=place_of(args.offload),
        ranks=args.ranks,
        parallel=args.parallel,
        weight_bits=args.weight_bits,
        reserve=args.reserve,
        **step_options(args),
    )
    return Output(str(found), {"json": partial(write_fields, found)}, 0 if found else DOES_NOT_FIT)
