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
    """The inputs of one op, by name; the parent process draws the same ones.

    Each size and each kind of numbers with two dtypes, other ones for the next op: all ops of a
    family together meet every pair.
    """
    named = {}
    kinds = [*((5, cols) for cols in COLS), *STATISTICS]
    for place, kind in enumerate(kinds, OP_CASES.index(case)):
        for dtypes in (DTYPES[place % len(DTYPES)], DTYPES[(place + 3) % len(DTYPES)]):
            if isinstance(kind, str):
                values = STATISTICS[kind](5, 130)
                named[f"{dtypes} {kind}"] = case.make_call((5, 130), dtypes, CPU, values=values)
            else:
                named[f"{dtypes} {kind[1]} columns"] = case.make_call(kind, dtypes, CPU)
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
