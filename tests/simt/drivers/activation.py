"""Activations."""

from __future__ import annotations

from tests.support.cases import Call, Results
from tests.support.cases.activation import ActivationCase
from tests.support.cases.op import Saved

from .run import Int, Run

TENSORS = ("x", "y", "dy", "dx")

# memopt::kernels::Activation
ACTIVATIONS = {
    name: Int(i)
    for i, name in enumerate(
        ("gelu", "gelu_tanh", "silu", "relu", "quick_gelu", "relu_squared", "sigmoid")
    )
}


def forward(run: Run, case: ActivationCase, call: Call, statistics: bool) -> tuple[Results, Saved]:
    x = run.put("x", call.input)
    y = run.empty("y", x.shape, x.dtype)
    activation = ACTIVATIONS[case.activation]
    run.call("simt_activation_forward", x, y, x.numel(), x.dtype, activation)
    return Results(output=y), {}


def backward(
    run: Run,
    case: ActivationCase,
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
    activation = ACTIVATIONS[case.activation]
    run.call("simt_activation_backward", dy, x, dx, y, x.numel(), x.dtype, activation)
    return Results(output=y, grad_input=dx)
