"""Activations."""

from __future__ import annotations

from tests.support.cases import Call, Results
from tests.support.cases.activation import ActivationCase
from tests.support.cases.op import Saved

from .run import Run, activation_spec

TENSORS = ("x", "y", "dy", "dx")


def forward(
    run: Run, case: ActivationCase, call: Call, statistics: bool, **dropout: object
) -> tuple[Results, Saved]:
    """dropout: Params' fields of that."""
    x = run.put("x", call.input)
    y = run.empty("y", x.shape, x.dtype)
    run.launch(
        "activation_forward",
        x=x,
        y=y,
        size=x.numel(),
        dtype=x.dtype,
        activation=activation_spec(case.activation),
        **dropout,
    )
    return Results(output=y), {}


def backward(
    run: Run,
    case: ActivationCase,
    call: Call,
    saved: Saved,
    output_mask: tuple[bool, ...] | None,
    recompute_output: bool,
    in_place: bool,
    **dropout: object,
) -> Results:
    """dropout: Params' fields of that."""
    x = run.put("x", call.input)
    dy = run.put("dy", call.grad_output, writable=in_place)
    dx = dy if in_place else run.empty("dx", x.shape, x.dtype)
    y = run.empty("y", x.shape, x.dtype) if recompute_output else None
    run.launch(
        "activation_backward",
        dy=dy,
        x=x,
        dx=dx,
        y=y,
        size=x.numel(),
        dtype=x.dtype,
        activation=activation_spec(case.activation),
        **dropout,
    )
    return Results(output=y, grad_input=dx)
