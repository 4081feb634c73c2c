"""One call of an op on the interpreter, and what its results are held against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.cases import Call, OpCase, Results, Statistics
from tests.support.oracle import (
    allowances,
    assert_results_accurate,
    exact_moments,
    exact_results,
    worst_errors,
)
from tests.support.tolerances import (
    BETWEEN_IMPLEMENTATIONS,
    STATISTICS_ROUNDINGS,
    largest_error,
    roundoff,
    worst_error,
)

from . import kernels
from .device import Device
from .kernels import DENSE, Layout


class Outcome(NamedTuple):
    """Forward, and backward with everything asked for."""

    output: Tensor
    mean: Tensor | None
    rstd: Tensor | None
    grad_input: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    reemitted: Tensor | None

    @property
    def results(self) -> Results:
        return Results(self.output, self.grad_input, self.grad_weight, self.grad_bias)


def run(device: Device, case: OpCase, call: Call, *, layout: Layout = DENSE) -> Outcome:
    """Forward and backward in the device's order of threads."""
    output, statistics = kernels.forward(device, case, call, layout=layout)
    results = kernels.backward(device, case, call, statistics, recompute_output=True, layout=layout)
    return Outcome(output, *statistics, *results[1:], results.output)


def run_in_every_order(
    device: Device, case: OpCase, call: Call, *, layout: Layout = DENSE
) -> Outcome:
    """The same in all orders, which must agree in every bit."""
    return kernels.in_every_order(device, lambda: run(device, case, call, layout=layout))


def assert_accurate(case: OpCase, call: Call, outcome: Outcome) -> None:
    """All results are right by the oracle's standards and agree with the CPU kernels'; the
    re-emitted output has forward's bits."""
    assert_results_accurate(case, call, outcome.results)
    assert_agrees_with_cpu(case, call, outcome.results)
    kernels.assert_same_bits([outcome.reemitted], [outcome.output], f"{case} on {call}: re-emitted")
    if case.normalizes:
        assert_statistics_accurate(call, outcome)


def assert_output_accurate(case: OpCase, call: Call, output: Tensor) -> None:
    """The same of forward alone."""
    exact = exact_results(case, call)
    allowed = allowances(case, call, exact).output
    assert exact.output is not None
    assert allowed is not None
    assert worst_error(output, exact.output, allowed) <= largest_error(output.dtype)


def assert_agrees_with_cpu(case: OpCase, call: Call, results: Results) -> None:
    """The dispatcher ops on the CPU give the same within rounding."""
    output, statistics = case.forward(call)
    cpu = case.backward(call, statistics)._replace(output=output)
    cpu = Results(*(None if result is None else result.double() for result in cpu))
    limit = BETWEEN_IMPLEMENTATIONS * largest_error(call.input.dtype)
    for name, error in worst_errors(results, cpu, allowances(case, call, cpu)).items():
        assert error <= limit, f"{case} on {call}: {name} is {error:.3g} allowances from the CPU's"


def assert_statistics_accurate(call: Call, outcome: Outcome) -> None:
    """Mean and rstd are within roundings of the exact ones."""
    exact = exact_moments(call)
    for value, reference, magnitude in (
        (outcome.mean, exact.mean, exact.mean.abs() + exact.std),
        (outcome.rstd, exact.rstd, exact.rstd),
    ):
        assert value is not None
        tiny = torch.finfo(value.dtype).smallest_normal
        allowed = STATISTICS_ROUNDINGS * roundoff(value.dtype) * magnitude + tiny
        assert worst_error(value, reference.flatten(), allowed.flatten()) <= 1


def path(device: Device) -> list[str]:
    """The launched kernels without their template arguments, in order."""
    return [launch.kernel.partition("<")[0] for launch in device.launches()]


def statistics_of(outcome: Outcome) -> Statistics:
    return Statistics(outcome.mean, outcome.rstd)
