"""Proves: torch.compile takes every op without a graph break, forward and backward give eager's
bits, and a changed number of rows costs at most one recompilation.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import memopt
from tests.support.cases import OP_CASES, Call, OpCase, evaluate
from tests.support.shapes import BFLOAT16, FLOAT32, Dtypes, make_call

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(case: OpCase, backend: object, dynamic: bool | None = None):
    """The op between two pointwise ones, so that there is a graph around it."""

    def function(call: Call) -> torch.Tensor:
        return case.memopt(call) * 2 + call.input

    def tensors_in(input, weight, bias, normalized_shape, eps):
        call = Call(input, normalized_shape, weight, bias, input, eps)
        return function(call)

    graph = torch.compile(tensors_in, backend=backend, fullgraph=True, dynamic=dynamic)

    def run(call: Call) -> torch.Tensor:
        return graph(call.input, call.weight, call.bias, call.normalized_shape, call.eps)

    return function, run


def assert_same_bits(function, run, call: Call) -> None:
    for actual, expected in zip(evaluate(run, call), evaluate(function, call), strict=True):
        assert (actual is None) == (expected is None)
        assert actual is None or torch.equal(actual, expected)


@every_op
@pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_and_backward_equal_eager(
    case: OpCase, dtypes: Dtypes, dynamic: bool, device: torch.device
) -> None:
    function, run = compiled(case, "aot_eager", dynamic)
    assert_same_bits(function, run, make_call(case, (4, 33), dtypes, device))


@every_op
def test_changing_rows_recompiles_once(case: OpCase, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function, run = compiled(case, counter)
    for rows in (4, 5, 6, 7, 31):
        assert_same_bits(function, run, make_call(case, (rows, 33), FLOAT32, device))
    assert counter.frame_count <= 2


@every_op
def test_dynamic_shapes_never_recompile(case: OpCase, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function, run = compiled(case, counter, dynamic=True)
    assert_same_bits(function, run, make_call(case, (4, 33), FLOAT32, device))
    compilations = counter.frame_count
    for rows in (5, 6, 31):
        assert_same_bits(function, run, make_call(case, (rows, 33), FLOAT32, device))
    assert counter.frame_count == compilations


@every_op
def test_no_grad(case: OpCase, device: torch.device) -> None:
    _, run = compiled(case, "aot_eager")
    call = make_call(case, (4, 33), FLOAT32, device)
    with torch.no_grad():
        assert torch.equal(run(call), case.memopt(call) * 2 + call.input)


@every_op
def test_autocast(case: OpCase, device: torch.device) -> None:
    function, run = compiled(case, "aot_eager")
    with torch.autocast(device.type, torch.bfloat16):
        assert_same_bits(function, run, make_call(case, (4, 33), FLOAT32, device))


@pytest.mark.slow
@pytest.mark.parametrize("case", [OP_CASES[0], OP_CASES[-1]], ids=str)
def test_inductor(case: OpCase, device: torch.device) -> None:
    """The default backend generates code around the op; its own arithmetic may contract a multiply
    and an add.
    """
    function, run = compiled(case, "inductor")
    call = make_call(case, (4, 33), FLOAT32, device)
    for actual, expected in zip(evaluate(run, call), evaluate(function, call), strict=True):
        if expected is not None:
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_modules(dynamic: bool, device: torch.device) -> None:
    """The three modules in one graph, with the Linear that they are made for."""
    model = torch.nn.Sequential(
        memopt.nn.LayerNorm(32),
        torch.nn.Linear(32, 48),
        memopt.nn.GELU("tanh"),
        torch.nn.Linear(48, 32),
        memopt.nn.LayerNormGELU(32),
    ).to(device)
    graph = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    x = make_call(OP_CASES[0], (4, 32), FLOAT32, device).input

    def gradients(module) -> list[torch.Tensor]:
        return list(torch.autograd.grad(module(x).square().sum(), list(model.parameters())))

    for actual, expected in zip(gradients(graph), gradients(model), strict=True):
        assert torch.equal(actual, expected)


@every_op
def test_export(case: OpCase, device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, input, weight, bias):
            return case.memopt(Call(input, (33,), weight, bias, input))

    call = make_call(case, (4, 33), FLOAT32, device)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(
        Module(),
        (call.input, call.weight, call.bias),
        dynamic_shapes=({0: rows}, None, None),
    )
    other = make_call(case, (7, 33), FLOAT32, device)
    output = program.module()(other.input, other.weight, other.bias)
    assert torch.equal(output, case.memopt(other))
