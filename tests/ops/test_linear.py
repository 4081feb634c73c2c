"""Proves: the ops with linears behind them equal, in every bit of outputs and gradients, the op in
front followed by torch.nn.functional.linear, whatever asks for gradients; they keep nothing but
what the op in front keeps; and nothing is computed that no gradient asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import memopt.functional as M
from memopt import checkpoint
from memopt.memory.saved import SavedTensors
from tests.support.bits import assert_same_bits
from tests.support.cases.activation import THROUGHOUT, named

ACTIVATIONS = {name: functools.partial(M.activation, **named(name)) for name in THROUGHOUT}


@dataclass(frozen=True)
class Case:
    """An op with linears behind it, and the two steps that it stands for."""

    name: str
    fused: Callable[..., Any]
    """Called with the inputs of the op in front, then lists of weights and biases."""
    front: Callable[..., Tensor]
    make_inputs: Callable[[torch.Size, int], list[Tensor]]
    """From leading dimensions and the number of features: activations, then parameters."""
    activations: int
    row_bytes: int
    """Of statistics that are kept beside the activations."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_norm(self) -> bool:
        """Whether several linears may stand behind it."""
        return self.row_bytes > 0


def norm_inputs(leading: torch.Size, features: int) -> list[Tensor]:
    return [torch.randn(*leading, features), torch.rand(features) + 0.5, torch.randn(features)]


