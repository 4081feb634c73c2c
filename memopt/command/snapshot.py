"""`python -m memopt snapshot`: a report on a memory snapshot of PyTorch's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memopt._errors import USAGE_ERROR
from memopt._snapshot.read import read_snapshot
from memopt.command.anatomy import add_files, write_fields


def add_snapshot_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("file", type=Path, help="what torch.cuda.memory._dump_snapshot wrote")
    parser.add_argument("--device", type=int, default=0, help="its number (default: 0)")
    add_files(parser, "json")


def snapshot_command(args: argparse.Namespace) -> int:
    """Runs the command. Returns 0, or 2 for a file that is no snapshot."""
    try:
        found = read_snapshot(args.file, args.device)
        if args.json is not None:
            write_fields(found, args.json)
    except (ValueError, OSError) as error:
        text = str(error).removeprefix("anatomy.read_snapshot: ")
        print(f"memopt snapshot: {text}", file=sys.stderr)
        return USAGE_ERROR
    print(found)
    return 0
