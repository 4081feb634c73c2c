"""The activations of EAGER against PyTorch's ops: forward, backward, and both. GELU:
benchmarks/gelu.py.

Backward alone calls the private op below autograd, against ATen's backward op where there is one;
forward+backward goes through the public functions and autograd. `memopt+y` is the backward that
also writes the op's output again.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import memopt
from benchmarks import peers, runner
from benchmarks.harness import Case, Variant
from benchmarks.inputs import random_matrix, through_autograd
from memopt.functional.activation import FORMULAS

GOALS = {"forward": 1.0, "backward": 1.0, "forward+backward": 1.0}

# Of the activations that take one, the scalar that they are timed with.
SCALARS: dict[str, float] = {"softcap": 30.0}

# What a model without memopt writes; GELU has a benchmark of its own.
EAGER: dict[str, Callable[[Tensor], Tensor]] = {
    name: functools.partial(formula, cap=SCALARS[name]) if name in SCALARS else formula
    for name, formula in FORMULAS.items()
    if not name.startswith("gelu")
}


def eager_backward(name: str, x: Tensor, grad: Tensor) -> Callable[[], object]:
    """The ops that autograd runs for EAGER[name]."""
    if name == "silu":
        return lambda: torch.ops.aten.silu_backward(grad, x)
    if name == "relu":
        return lambda: torch.ops.aten.threshold_backward(grad, x, 0)
    leaf = x.detach().requires_grad_()
    output = EAGER[name](leaf)
    return lambda: torch.autograd.grad(output, leaf, grad, retain_graph=True)


def build(
    name: str,
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    x = random_matrix(rows, cols, dtype, device, seed=0)
    named = {"activation": name, "activation_scalar": SCALARS.get(name)}
    eager, ours = EAGER[name], functools.partial(memopt.functional.activation, **named)
    if direction == "forward":
        return [Variant("aten", lambda: eager(x)), Variant("memopt", lambda: ours(x))]
    grad = random_matrix(rows, cols, dtype, device, seed=1)
    if direction == "backward":
        op = functools.partial(torch.ops.memopt._activation_backward, grad, x, **named)
        again = functools.partial(op, recompute_output=True)
        return [
            Variant("aten", eager_backward(name, x, grad)),
            Variant("memopt", op),
            Variant("memopt+y", again, extra_bytes=x.nbytes),
        ]
    compiled = peers.compiled(peer_names, eager)
    return through_autograd({"aten": eager, "memopt": ours}, compiled, x, (), grad)


def ideal_bytes(direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """x in, y out; dy and x in, dx out."""
    matrices = {"forward": 2, "backward": 3, "forward+backward": 5}[direction]
    return matrices * rows * cols * dtype.itemsize


def make_cases(args: argparse.Namespace) -> Iterator[Case]:
    for name in EAGER:
        yield from runner.all_cases(name, functools.partial(build, name), ideal_bytes, args)


if __name__ == "__main__":
    sys.exit(runner.main("activation", make_cases, GOALS))
