"""The exact results of a call, in float64, and how large an error its arithmetic must be granted.

`exact_results` computes in float64 on the CPU with PyTorch's own ops and autograd, on the inputs as
they were rounded to the dtype under test. The magnitudes of a case are the error analysis that
tolerances.py explains: for each element of each result, the size of what is rounded on the way to
it, times how much the result moves with that.
"""

from __future__ import annotations

import torch

from .cases import Call, OpCase, Results, evaluate
from .tolerances import (
    SHORT_ACTIVATION,
    allowance,
    is_short_in_bfloat16,
    largest_error,
    roundoff,
    sums_dtype,
    worst_error,
)


def _wide(call: Call) -> Call:
    """On the CPU, in float64 where a tensor is of floating point."""
    wide = call.map(lambda t: t.detach().cpu())
    return wide.map(lambda t: t.double() if t.is_floating_point() else t)


def exact_results(case: OpCase, call: Call) -> Results:
    """Outputs and gradients in float64 on the CPU."""
    return evaluate(case.exact, _wide(call))


def magnitudes(case: OpCase, call: Call) -> Results:
    """The first-order error of each result, elementwise, in roundings of the type of the sums."""
    return case.magnitudes(_wide(call))


def allowances(case: OpCase, call: Call, exact: Results) -> Results:
    """The error that each result of the call may have, elementwise."""
    magnitude = magnitudes(case, call)
    dtypes = case.result_dtypes(call)
    sums = sums_dtype(call.first.dtype)
    allowed = Results(dict.fromkeys(exact))
    for name, value in exact.items():
        if value is not None:
            roundings = case.roundings(name)
            dtype = dtypes[name]
            allowed[name] = allowance(value, magnitude[name], roundings, dtype, sums)
            if dtype == torch.bfloat16 and is_short_in_bfloat16(str(case)):
                allowed[name] += SHORT_ACTIVATION * roundoff(dtype) * value.abs()
    return allowed


def worst_errors(actual: Results, exact: Results, allowed: Results) -> dict[str, float]:
    """worst_error of each result that the call has."""
    return {
        name: worst_error(actual[name], value, allowed[name])
        for name, value in exact.items()
        if value is not None
    }


def assert_accurate(case: OpCase, call: Call) -> None:
    """Forward and all gradients are right to within the allowance, or at least as right as
    PyTorch's.
    """
    assert_results_accurate(case, call, evaluate(case.memopt, call))


def assert_results_accurate(case: OpCase, call: Call, actual: Results) -> None:
    """The same of results that are there already."""
    exact = exact_results(case, call)
    dtypes = case.result_dtypes(call)
    assert list(actual) == list(exact)
    for name, reference in exact.items():
        value = actual[name]
        assert (value is None) == (reference is None), name
        assert value is None or value.dtype == dtypes[name], name
        assert value is None or value.shape == reference.shape, name
    allowed = allowances(case, call, exact)
    limit = largest_error(call.first.dtype)
    ours = worst_errors(actual, exact, allowed)
    if all(error <= limit for error in ours.values()):
        return
    torchs = worst_errors(evaluate(case.torch, call), exact, allowed)
    for name, error in ours.items():
        assert error <= max(limit, torchs[name]), (
            f"{case} on {call}: the error of {name} is {error:.3g} times the allowance, "
            f"PyTorch's is {torchs[name]:.3g}"
        )
