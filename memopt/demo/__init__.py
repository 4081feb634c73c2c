"""`python -m memopt demo`: trains a small GPT in seven modes and shows what each costs.

torch, rich and matplotlib are imported when the demo runs, not when its arguments are declared.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from memopt._errors import USAGE_ERROR

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the demo's options."""
    parser.add_argument(
        "--steps",
        type=int,
        help="training steps per mode (default: 60, about a minute; on a GPU 80)",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where it can be used)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type of the activations, by autocast (default: float32, on a GPU bfloat16)",
    )
    parser.add_argument("--modes", help="comma-separated subset of the modes (default: all seven)")
    parser.add_argument("--text", type=Path, help="file to learn (default: Python's documentation)")
    parser.add_argument(
        "--vocab",
        type=int,
        default=256,
        help="tokens that the model knows (default: 256, the bytes): with those of a language "
        "model, 50257 say, logits and loss are the peak",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights and batches (default: 0)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("memopt-demo"),
        help="folder for demo.json and demo.png (default: memopt-demo)",
    )


def demo_command(args: argparse.Namespace) -> int:
    """Runs the demo. Returns 0, 2 for arguments that cannot be run, 130 after Ctrl-C."""
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        return _usage_error(
            f'needs {" and ".join(missing)}, memopt\'s extra "demo"; run: pip install '
            + " ".join(missing)
        )
    # The profiler behind the count of memory logs two lines for every use, unless this is set
    # before its first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from memopt._errors import UsageError
    from memopt.demo.job import run_demo

    try:
        return INTERRUPTED if run_demo(args) else 0
    except UsageError as error:
        return _usage_error(str(error))
    except KeyboardInterrupt:  # before training, or while the report is written
        print("memopt demo: interrupted", file=sys.stderr)
        return INTERRUPTED


def _usage_error(message: str) -> int:
    print(f"memopt demo: {message}", file=sys.stderr)
    return USAGE_ERROR
