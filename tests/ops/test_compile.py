"""Proves: torch.compile takes every op without a graph break, forward and backward give eager's
bits, and a changed number of rows costs at most one recompilation.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config
import torch.utils._pytree as pytree
from torch._dynamo.testing import CompileCounterWithBackend

import memopt
from tests.support.bits import assert_same_bits
from tests.support.cases import EACH_OP, OP_CASES, Call, OpCase, as_tuple, evaluate
from tests.support.shapes import BFLOAT16, FLOAT32, Dtypes

# What is compiled around an op does not depend on its keywords.
every_op = pytest.mark.parametrize("case", EACH_OP, ids=str)


@pytest.fixture(autouse=True)
def _fresh_compiler(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    if case is not None and case.random and device.type == "cuda":
        pytest.skip("on CUDA a graph's mask is not eager's; test_dropout_random.py has its tests")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(case: OpCase, backend: object, dynamic: bool | None = None):
    """The op between two pointwise ones, so that there is a graph around it."""

    def function(call: Call) -> tuple[torch.Tensor, ...]:
        name = next(iter(call.given))
        outputs = case.memopt(call.replace(**{name: 2 * call.first}))
        return tuple(2 * output for output in as_tuple(outputs))

    def of_arguments(tensors: dict, options: dict) -> tuple[torch.Tensor, ...]:
        return function(Call(tensors, {}, options))

    graph = torch.compile(of_arguments, backend=backend, fullgraph=True, dynamic=dynamic)

    def run(call: Call) -> tuple[torch.Tensor, ...]:
        case.seed()
        return graph(call.tensors, call.options)

    return function, run


def assert_compiled_gives_eagers_bits(function, run, call: Call) -> None:
    assert_same_bits(evaluate(run, call), evaluate(function, call))


# Every op with both dtypes and both kinds of shapes, and each dtype with each kind. (Of an op's
# further cases opcheck in test_dispatcher.py compares the traced graph with eager mode.)
@pytest.mark.parametrize(
    ("case", "dtypes", "dynamic"),
    [
        (case, dtypes, (place + turn) % 2 == 0)
        for place, case in enumerate(EACH_OP)
        for turn, dtypes in enumerate((FLOAT32, BFLOAT16))
    ],
    ids=str,
)
def test_forward_and_backward_equal_eager(
    case: OpCase, dtypes: Dtypes, dynamic: bool, device: torch.device
) -> None:
    function, run = compiled(case, "aot_eager", dynamic)
    assert_compiled_gives_eagers_bits(function, run, case.make_call((4, 33), dtypes, device))


@every_op
def test_changing_rows_recompiles_once(case: OpCase, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function, run = compiled(case, counter)
    for rows in (4, 5, 6, 7, 31):
        assert_compiled_gives_eagers_bits(
            function, run, case.make_call((rows, 33), FLOAT32, device)
        )
    assert counter.frame_count <= 2


@every_op
def test_dynamic_shapes_never_recompile(case: OpCase, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function, run = compiled(case, counter, dynamic=True)
    assert_compiled_gives_eagers_bits(function, run, case.make_call((4, 33), FLOAT32, device))
    compilations = counter.frame_count
    for rows in (5, 6, 31):
        assert_compiled_gives_eagers_bits(
            function, run, case.make_call((rows, 33), FLOAT32, device)
        )
    assert counter.frame_count == compilations


@every_op
def test_no_grad(case: OpCase, device: torch.device) -> None:
    function, run = compiled(case, "aot_eager")
    call = case.make_call((4, 33), FLOAT32, device)
    with torch.no_grad():
        for actual, expected in zip(run(call), function(call), strict=True):
            assert torch.equal(actual, expected)


@every_op
def test_autocast(case: OpCase, device: torch.device) -> None:
    function, run = compiled(case, "aot_eager")
    with torch.autocast(device.type, torch.bfloat16):
        assert_compiled_gives_eagers_bits(function, run, case.make_call((4, 33), FLOAT32, device))


@pytest.mark.slow
@every_op
def test_inductor(case: OpCase, device: torch.device) -> None:
    """The default backend generates code around the op; its own arithmetic may contract a multiply
    and an add. Its generator is another, unless it is told to use PyTorch's.
    """
    function, run = compiled(case, "inductor")
    call = case.make_call((4, 33), FLOAT32, device)
    with torch._inductor.config.patch(fallback_random=case.random):
        actual = evaluate(run, call)
    for name, expected in evaluate(function, call).items():
        if expected is not None:
            torch.testing.assert_close(actual[name], expected)


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
    x = OP_CASES[0].make_call((4, 32), FLOAT32, device).input

    def gradients(module) -> list[torch.Tensor]:
        return list(torch.autograd.grad(module(x).square().sum(), list(model.parameters())))

    for actual, expected in zip(gradients(graph), gradients(model), strict=True):
        assert torch.equal(actual, expected)


@every_op
def test_export(case: OpCase, device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, tensors, options):
            return case.memopt(Call(tensors, {}, options))

    call = case.make_call((4, 33), FLOAT32, device)
    rows = torch.export.Dim("rows", min=2, max=64)
    dynamic = {name: {0: rows} if name in call.activations else None for name in call.tensors}
    program = torch.export.export(
        Module(),
        (call.tensors, call.options),
        dynamic_shapes=(dynamic, pytree.tree_map(lambda _: None, call.options)),
    )
    other = case.make_call((7, 33), FLOAT32, device)
    case.seed()
    outputs = as_tuple(program.module()(other.tensors, other.options))
    for actual, expected in zip(outputs, as_tuple(case.memopt(other)), strict=True):
        assert torch.equal(actual, expected)
