"""`python -m memopt snapshot`: a report on a memory snapshot of PyTorch's."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from memopt._snapshot.read import read_snapshot
from memopt.command.anatomy import Output, add_files, write_fields


def add_snapshot_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("file", type=Path, help="what torch.cuda.memory._dump_snapshot wrote")
    parser.add_argument("--device", type=int, default=0, help="its number (default: 0)")
    add_files(parser, "json")


def snapshot_output(args: argparse.Namespace) -> Output:
    """The report."""
    found = read_snapshot(args.file, args.device)
    return Output(str(found), {"json": partial(write_fields, found)})
