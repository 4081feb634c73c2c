"""The command line: python -m memopt {anatomy,bench,check,demo,env,fits,plan,snapshot}."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from functools import partial

import memopt
from memopt.bench import add_bench_arguments, bench_command
from memopt.command.anatomy import add_anatomy_arguments, anatomy_output, run_command
from memopt.command.check import add_check_arguments, check_output
from memopt.command.fits import add_fits_arguments, fits_output
from memopt.command.plan import add_plan_arguments, plan_output
from memopt.command.snapshot import add_snapshot_arguments, snapshot_output
from memopt.demo import add_demo_arguments, demo_command


def print_environment() -> int:
    """Prints what was built and what runs here, one fact a line, for a bug report."""
    for name, value in memopt.build_info().items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(f"{name:20}{shown}")
    print(f"{'python':20}{platform.python_version()}")
    print(f"{'platform':20}{platform.platform()}")
    print(f"{'gpu':20}{_gpu()}")
    return 0


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "None"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m memopt", description=memopt.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "env", help="versions, architectures and instruction sets, for a bug report"
    )
    add_demo_arguments(
        commands.add_parser(
            "demo", help="train a small GPT in seven modes and compare memory and speed"
        )
    )
    add_anatomy_arguments(
        commands.add_parser("anatomy", help="where the memory of a training step is, predicted")
    )
    add_plan_arguments(
        commands.add_parser("plan", help="a fate for each block of a model, within a budget")
    )
    add_fits_arguments(
        commands.add_parser("fits", help="whether a training step fits into a device's memory")
    )
    add_snapshot_arguments(
        commands.add_parser("snapshot", help="what a memory snapshot of PyTorch's holds")
    )
    add_check_arguments(
        commands.add_parser("check", help="whether what was asked of each block takes effect")
    )
    add_bench_arguments(
        commands.add_parser("bench", help="all benchmarks, or with --report what they are shown as")
    )
    args = parser.parse_args(arguments)
    runs: dict[str, Callable[[argparse.Namespace], int]] = {
        "env": lambda _: print_environment(),
        "demo": demo_command,
        "anatomy": partial(run_command, anatomy_output),
        "plan": partial(run_command, plan_output),
        "snapshot": partial(run_command, snapshot_output),
        "check": partial(run_command, check_output),
        "fits": partial(run_command, fits_output),
        "bench": bench_command,
    }
    return runs[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
