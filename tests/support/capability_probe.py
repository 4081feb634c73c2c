"""Runs every op once on fixed CPU inputs and saves the results, for test_cpu_capability.py: in
processes of their own, because memopt reads MEMOPT_CPU_CAPABILITY once per process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import memopt

from .cases import VALUE_CASES, Call, OpCase, evaluate
from .losses import classes_of, head, ours, with_gradients
from .shapes import COLS, DTYPES, STATISTICS

CPU = torch.device("cpu")


def calls(case: OpCase) -> dict[str, Call]:
    """The inputs of one op, by name; the parent process draws the same ones.

    Each size and each kind of numbers with two dtypes, other ones for the next op: all ops of a
    family together meet every pair.
    """
    named = {}
    kinds = [*((5, cols) for cols in COLS), *STATISTICS]
    for place, kind in enumerate(kinds, VALUE_CASES.index(case)):
        for dtypes in (DTYPES[place % len(DTYPES)], DTYPES[(place + 3) % len(DTYPES)]):
            if isinstance(kind, str):
                values = STATISTICS[kind](5, 130)
                named[f"{dtypes} {kind}"] = case.make_call((5, 130), dtypes, CPU, values=values)
            else:
                named[f"{dtypes} {kind[1]} columns"] = case.make_call(kind, dtypes, CPU)
    return named


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {"reduction": "mean"},
    "rows": {"reduction": "none"},
    "smoothing": {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-2},
    "softcap": {"reduction": "mean", "softcap": 5.0, "logit_scale": 2.0},
}


LOSS_CHUNK = 2


def loss_calls() -> dict[str, tuple[dict[str, Tensor], Tensor, Tensor | None, dict[str, Any]]]:
    """Heads, targets, upstream gradients and settings of linear_cross_entropy, by name: each width
    with two dtypes, in chunks of 2 of 5 rows, which a bfloat16 weight's gradient is summed over.
    """
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    named = {}
    for place, cols in enumerate(COLS):
        for dtype in (dtypes[place % 4], dtypes[(place + 1) % 4]):
            for setting, given in LOSSES.items():
                upstream = torch.linspace(0.5, 1.5, 5, dtype=dtype) if setting == "rows" else None
                call = (head(5, 8, cols, dtype), classes_of(5, cols, ignored=4), upstream, given)
                named[f"{dtype} {cols} words, {setting}"] = call
    return named


def loss_results() -> dict[str, list[Tensor]]:
    return {
        name: with_gradients(
            lambda t=tensors, y=target, s=settings: ours(t, y, chunk=LOSS_CHUNK, **s),
            list(tensors.values()),
            upstream,
        )
        for name, (tensors, target, upstream, settings) in loss_calls().items()
    }


def save_results(folder: str) -> None:
    """In a file with the name of the instruction set."""
    results = {
        f"{case} {name}": dict(evaluate(case.memopt, call))
        for case in VALUE_CASES
        for name, call in calls(case).items()
    }
    capability = memopt.build_info()["cpu_capability"]
    saved = {"capability": capability, "results": results, "losses": loss_results()}
    torch.save(saved, f"{folder}/{capability}.pt")
