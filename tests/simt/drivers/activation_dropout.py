"""activation_dropout. Forward's state is the one that the table's calls draw."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.cases import Call, Results
from tests.support.cases.dropout import ActivationDropoutCase, drawn_state
from tests.support.cases.op import Saved

from . import activation
from .run import Run

TENSORS = ("x", "y", "dy", "dx")


def forward(
    run: Run, case: ActivationDropoutCase, call: Call, statistics: bool
) -> tuple[Results, Saved]:
    seed, offset = drawn_state("cpu").tolist()
    state = run.memory.empty(2, dtype=torch.int64) if statistics else None
    rule = run.rule(call.p, seed=seed, offset=offset)
    results, _ = activation.forward(run, case, call, statistics, drops=True, rule=rule, state=state)
    return results, {} if state is None else {"rng_state": state}


def forward_with_state(
    run: Run, case: ActivationDropoutCase, call: Call, rng_state: Tensor
) -> Tensor:
    """With the numbers of a state that is in device memory already."""
    rule = run.rule(call.p, run.memory.put(rng_state))
    results, _ = activation.forward(run, case, call, False, drops=True, rule=rule, state=None)
    assert results.output is not None
    return results.output


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
