"""memopt's kernels on CPU tensors, by way of the interpreter.

`forward` and `backward` take and give what the dispatcher ops behind tests/support/cases.py do, so
that one oracle serves both; `Layout` says how the tensors lie in device memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tests.support.cases import Call, OpCase, Results, Statistics
from tests.support.tolerances import sums_dtype

from .device import ORDERS, Device
from .memory import Memory, bits

T = TypeVar("T", bound=Sequence[Tensor | None])

# Any number that a launcher cannot know: each launch has to carry it.
STREAM = 0x5157

# memopt::kernels::ScalarType, GeluKind
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
_ACTIVATIONS = {None: -1, "none": 0, "tanh": 1}


@dataclass(frozen=True)
class Layout:
    """How tensors lie in memory."""

    offset: int = 0
    """Elements by which they are off their alignment."""

    only: str | None = None
    """The one tensor that the offset is for, by its name in the Params structs; None: all."""

    row_gap: int = 0
    """Unused elements between the rows of input and grad_output; outputs are contiguous."""

    def offset_of(self, name: str) -> int:
        return self.offset if self.only in (None, name) else 0


DENSE = Layout()


def forward(
    device: Device,
    case: OpCase,
    call: Call,
    *,
    layout: Layout = DENSE,
    statistics: bool = True,
) -> tuple[Tensor, Statistics]:
    """Output, mean and rstd. Without `statistics` the kernel is not given a place for them."""
    memory = Memory(device)
    x = memory.put(call.input, layout.offset_of("x"), layout.row_gap)
    y = memory.empty(*x.shape, dtype=x.dtype, offset=layout.offset_of("y"))
    if not case.normalizes:
        arguments = (*_pointers(x, y), *_int64(x.numel()), *_gelu(case, x), _STREAM)
        _run(device, memory, "simt_gelu_forward", arguments)
        return y, Statistics(None, None)
    gamma, beta = _parameters(memory, call, layout)
    rows, cols = x.shape
    mean, rstd = (_empty_statistics(memory, x) if statistics else None for _ in range(2))
    arguments = (
        *_pointers(x, gamma, beta, y, mean, rstd),
        *_int64(rows, cols, cols + layout.row_gap),
        ctypes.c_double(call.eps),
        *_norm(case, call),
        _STREAM,
    )
    _run(device, memory, "simt_layer_norm_forward", arguments)
    return y, Statistics(mean, rstd)


def backward(
    device: Device,
    case: OpCase,
    call: Call,
    statistics: Statistics,
    output_mask: tuple[bool, bool, bool] | None = None,
    recompute_output: bool = False,
    *,
    in_place: bool = False,
    layout: Layout = DENSE,
) -> Results:
    """Gradients as `output_mask` asks, all by default, and with `recompute_output` the output.

    in_place: the gradient of the input is written over the one of the output.
    """
    if output_mask is None:
        output_mask = (True, call.weight is not None, call.bias is not None)
    memory = Memory(device)
    x = memory.put(call.input, layout.offset_of("x"), layout.row_gap)
    dy_row_gap = 0 if in_place else layout.row_gap
    dy = memory.put(call.grad_output, layout.offset_of("dy"), dy_row_gap, writable=in_place)

    def result(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return memory.empty(*shape, dtype=dtype, offset=layout.offset_of(name))

    dx = dy if in_place else result("dx", x.shape, x.dtype) if output_mask[0] else None
    y = result("y", x.shape, x.dtype) if recompute_output else None
    if not case.normalizes:
        arguments = (*_pointers(dy, x, dx, y), *_int64(x.numel()), *_gelu(case, x), _STREAM)
        _run(device, memory, "simt_gelu_backward", arguments)
        return Results(y, dx, None, None)

    gamma, beta = _parameters(memory, call, layout)
    mean, rstd = (None if s is None else memory.put(s.flatten()) for s in statistics)
    rows, cols = x.shape
    parts = backward_parts(device, rows, cols, x.dtype)
    dgamma, dbeta = (
        result(name, (cols,), _parameter_dtype(call)) if wanted else None
        for name, wanted in zip(("dgamma", "dbeta"), output_mask[1:], strict=True)
    )
    partials = None
    if dgamma is not None or dbeta is not None:
        partials = result("partials", (parts * 2 * cols,), sums_dtype(x.dtype))
    arguments = (
        *_pointers(dy, x, gamma, beta, mean, rstd, dx, y, dgamma, dbeta, partials),
        *_int64(parts, rows, cols, dy.stride(0) if rows else cols, cols + layout.row_gap),
        *_norm(case, call),
        _STREAM,
    )
    _run(device, memory, "simt_layer_norm_backward", arguments)
    return Results(y, dx, dgamma, dbeta)


def backward_parts(device: Device, rows: int, cols: int, dtype: torch.dtype) -> int:
    """How many parts the weight gradients of this shape are summed in."""
    parts = ctypes.c_int64()
    device.call(
        "simt_layer_norm_backward_parts",
        *_int64(rows, cols),
        ctypes.c_int(_DTYPES[dtype]),
        ctypes.byref(parts),
    )
    return parts.value


def in_every_order(device: Device, run: Callable[[], T]) -> T:
    """The results of `run`, which must have the same bits in every order of threads and blocks."""
    device.set_order(ORDERS[0])
    first = run()
    for order in ORDERS[1:]:
        device.set_order(order)
        assert_same_bits(run(), first, f"order {order} against {ORDERS[0]}")
    device.set_order(ORDERS[0])
    return first


def assert_same_bits(
    actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str
) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (e is None), f"{what}: result {i} is missing or unexpected"
        if a is not None and e is not None:
            assert torch.equal(bits(a), bits(e)), f"{what}: result {i} has other bits"


_STREAM = ctypes.c_void_p(STREAM)


def _run(device: Device, memory: Memory, function: str, arguments: Sequence[object]) -> None:
    with memory.guarded():
        device.call(function, *arguments)


def _parameters(memory: Memory, call: Call, layout: Layout) -> list[Tensor | None]:
    return [
        None if parameter is None else memory.put(parameter, layout.offset_of(name))
        for name, parameter in (("gamma", call.weight), ("beta", call.bias))
    ]


def _parameter_dtype(call: Call) -> torch.dtype:
    given = call.weight if call.weight is not None else call.bias
    return call.input.dtype if given is None else given.dtype


def _empty_statistics(memory: Memory, x: Tensor) -> Tensor:
    return memory.empty(x.shape[0], dtype=sums_dtype(x.dtype))


def _pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]


def _int64(*values: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(value) for value in values]


def _gelu(case: OpCase, x: Tensor) -> list[ctypes.c_int]:
    return [ctypes.c_int(_DTYPES[x.dtype]), ctypes.c_int(_ACTIVATIONS[case.approximate])]


def _norm(case: OpCase, call: Call) -> list[ctypes.c_int]:
    codes = (
        _DTYPES[call.input.dtype],
        _DTYPES[_parameter_dtype(call)],
        _ACTIVATIONS[case.approximate],
    )
    return [ctypes.c_int(code) for code in codes]
