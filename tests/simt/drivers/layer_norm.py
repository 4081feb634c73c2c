"""layer_norm and layer_norm_gelu."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tests.simt.device import Device
from tests.support.cases import Call, Results
from tests.support.cases.layer_norm import NormCase
from tests.support.cases.op import Saved
from tests.support.tolerances import sums_dtype

from .run import DTYPES, Int, Run

TENSORS = ("x", "y", "dy", "dx", "gamma", "beta", "dgamma", "dbeta", "partials")

# No activation, memopt::kernels::GeluKind.
ACTIVATIONS = {None: Int(-1), "none": Int(0), "tanh": Int(1)}


def forward(run: Run, case: NormCase, call: Call, statistics: bool) -> tuple[Results, Saved]:
    x, gamma, beta = _inputs(run, call)
    y = run.empty("y", x.shape, x.dtype)
    rows, cols = x.shape
    mean, rstd = (
        run.memory.empty(rows, dtype=sums_dtype(x.dtype)) if statistics else None for _ in range(2)
    )
    run.call(
        "simt_layer_norm_forward",
        *(x, gamma, beta, y, mean, rstd),
        *(rows, cols, cols + run.layout.row_gap),
        *(call.eps, x.dtype, _parameter_dtype(call), ACTIVATIONS[case.approximate]),
    )
    return Results(output=y), {"mean": mean, "rstd": rstd} if statistics else {}


def backward(
    run: Run,
    case: NormCase,
    call: Call,
    saved: Saved,
    output_mask: tuple[bool, ...] | None,
    recompute_output: bool,
    in_place: bool,
) -> Results:
    if output_mask is None:
        output_mask = (True, call.weight is not None, call.bias is not None)
    x, gamma, beta = _inputs(run, call)
    dy_row_gap = 0 if in_place else run.layout.row_gap
    dy = run.put("dy", call.grad_output, row_gap=dy_row_gap, writable=in_place)
    dx = dy if in_place else run.empty("dx", x.shape, x.dtype) if output_mask[0] else None
    y = run.empty("y", x.shape, x.dtype) if recompute_output else None
    mean, rstd = (run.memory.put(saved[name].flatten()) for name in ("mean", "rstd"))
    rows, cols = x.shape
    parts = backward_parts(run.device, rows, cols, x.dtype)
    dgamma, dbeta = (
        run.empty(name, (cols,), _parameter_dtype(call)) if wanted else None
        for name, wanted in zip(("dgamma", "dbeta"), output_mask[1:], strict=True)
    )
    partials = None
    if dgamma is not None or dbeta is not None:
        partials = run.empty("partials", (parts * 2 * cols,), sums_dtype(x.dtype))
    run.call(
        "simt_layer_norm_backward",
        *(dy, x, gamma, beta, mean, rstd, dx, y, dgamma, dbeta, partials),
        *(parts, rows, cols, cols + dy_row_gap, cols + run.layout.row_gap),
        *(x.dtype, _parameter_dtype(call), ACTIVATIONS[case.approximate]),
    )
    return Results(output=y, grad_input=dx, grad_weight=dgamma, grad_bias=dbeta)


def backward_parts(device: Device, rows: int, cols: int, dtype: torch.dtype) -> int:
    """How many parts the weight gradients of this shape are summed in."""
    parts = ctypes.c_int64()
    device.call(
        "simt_layer_norm_backward_parts",
        *map(ctypes.c_int64, (rows, cols)),
        ctypes.c_int(DTYPES[dtype]),
        ctypes.byref(parts),
    )
    return parts.value


def _inputs(run: Run, call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return (
        run.put("x", call.input, row_gap=run.layout.row_gap),
        run.put("gamma", call.weight),
        run.put("beta", call.bias),
    )


def _parameter_dtype(call: Call) -> torch.dtype:
    given = call.weight if call.weight is not None else call.bias
    return call.input.dtype if given is None else given.dtype
