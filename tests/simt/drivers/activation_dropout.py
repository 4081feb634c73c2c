"""activation_dropout. Forward's state is the one that the table's calls draw."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.cases import Call, Results
from tests.support.cases.dropout import ActivationDropoutCase, drawn_state
from tests.support.cases.op import Saved

from .activation import ACTIVATIONS
from .run import Run

TENSORS = ("x", "y", "dy", "dx")


def forward(
    run: Run, case: ActivationDropoutCase, call: Call, statistics: bool
) -> tuple[Results, Saved]:
    seed, offset = drawn_state("cpu").tolist()
    state = run.memory.empty(2, dtype=torch.int64) if statistics else None
    output = _forward(run, case, call, None, state, seed, offset)
    return Results(output=output), {} if state is None else {"rng_state": state}


def forward_with_state(
    run: Run, case: ActivationDropoutCase, call: Call, rng_state: Tensor
) -> Tensor:
    """With the numbers of a state that is in device memory already."""
    return _forward(run, case, call, run.memory.put(rng_state), None, 1, 4)


def _forward(
    run: Run,
    case: ActivationDropoutCase,
    call: Call,
    given: Tensor | None,
    state: Tensor | None,
    seed: int,
    offset: int,
) -> Tensor:
    x = run.put("x", call.input)
    y = run.empty("y", x.shape, x.dtype)
    run.call(
        "simt_activation_dropout_forward",
        *(x, y, given, state, seed, offset, call.p),
        *(x.numel(), x.dtype, ACTIVATIONS[case.activation]),
    )
    return y


def backward(
    run: Run,
    case: ActivationDropoutCase,
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
    run.call(
        "simt_activation_dropout_backward",
        *(dy, x, dx, y, run.memory.put(saved["rng_state"]), call.p),
        *(x.numel(), x.dtype, ACTIVATIONS[case.activation]),
    )
    return Results(output=y, grad_input=dx)