def single(op: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """An op with one linear, called as if it took several."""

    def call(*arguments: Any) -> list[Tensor]:
        *inputs, weights, biases = arguments
        return [op(*inputs, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    return call


CASES = (
    Case(
        "layer_norm",
        lambda x, w, b, weights, biases: M.layer_norm_linear(x, w, b, weights, biases, 1e-3),
        lambda x, w, b: M.layer_norm(x, x.shape[-1:], w, b, 1e-3),
        norm_inputs,
        1,
        8,
    ),
    Case(
        "rms_norm",
        lambda x, w, weights, biases: M.rms_norm_linear(x, w, weights, biases, 1e-3),
        lambda x, w: M.rms_norm(x, x.shape[-1:], w, 1e-3),
        lambda leading, n: norm_inputs(leading, n)[:2],
        1,
        4,
    ),
    Case(
        "zero-centred rms_norm",
        lambda x, w, weights, biases: M.rms_norm_linear(
            x, w, weights, biases, zero_centered_weight=True
        ),
        lambda x, w: M.rms_norm(x, x.shape[-1:], w, zero_centered_weight=True),
        lambda leading, n: norm_inputs(leading, n)[:2],
        1,
        4,
    ),
    *(
        Case(
            name,
            single(functools.partial(M.activation_linear, **named(name))),
            activation,
            lambda leading, n: [torch.randn(*leading, n)],
            1,
            0,
        )
        for name, activation in ACTIVATIONS.items()
    ),
    Case(
        "swiglu",
        single(M.swiglu_linear),
        M.swiglu,
        lambda leading, n: [torch.randn(*leading, n), torch.randn(*leading, n)],
        2,
        0,
    ),
    *(
        Case(
            f"geglu, packed, interleaved={interleaved}",
            single(
                lambda x, weight, bias, interleaved=interleaved: M.gated_packed_linear(
                    x, weight, bias, "gelu", interleaved
                )
            ),
            lambda x, interleaved=interleaved: M.geglu_packed(x, interleaved),
            lambda leading, n: [torch.randn(*leading, 2 * n)],
            1,
            0,
        )
        for interleaved in (False, True)
    ),
)
every_case = pytest.mark.parametrize("case", CASES, ids=str)
FEATURES = 37


def apart(
    case: Case, inputs: list[Tensor], weights: list[Tensor], biases: list[Any]
) -> list[Tensor]:
    x = case.front(*inputs)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def make_linears(outs: tuple[int, ...], bias: bool) -> tuple[list[Tensor], list[Any]]:
    weights = [torch.randn(out, FEATURES) for out in outs]
    return weights, [torch.randn(out) if bias else None for out in outs]


def as_leaves(tensors: list[Any], device: torch.device, dtype: torch.dtype) -> list[Any]:
    return [None if t is None else t.to(device, dtype).requires_grad_() for t in tensors]


def gradients(outputs: Any, tensors: list[Any], create_graph: bool = False) -> list[Any]:
    torch.manual_seed(1)
    grads = [torch.randn_like(y) for y in outputs]
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    return list(torch.autograd.grad(outputs, wanted, grads, create_graph=create_graph))


@pytest.mark.parametrize(
    ("case", "outs"),
    [(case, (8,)) for case in CASES] + [(case, (3, 8, 5)) for case in CASES if case.is_norm],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("leading", [(5,), (2, 3), (), (0,), (2, 2, 3)], ids=str)
def test_equals_the_two_steps_in_every_bit(
    case: Case, dtype: torch.dtype, leading: tuple[int, ...], outs: tuple[int, ...], device
) -> None:
    inputs = as_leaves(case.make_inputs(torch.Size(leading), FEATURES), device, dtype)
    weights, biases = (as_leaves(t, device, dtype) for t in make_linears(outs, bias=True))
    tensors = [*inputs, *weights, *biases]
    actual, expected = case.fused(*inputs, weights, biases), apart(case, inputs, weights, biases)
    assert_same_bits(actual, expected)
    assert_same_bits(gradients(actual, tensors), gradients(expected, tensors))


@every_case
@pytest.mark.parametrize("frozen", ["inputs", "parameters", "weights", "biases", "first", "none"])
def test_frozen_parts(case: Case, frozen: str, device: torch.device) -> None:
    inputs = as_leaves(case.make_inputs(torch.Size((6,)), FEATURES), device, torch.float32)
    weights, biases = (as_leaves(t, device, torch.float32) for t in make_linears((4,), True))
    parts = {
        "inputs": inputs,
        "parameters": inputs[case.activations :],
        "weights": weights,
        "biases": biases,
        "first": inputs[:1],
        "none": [],
    }
    for tensor in parts[frozen]:
        tensor.requires_grad_(False)
    tensors = [*inputs, *weights, *biases]
    actual, expected = case.fused(*inputs, weights, biases), apart(case, inputs, weights, biases)
    assert_same_bits(gradients(actual, tensors), gradients(expected, tensors))


@every_case
def test_keeps_what_the_op_in_front_keeps(case: Case, device: torch.device) -> None:
    rows = 12
    inputs = as_leaves(case.make_inputs(torch.Size((rows,)), FEATURES), device, torch.bfloat16)
    weights, biases = (as_leaves(t, device, torch.bfloat16) for t in make_linears((4,), True))
    parameters = [*inputs[case.activations :], *weights, *biases]
    with SavedTensors(exclude=parameters) as saved:
        case.fused(*inputs, weights, biases)
    activations = sum(t.nbytes for t in inputs[: case.activations])
    print(f"{case}: activations {activations} B + {rows} rows of {case.row_bytes} B")
    assert saved.bytes == activations + rows * case.row_bytes
    with SavedTensors(exclude=parameters) as apart_saved:
        apart(case, inputs, weights, biases)
    assert apart_saved.bytes == saved.bytes + rows * FEATURES * 2


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def count(self, part: str) -> int:
        return sum(part in name for name in self.names)


@every_case
def test_nothing_is_computed_that_no_gradient_asks_for(case: Case, device: torch.device) -> None:
    def backward(frozen: str) -> Operators:
        inputs = as_leaves(case.make_inputs(torch.Size((6,)), FEATURES), device, torch.float32)
        weights, biases = (as_leaves(t, device, torch.float32) for t in make_linears((4,), True))
        for tensor in {"inputs": inputs, "weights": weights}[frozen]:
            tensor.requires_grad_(False)
        (y,) = case.fused(*inputs, weights, biases)
        with Operators() as operators:
            y.backward(torch.ones_like(y))
        return operators

    without_dgrad = backward("inputs")
    assert without_dgrad.count("aten.mm") == 1
    assert without_dgrad.count("_backward") == 0
    without_wgrad = backward("weights")
    assert without_wgrad.count("aten.mm") == 1
    assert without_wgrad.count("_backward") == 1
    assert without_wgrad.count("memopt") == 1


@every_case
def test_gradients_of_gradients(case: Case) -> None:
    inputs = as_leaves(
        case.make_inputs(torch.Size((2,)), FEATURES), torch.device("cpu"), torch.float64
    )
    weights, biases = (
        as_leaves(t, torch.device("cpu"), torch.float64) for t in make_linears((3,), True)
    )
    tensors = [*inputs, *weights, *biases]
    results = []
    for call in (case.fused, lambda *a: apart(case, list(a[:-2]), a[-2], a[-1])):
        first = gradients(call(*inputs, weights, biases), tensors, create_graph=True)
        total = sum(g.square().sum() for g in first)
        results.append(torch.autograd.grad(total, tensors, allow_unused=True))
    for a, e in zip(*results, strict=True):
        assert (a is None) == (e is None)
        assert a is None or torch.allclose(a, e, rtol=1e-9, atol=1e-9)


@every_case
def test_in_a_region_and_compiled(case: Case, device: torch.device) -> None:
    inputs = as_leaves(case.make_inputs(torch.Size((6,)), FEATURES), device, torch.float32)
    weights, biases = (as_leaves(t, device, torch.float32) for t in make_linears((4,), True))
    tensors = [*inputs, *weights, *biases]
    plain = case.fused(*inputs, weights, biases)
    expected = gradients(plain, tensors)
    region = checkpoint(case.fused, *inputs, weights, biases)
    assert_same_bits(gradients(region, tensors), expected)
    torch._dynamo.reset()
    compiled = torch.compile(case.fused, backend="aot_eager", fullgraph=True)
    assert_same_bits(gradients(compiled(*inputs, weights, biases), tensors), expected)


def as_cast(inputs: list[Any]) -> list[Any]:
    """Activations in bfloat16; the parameters of a norm stay."""
    return [t if t is None or t.dim() == 1 else t.bfloat16() for t in inputs]


@every_case
def test_autocast_casts_input_and_weights(case: Case, device: torch.device) -> None:
    inputs = as_leaves(case.make_inputs(torch.Size((6,)), FEATURES), device, torch.float32)
    weights, biases = (as_leaves(t, device, torch.float32) for t in make_linears((4,), True))
    with torch.autocast(device.type, torch.bfloat16):
        fused = case.fused(*inputs, weights, biases)
        two = apart(case, as_cast(inputs), weights, biases)
    assert fused[0].dtype == torch.bfloat16
    assert_same_bits(fused, two)
    tensors = [*inputs, *weights, *biases]
    assert_same_bits(gradients(fused, tensors), gradients(two, tensors))


@every_case
def test_backward_called_under_autocast(case: Case, device: torch.device) -> None:
    """It runs in forward's dtypes."""
    inputs = as_leaves(case.make_inputs(torch.Size((6,)), FEATURES), device, torch.float32)
    weights, biases = (as_leaves(t, device, torch.float32) for t in make_linears((4,), True))
    tensors = [*inputs, *weights, *biases]
    expected = gradients(case.fused(*inputs, weights, biases), tensors)
    outputs = case.fused(*inputs, weights, biases)
    with torch.autocast(device.type, torch.bfloat16):
        actual = gradients(outputs, tensors)
    assert_same_bits(actual, expected)


X, W = torch.randn(2, 4), torch.randn(3, 4)
BAD = {
    "features": (
        lambda: M.gelu_linear(X, torch.randn(3, 5)),
        r"gelu_linear: weight must have shape \[out, 4\]",
    ),
    "weight dtype": (
        lambda: M.gelu_linear(X, W.double()),
        "gelu_linear: weight must have input's dtype",
    ),
    "weight 1-d": (lambda: M.gelu_linear(X, W[0]), r"must have shape \[out, 4\] .*got \[4\]"),
    "bias": (
        lambda: M.gelu_linear(X, W, torch.zeros(4)),
        r"gelu_linear: bias must have shape \[3\]",
    ),
    "bias dtype": (
        lambda: M.gelu_linear(X, W, torch.zeros(3).half()),
        "gelu_linear: bias must have its",
    ),
    "no weights": (lambda: M.layer_norm_linear(X, None, None, []), "at least one weight"),
    "biases": (
        lambda: M.rms_norm_linear(X, None, [W, W], [None]),
        "one entry for each weight, got 1 for 2",
    ),
    "activation": (
        lambda: M.activation_linear(X, W, None, "tanh"),
        "must be one of 'gelu', .*got 'tanh'",
    ),
    "norm weight": (
        lambda: M.layer_norm_linear(X, torch.ones(3), None, W),
        "weight must have shape",
    ),
    "scalar": (lambda: M.gelu_linear(torch.tensor(1.0), W), "at least one dimension"),
}


@pytest.mark.parametrize("call", [call for call, _ in BAD.values()], ids=BAD.keys())
def test_bad_input(call: Callable[[], object], request: pytest.FixtureRequest) -> None:
    message = BAD[request.node.callspec.id][1]
    with pytest.raises(RuntimeError, match=message):
        call()
