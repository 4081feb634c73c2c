"""Runs every op once on fixed CPU inputs and saves the results: `python -m
tests.support.capability_probe FILE`.

test_cpu_capability.py runs it in child processes, because memopt reads MEMOPT_CPU_CAPABILITY once
per process.
"""

from __future__ import annotations

import sys

import torch

import memopt

from .cases import OP_CASES, Call, OpCase, evaluate
from .shapes import COLS, DTYPES, STATISTICS

CPU = torch.device("cpu")


def calls(case: OpCase) -> dict[str, Call]:
    """The inputs of one op, by name; the parent process draws the same ones."""
    named = {}
    for dtypes in DTYPES:
        for cols in COLS:
            named[f"{dtypes} {cols} columns"] = case.make_call((5, cols), dtypes, CPU)
        for statistics, values in STATISTICS.items():
            named[f"{dtypes} {statistics}"] = case.make_call(
                (5, 130), dtypes, CPU, values=values(5, 130)
            )
    return named


def main() -> None:
    results = {
        f"{case} {name}": dict(evaluate(case.memopt, call))
        for case in OP_CASES
        for name, call in calls(case).items()
    }
    torch.save(
        {"capability": memopt.build_info()["cpu_capability"], "results": results}, sys.argv[1]
    )


if __name__ == "__main__":
    main()
