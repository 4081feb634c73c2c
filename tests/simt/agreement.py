"""One call of an op on the interpreter, and what its results are held against."""

from __future__ import annotations

import torch

from tests.support.cases import Call, OpCase, Results
from tests.support.cases.op import Saved
from tests.support.oracle import (
    allowances,
    assert_results_accurate,
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


class Outcome(Results):
    """Forward, and backward with everything asked for: the results by name, the saved tensors, and
    as reemitted_NAME what backward re-emits.
    """

    outputs: tuple[str, ...]
    saved: Saved

    @property
    def results(self) -> Results:
        """Outputs and gradients."""
        names = [*self.outputs, *(name for name in self if name.startswith("grad_"))]
        return Results({name: self[name] for name in names})


def run(device: Device, case: OpCase, call: Call, *, layout: Layout = DENSE) -> Outcome:
    """Forward and backward in the device's order of threads."""
    outputs, saved = kernels.forward(device, case, call, layout=layout)
    results = kernels.backward(device, case, call, saved, recompute_output=True, layout=layout)
    gradients = {name: value for name, value in results.items() if name not in case.reemitted}
    reemitted = {f"reemitted_{name}": results[name] for name in case.reemitted}
    outcome = Outcome({**outputs, **saved, **gradients, **reemitted})
    outcome.outputs, outcome.saved = case.outputs, saved
    return outcome


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
    for name in case.reemitted:
        reemitted, output = outcome[f"reemitted_{name}"], outcome[name]
        kernels.assert_same_bits([reemitted], [output], f"{case} on {call}: re-emitted")
    assert_statistics_accurate(case, call, outcome)


def assert_outputs_accurate(case: OpCase, call: Call, outputs: Results) -> None:
    """The same of forward alone."""
    exact = exact_results(case, call)
    allowed = allowances(case, call, exact)
    for name, output in outputs.items():
        assert worst_error(output, exact[name], allowed[name]) <= largest_error(output.dtype)


def assert_agrees_with_cpu(case: OpCase, call: Call, results: Results) -> None:
    """The dispatcher ops on the CPU give the same within rounding."""
    outputs, saved = case.forward(call)
    both = {**case.backward(call, saved), **outputs}
    cpu = Results({name: None if t is None else t.double() for name, t in both.items()})
    limit = BETWEEN_IMPLEMENTATIONS * largest_error(call.first.dtype)
    for name, error in worst_errors(results, cpu, allowances(case, call, cpu)).items():
        assert error <= limit, f"{case} on {call}: {name} is {error:.3g} allowances from the CPU's"


def assert_statistics_accurate(case: OpCase, call: Call, outcome: Outcome) -> None:
    """Mean and rstd are within roundings of the exact ones."""
    for name, (reference, magnitude) in case.statistics(call).items():
        value = outcome.saved[name]
        tiny = torch.finfo(value.dtype).smallest_normal
        allowed = STATISTICS_ROUNDINGS * roundoff(value.dtype) * magnitude + tiny
        assert worst_error(value.flatten(), reference.flatten(), allowed.flatten()) <= 1


def path(device: Device) -> list[str]:
    """The launched kernels without their template arguments, in order."""
    return [launch.kernel.partition("<")[0] for launch in device.launches()]
