"""memopt's kernels on CPU tensors, by way of the interpreter.

`forward` and `backward` take and give what the cases of tests/support/cases do for the dispatcher
ops, so that one oracle serves both; `Layout` says how the tensors lie in device memory. How a
family's launchers are called is in drivers/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from tests.support.bits import assert_same_bits
from tests.support.cases import Call, OpCase, Results
from tests.support.cases.op import Saved

from .device import ORDERS, Device
from .drivers import DRIVERS
from .drivers.run import DENSE, STREAM, Layout, Run

__all__ = [
    "DENSE",
    "STREAM",
    "Layout",
    "backward",
    "forward",
    "in_every_order",
    "tensor_names",
]

Tensors = Mapping[str, "Tensor | None"] | Sequence["Tensor | None"]
T = TypeVar("T", bound=Tensors)


def forward(
    device: Device,
    case: OpCase,
    call: Call,
    *,
    layout: Layout = DENSE,
    statistics: bool = True,
) -> tuple[Results, Saved]:
    """Outputs, and what backward needs. Without `statistics` the kernel is not given a place for
    that.
    """
    return DRIVERS[case.family].forward(Run(device, layout), case, call, statistics)


def backward(
    device: Device,
    case: OpCase,
    call: Call,
    saved: Saved,
    output_mask: tuple[bool, ...] | None = None,
    recompute_output: bool = False,
    *,
    in_place: bool = False,
    layout: Layout = DENSE,
) -> Results:
    """Gradients as `output_mask` asks, all by default, and with `recompute_output` the output.

    in_place: the gradient of the input is written over the one of the output.
    """
    return DRIVERS[case.family].backward(
        Run(device, layout), case, call, saved, output_mask, recompute_output, in_place
    )


def tensor_names(case: OpCase) -> tuple[str, ...]:
    """The tensors in the family's Params that a layout's `only` may name."""
    return DRIVERS[case.family].TENSORS


def in_every_order(device: Device, run: Callable[[], T]) -> T:
    """The results of `run`, which must have the same bits in every order of threads and blocks."""
    device.set_order(ORDERS[0])
    first = run()
    for order in ORDERS[1:]:
        device.set_order(order)
        assert_same_bits(run(), first, f"order {order} against {ORDERS[0]}")
    device.set_order(ORDERS[0])
    return first
