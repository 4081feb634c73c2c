"""An op's benchmark: PyTorch's form and memopt's, of the same tensors.

From that follow the variants of each direction. Forward and backward alone may have variants of
their own, for ops below autograd, so that no graph is timed; where there are none, forward is the
functions' and backward is autograd's run of a graph that is kept. forward+backward goes through the
public functions and autograd, as training does.

The tests know more of an op (tests/support/cases), but what they call it by costs a microsecond for
each tensor, their tensors are drawn on the CPU, and their form of dropout is an oracle's: none of
that may be timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Variant
from benchmarks.inputs import random_matrix

Function = Callable[..., Any]
"""A function of activations and parameters, which returns a tensor or several."""

Elements = Callable[[int, int], tuple[int, int]]
"""Takes rows and columns; the elements that forward and backward read and write at the least."""

AGAIN = "memopt+y"
"""The backward that also writes the op's output again, which so has more bytes to write."""


def moved(forward: int, backward: int) -> Elements:
    """Counts so many matrices of rows x cols; parameters are negligible."""
    return lambda rows, cols: (forward * rows * cols, backward * rows * cols)


def no_parameters(cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return ()


@dataclass(frozen=True)
class Op:
    """One op with its choices fixed."""

    eager: Function
    ours: Function
    elements: Elements
    statistics: int = 0
    """The float32 that forward writes for each row, and backward reads."""
    widths: tuple[int, ...] = (1,)
    """The activations' widths, in `cols`."""
    outputs: tuple[int, ...] = (1,)
    """The outputs' widths."""
    parameters: Callable[[int, torch.dtype, str], tuple[Tensor, ...]] = no_parameters
    """Made for cols, dtype and device; they require grad."""
    with_graph: bool = False
    """Whether forward alone records its graph: for ops that compute otherwise without one."""
    forward: Callable[..., Sequence[Variant]] = lambda *inputs: ()
    """A function of the inputs: variants of forward alone."""
    backward: Callable[..., Sequence[Variant]] = lambda grad, *inputs: ()
    """A function of the output's gradient and the inputs: variants of backward alone."""
    others: Mapping[str, Function] = field(default_factory=dict)
    """Further variants of forward+backward."""
    peers: Callable[[Sequence[str]], Mapping[str, Function]] = lambda names: {}
    """Other libraries' forms, of those that are named."""
    peers_write: bool = False
    """Whether they write over the inputs, and so need their own."""


def build(
    op: Op,
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: Sequence[str],
) -> list[Variant]:
    """The variants, PyTorch's first. Activations and gradients are standard normal."""

    def matrices(widths: Sequence[int], seeds: Sequence[int]) -> list[Tensor]:
        sizes = zip(widths, seeds, strict=False)
        return [random_matrix(rows, width * cols, dtype, device, seed) for width, seed in sizes]

    parameters = op.parameters(cols, dtype, device)
    leaves = (*(x.requires_grad_() for x in matrices(op.widths, (0, 3))), *parameters)
    plain = tuple(leaf.detach() for leaf in leaves)
    functions = {"aten": op.eager, "memopt": op.ours}
    if direction == "forward":
        inputs = leaves if op.with_graph else plain
        return filled(op.forward(*plain), functions, lambda run: lambda: run(*inputs))
    grads = matrices(op.outputs, (1, 4))
    if direction == "backward":

        def of_graph(function: Function) -> Callable[[], object]:
            outputs = function(*leaves)
            return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

        return filled(op.backward(grads[0], *plain), functions, of_graph)

    def training(name: str, function: Function, inputs: Sequence[Tensor], peer: bool) -> Variant:
        def forward() -> Any:
            return function(*inputs)

        def run() -> object:
            return torch.autograd.grad(forward(), inputs, grads)

        return Variant(name, run, forward, parameters, is_peer=peer)

    own = leaves
    found = op.peers(peer_names)
    if found and op.peers_write:
        own = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
    compiled = peers.compiled(peer_names, op.eager)
    return [
        *(training(name, f, leaves, False) for name, f in {**functions, **op.others}.items()),
        *(training(name, f, leaves, True) for name, f in compiled.items()),
        *(training(name, f, own, True) for name, f in found.items()),
    ]


def filled(
    variants: Sequence[Variant],
    functions: Mapping[str, Function],
    make: Callable[[Function], Callable[[], object]],
) -> list[Variant]:
    """The variants of one direction, with those of `functions` that are not among them."""
    given = {variant.name: variant for variant in variants}
    made = {name: Variant(name, make(f)) for name, f in functions.items() if name not in given}
    return [{**made, **given}[name] for name in dict.fromkeys((*functions, *given))]


def again(op: Callable[..., object], grad: Tensor, *rest: Any, **named: Any) -> list[Variant]:
    """A private backward op, without and with the output again, which is of the gradient's size."""
    return [
        Variant("memopt", lambda: op(grad, *rest, **named)),
        Variant(
            AGAIN,
            lambda: op(grad, *rest, **named, recompute_output=True),
            extra_bytes=grad.nbytes,
        ),
    ]


def ideal_bytes(op: Op, direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """The bytes that have to be read and written at the least."""
    alone = dict(zip(("forward", "backward"), op.elements(rows, cols), strict=True))
    elements = [alone[part] for part in direction.split("+")]
    return sum(elements) * dtype.itemsize + len(elements) * 4 * op.statistics * rows
