"""The command line: python -m memopt {anatomy,bench,demo,env,plan}."""

from __future__ import annotations

import argparse
import platform
import sys

import memopt
from memopt import bench, demo
from memopt.command import anatomy, plan


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
    demo.add_arguments(
        commands.add_parser(
            "demo", help="train a small GPT in seven modes and compare memory and speed"
        )
    )
    anatomy.add_arguments(
        commands.add_parser("anatomy", help="where the memory of a training step is, predicted")
    )
    plan.add_arguments(
        commands.add_parser("plan", help="a fate for each block of a model, within a budget")
    )
    bench.add_arguments(
        commands.add_parser("bench", help="all benchmarks, or with --report what they are shown as")
    )
    args = parser.parse_args(arguments)
    runs = {
        "env": lambda _: print_environment(),
        "demo": demo.run,
        "anatomy": anatomy.run,
        "plan": plan.run,
        "bench": bench.run,
    }
    return runs[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
