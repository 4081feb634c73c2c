"""swiglu and geglu (tanh) against PyTorch's two ops, of two tensors and of one that holds both:
forward, backward, and both.

`rows x cols` is the output. Backward alone calls the private ops below autograd against autograd's
run of the eager graph; `memopt+y` is the backward that also writes the op's output again.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
from benchmarks import peers, runner
from benchmarks.harness import Case, Variant
from benchmarks.inputs import random_matrix, through_autograd

GOALS = {"forward": 1.3, "backward": 1.3, "forward+backward": 1.3}

tanh_gelu = functools.partial(F.gelu, approximate="tanh")


def eager_halves(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def eager_interleaved(x: Tensor) -> Tensor:
    return F.silu(x[..., ::2]) * x[..., 1::2]


# The eager function and memopt's, of gate and up, or of one tensor for both.
APART: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "swiglu": (lambda gate, up: F.silu(gate) * up, memopt.functional.swiglu),
    "geglu": (
        lambda gate, up: tanh_gelu(gate) * up,
        functools.partial(memopt.functional.geglu, approximate="tanh"),
    ),
}
PACKED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "swiglu_halves": (eager_halves, memopt.functional.swiglu_packed),
    "swiglu_interleaved": (
        eager_interleaved,
        functools.partial(memopt.functional.swiglu_packed, interleaved=True),
    ),
}


def private_backward(name: str, tensors: tuple[Tensor, ...], grad: Tensor) -> Callable[..., object]:
    if name in PACKED:
        return functools.partial(
            torch.ops.memopt._gated_packed_backward,
            grad,
            *tensors,
            activation="silu",
            interleaved=name == "swiglu_interleaved",
        )
    return functools.partial(
        torch.ops.memopt._gated_backward,
        grad,
        *tensors,
        activation="silu" if name == "swiglu" else "gelu_tanh",
        output_mask=(True, True),
    )


def build(
    name: str,
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    eager, ours = {**APART, **PACKED}[name]
    if name in PACKED:
        tensors = (random_matrix(rows, 2 * cols, dtype, device, seed=0),)
    else:
        tensors = tuple(random_matrix(rows, cols, dtype, device, seed=seed) for seed in (0, 2))
    if direction == "forward":
        return [
            Variant("aten", lambda: eager(*tensors)),
            Variant("memopt", lambda: ours(*tensors)),
        ]
    grad = random_matrix(rows, cols, dtype, device, seed=1)
    leaves = tuple(t.requires_grad_() for t in tensors)
    if direction == "backward":
        output = eager(*leaves)
        op = private_backward(name, tuple(t.detach() for t in tensors), grad)
        again = functools.partial(op, recompute_output=True)
        return [
            Variant("aten", lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True)),
            Variant("memopt", op),
            Variant("memopt+y", again, extra_bytes=output.nbytes),
        ]
    compiled = peers.compiled(peer_names, eager)
    functions = {"aten": eager, "memopt": ours}
    variants = through_autograd(functions, compiled, leaves[0], leaves[1:], grad)
    if liger := peers.gated_units(peer_names, name):
        own = [t.detach().clone().requires_grad_() for t in leaves]
        variants += through_autograd({}, liger, own[0], own[1:], grad)
    return variants


def ideal_bytes(direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """gate and up in, y out; dy, gate and up in, their gradients out."""
    matrices = {"forward": 3, "backward": 5, "forward+backward": 8}[direction]
    return matrices * rows * cols * dtype.itemsize


def make_cases(args: argparse.Namespace) -> Iterator[Case]:
    for name in (*APART, *PACKED):
        yield from runner.all_cases(name, functools.partial(build, name), ideal_bytes, args)


if __name__ == "__main__":
    sys.exit(runner.main("gated", make_cases, GOALS))
