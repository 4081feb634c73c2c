"""rms_norm."""

from __future__ import annotations

from tests.support.cases import Call, Results
from tests.support.cases.op import Saved
from tests.support.cases.rms_norm import RmsNormCase

from . import add_norm
from .run import Run

TENSORS = ("x", "y", "dy", "dx", "gamma", "dgamma", "partials")


def forward(run: Run, case: RmsNormCase, call: Call, statistics: bool) -> tuple[Results, Saved]:
    results, saved = add_norm.forward(run, case, call, statistics)
    del results["sum"], saved["sum"]
    return results, saved


def backward(
    run: Run,
    case: RmsNormCase,
    call: Call,
    saved: Saved,
    output_mask: tuple[bool, ...] | None,
    recompute_output: bool,
    in_place: bool,
) -> Results:
    saved = {**saved, "sum": call.input}
    results = add_norm.backward(run, case, call, saved, output_mask, recompute_output, in_place)
    del results["grad_residual"]
    return results
