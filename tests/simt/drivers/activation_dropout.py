"""activation_dropout. Forward's state is the one that the table's calls draw."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.cases import Call, Results
from tests.support.cases.dropout import ActivationDropoutCase, drawn_state
from tests.support.cases.op import Saved

from . import activation
from .run import Run, activation_spec

TENSORS = ("x", "y", "dy", "dx")


def forward(
    run: Run, case: ActivationDropoutCase, call: Call, statistics: bool
) -> tuple[Results, Saved]:
    seed, offset = drawn_state("cpu").tolist()
    state = run.memory.empty(2, dtype=torch.int64) if statistics else None
    output = _forward(run, case, call, run.rule(call.p, seed=seed, offset=offset), state)
    return Results(output=output), {} if state is None else {"rng_state": state}


def forward_with_state(
    run: Run, case: ActivationDropoutCase, call: Call, rng_state: Tensor
) -> Tensor:
    """With the numbers of a state that is in device memory already."""
    return _forward(run, case, call, run.rule(call.p, run.memory.put(rng_state)), None)


def _forward(
    run: Run,
    case: ActivationDropoutCase,
    call: Call,
    rule: object,
    state: Tensor | None,
) -> Tensor:
    x = run.put("x", call.input)
    y = run.empty("y", x.shape, x.dtype)
    run.launch(
        "activation_forward",
        x=x,
        y=y,
        size=x.numel(),
        dtype=x.dtype,
        activation=activation_spec(case.activation),
        drops=True,
        rule=rule,
        state=state,
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
    rule = run.rule(call.p, run.memory.put(saved["rng_state"]))
    return activation.backward(
        *(run, case, call, saved, output_mask, recompute_output, in_place), drops=True, rule=rule
    )
