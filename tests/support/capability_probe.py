"""Runs every op once on fixed CPU inputs and saves the results, for test_cpu_capability.py: in
processes of their own, because memopt reads MEMOPT_CPU_CAPABILITY once per process.
"""

from __future__ import annotations

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


def save_results(folder: str) -> None:
    """In a file with the name of the instruction set."""
    results = {
        f"{case} {name}": dict(evaluate(case.memopt, call))
        for case in OP_CASES
        for name, call in calls(case).items()
    }
    capability = memopt.build_info()["cpu_capability"]
    torch.save({"capability": capability, "results": results}, f"{folder}/{capability}.pt")
