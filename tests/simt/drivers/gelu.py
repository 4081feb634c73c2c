"""gelu."""

from __future__ import annotations

from tests.support.cases import Call, Results
from tests.support.cases.gelu import GeluCase
from tests.support.cases.op import Saved

from .run import Int, Run

TENSORS = ("x", "y", "dy", "dx")

# memopt::kernels::GeluKind
KINDS = {"none": Int(0), "tanh": Int(1)}


def forward(run: Run, case: GeluCase, call: Call, statistics: bool) -> tuple[Results, Saved]:
    x = run.put("x", call.input)
    y = run.empty("y", x.shape, x.dtype)
    run.call("simt_gelu_forward", x, y, x.numel(), x.dtype, KINDS[case.approximate])
    return Results(output=y), {}


def backward(
    run: Run,
    case: GeluCase,
    call: Call,
    saved: Saved,
    output_mask: tuple[bool, ...] | None,
    recompute_output: bool,
    in_place: bool,
) -> Results:
    x = run.put("x", call.input)
    dy = run.put("dy", call.grad_output, writable=in_place)
    dx = dy if in_place else run.empty("dx", x.shape, x.dtype)
    y = run.empty("y", x.shape, x.dtype) if recompute_output else None
    kind = KINDS[case.approximate]
    run.call("simt_gelu_backward", dy, x, dx, y, x.numel(), x.dtype, kind)
    return Results(output=y, grad_input=dx)
