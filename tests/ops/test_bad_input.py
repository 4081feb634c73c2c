"""Proves: every argument that breaks a rule is refused with an error that names the op, the rule
and what was got, at the call and not in a kernel, and nothing is changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.cases import NORM_CASES, OP_CASES, OpCase, Statistics
from tests.support.shapes import FLOAT32, FLOAT64, Dtypes, make_call

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)


def refused(
    case: OpCase, arguments: tuple, keywords: dict[str, Any], rule: str, op: str = ""
) -> None:
    """The public op raises "<op>: <rule>", and so does the forward op; the arguments stay as they
    were.
    """
    tensors = [t for t in arguments if isinstance(t, torch.Tensor) and t.device.type != "meta"]
    versions = [t._version for t in tensors]
    text = re.escape(f"{op or case.family}: {rule}")
    for dispatcher_op in (case.dispatcher_op(), case.dispatcher_op("forward")):
        with pytest.raises(RuntimeError, match=text):
            dispatcher_op(*arguments, **keywords)
    assert [t._version for t in tensors] == versions


def with_input(case: OpCase, call, input: torch.Tensor) -> tuple[tuple, dict]:
    arguments, keywords = case.forward_arguments(call)
    return (input, *arguments[1:]), keywords


@every_op
@pytest.mark.parametrize(
    ("convert", "got"),
    [
        (torch.Tensor.int, "Int"),
        (torch.Tensor.long, "Long"),
        (torch.Tensor.bool, "Bool"),
        (lambda t: t.to(torch.complex64), "ComplexFloat"),
        (lambda t: t.to(torch.float8_e4m3fn), "Float8_e4m3fn"),
    ],
    ids=["int32", "int64", "bool", "complex64", "float8"],
)
def test_input_dtype(
    case: OpCase, convert: Callable[[torch.Tensor], torch.Tensor], got: str, device: torch.device
) -> None:
    call = make_call(case, (4, 8), FLOAT32, device)
    arguments, keywords = with_input(case, call, convert(call.input))
    rule = f"input must have dtype float32, float16, bfloat16 or float64, got {got}"
    refused(case, arguments, keywords, rule)


@every_op
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("convert", "got"),
    [
        (torch.Tensor.to_sparse, "Sparse"),
        (torch.Tensor.to_sparse_csr, "SparseCsr"),
    ],
    ids=["coo", "csr"],
)
def test_sparse_input(
    case: OpCase, convert: Callable[[torch.Tensor], torch.Tensor], got: str, device: torch.device
) -> None:
    call = make_call(case, (4, 8), FLOAT32, device)
    arguments, keywords = with_input(case, call, convert(call.input))
    refused(case, arguments, keywords, f"input must be a dense (strided) tensor, got layout {got}")


@every_op
@pytest.mark.parametrize("value", [None, 1.0, [1.0, 2.0], "x"], ids=str)
def test_input_that_is_no_tensor(case: OpCase, value: object) -> None:
    """None reaches the op; PyTorch's dispatcher refuses the rest, naming op, argument and type."""
    call = make_call(case, (4, 8), FLOAT32, torch.device("cpu"))
    arguments, keywords = with_input(case, call, value)
    message = rf"memopt::{case.family}\(\).*'input'"
    if value is None:
        message = f"{case.family}: input must be a tensor, got None"
    with pytest.raises((RuntimeError, TypeError), match=message):
        case.dispatcher_op()(*arguments, **keywords)


@every_norm
@pytest.mark.parametrize(
    ("normalized_shape", "rule"),
    [
        ((), "normalized_shape must have at least one dimension, got []"),
        ((7,), "normalized_shape must be the last dimensions of input's shape [4, 8], got [7]"),
        ((4,), "normalized_shape must be the last dimensions of input's shape [4, 8], got [4]"),
        (
            (2, 4, 8),
            "normalized_shape must be the last dimensions of input's shape [4, 8], got [2, 4, 8]",
        ),
        ((-8,), "normalized_shape must be positive in every dimension, got [-8]"),
    ],
    ids=str,
)
def test_normalized_shape(
    case: OpCase, normalized_shape: tuple[int, ...], rule: str, device: torch.device
) -> None:
    call = make_call(case, (4, 8), FLOAT32, device, weight=False, bias=False)
    arguments, keywords = case.forward_arguments(call)
    refused(case, (arguments[0], normalized_shape, *arguments[2:]), keywords, rule)


@every_norm
def test_empty_normalized_dimension(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (4, 0), FLOAT32, device)
    arguments, keywords = case.forward_arguments(call)
    rule = "normalized_shape must be positive in every dimension, got [0]"
    refused(case, arguments, keywords, rule)


@every_norm
def test_input_without_dimensions(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (8,), FLOAT32, device)
    arguments, keywords = with_input(case, call, torch.ones((), device=device))
    rule = "normalized_shape must be the last dimensions of input's shape [], got [8]"
    refused(case, arguments, keywords, rule)


@every_norm
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("size", [(7,), (1,), (1, 8), (4, 8), ()], ids=str)
def test_parameter_shape(
    case: OpCase, name: str, size: tuple[int, ...], device: torch.device
) -> None:
    call = make_call(case, (4, 8), FLOAT32, device)
    parameters = {"weight": call.weight, "bias": call.bias}
    parameters[name] = torch.ones(size, device=device)
    arguments = (call.input, (8,), parameters["weight"], parameters["bias"], 1e-5)
    rule = f"{name} must have shape [8] (normalized_shape), got {list(size)}"
    refused(case, arguments, case.forward_arguments(call)[1], rule)


@every_norm
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    ("dtypes", "parameter", "rule"),
    [
        (FLOAT32, torch.bfloat16, "must have input's dtype Float or Float, got BFloat16"),
        (FLOAT32, torch.float64, "must have input's dtype Float or Float, got Double"),
        (FLOAT32, torch.int64, "must have input's dtype Float or Float, got Long"),
        (FLOAT64, torch.float32, "must be Double for a Double input, got Float"),
        (
            Dtypes(torch.bfloat16, torch.bfloat16),
            torch.float16,
            "must have input's dtype BFloat16 or Float, got Half",
        ),
    ],
    ids=str,
)
def test_parameter_dtype(
    case: OpCase,
    name: str,
    dtypes: Dtypes,
    parameter: torch.dtype,
    rule: str,
    device: torch.device,
) -> None:
    call = make_call(case, (4, 8), dtypes, device)
    parameters = {"weight": call.weight, "bias": call.bias}
    parameters[name] = torch.ones(8, device=device, dtype=parameter)
    arguments = (call.input, (8,), parameters["weight"], parameters["bias"], 1e-5)
    refused(case, arguments, case.forward_arguments(call)[1], f"{name} {rule}")


@every_norm
def test_weight_and_bias_of_different_dtypes(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (4, 8), Dtypes(torch.bfloat16, torch.bfloat16), device)
    assert call.weight is not None
    assert call.bias is not None
    arguments = (call.input, (8,), call.weight.float(), call.bias, 1e-5)
    rule = "bias must have weight's dtype Float, got BFloat16"
    refused(case, arguments, case.forward_arguments(call)[1], rule)


@every_norm
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameter_on_another_device(case: OpCase, name: str, device: torch.device) -> None:
    """meta beside the CPU, and the CPU beside CUDA where there is one."""
    for other in {"meta", "cpu"} - {device.type}:
        call = make_call(case, (4, 8), FLOAT32, device)
        parameters = {"weight": call.weight, "bias": call.bias}
        parameters[name] = torch.ones(8, device=other)
        arguments = (call.input, (8,), parameters["weight"], parameters["bias"], 1e-5)
        rule = f"{name} must be on input's device {call.input.device}, got {other}"
        refused(case, arguments, case.forward_arguments(call)[1], rule)


@every_norm
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_parameter(case: OpCase, name: str, device: torch.device) -> None:
    call = make_call(case, (4, 8), FLOAT32, device)
    parameters = {"weight": call.weight, "bias": call.bias}
    parameters[name] = torch.ones(8, device=device).to_sparse()
    arguments = (call.input, (8,), parameters["weight"], parameters["bias"], 1e-5)
    rule = f"{name} must be a dense (strided) tensor, got layout Sparse"
    refused(case, arguments, case.forward_arguments(call)[1], rule)


@every_norm
@pytest.mark.parametrize(
    ("eps", "got"), [(-1e-5, "-1e-05"), (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_eps(case: OpCase, eps: float, got: str, device: torch.device) -> None:
    call = make_call(case, (4, 8), FLOAT32, device)
    arguments, keywords = case.forward_arguments(call)
    rule = f"eps must be finite and not negative, got {got}"
    refused(case, (*arguments[:4], eps), keywords, rule)


@pytest.mark.parametrize("case", [c for c in OP_CASES if c.approximate == "none"], ids=str)
@pytest.mark.parametrize("approximate", ["", "erf", "Tanh", "none "])
def test_approximate(case: OpCase, approximate: str, device: torch.device) -> None:
    call = make_call(case, (4, 8), FLOAT32, device)
    arguments, _ = case.forward_arguments(call)
    rule = f"approximate must be 'none' or 'tanh', got '{approximate}'"
    refused(case, arguments, {"approximate": approximate}, rule)


# The backward ops check what they are given too: a wrong call must not read past a buffer.


def backward_refused(case: OpCase, call, statistics: Statistics, rule: str) -> None:
    arguments, keywords = case.backward_arguments(call, statistics)
    with pytest.raises(RuntimeError, match=re.escape(f"{case.family} backward: {rule}")):
        case.dispatcher_op("backward")(*arguments, **keywords)


@every_op
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda g: g[:-1], "grad_output must have input's shape [4, 8], got [3, 8]"),
        (lambda g: g.bfloat16(), "grad_output must have input's dtype Float, got BFloat16"),
        (lambda g: g.to("meta"), "grad_output must be on input's device {device}, got meta"),
        (
            lambda g: g.to_sparse(),
            "grad_output must be a dense (strided) tensor, got layout Sparse",
        ),
    ],
    ids=["shape", "dtype", "device", "layout"],
)
def test_grad_output_of_the_backward_op(
    case: OpCase,
    change: Callable[[torch.Tensor], torch.Tensor],
    rule: str,
    device: torch.device,
) -> None:
    call = make_call(case, (4, 8), FLOAT32, device)
    _, statistics = case.forward(call)
    changed = call.__class__(
        call.input, call.normalized_shape, call.weight, call.bias, change(call.grad_output)
    )
    backward_refused(case, changed, statistics, rule.format(device=call.input.device))


@every_norm
@pytest.mark.parametrize("name", ["mean", "rstd"])
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda s: s[:-1], "must have shape [4, 1], got [3, 1]"),
        (lambda s: s.squeeze(1), "must have shape [4, 1], got [4]"),
        (lambda s: s.double(), "must be a contiguous Float tensor on {device}, got Double"),
        (
            lambda s: s.to("meta"),
            "must be a contiguous Float tensor on {device}, got Float on meta",
        ),
    ],
    ids=["rows", "dimensions", "dtype", "device"],
)
def test_statistics_of_the_backward_op(
    case: OpCase,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    rule: str,
    device: torch.device,
) -> None:
    call = make_call(case, (4, 8), FLOAT32, device)
    _, statistics = case.forward(call)
    statistics = statistics._replace(**{name: change(getattr(statistics, name))})
    backward_refused(case, call, statistics, f"{name} {rule.format(device=call.input.device)}")


@every_norm
def test_strided_statistics_of_the_backward_op(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (4, 8), FLOAT32, device)
    _, statistics = case.forward(call)
    wide = torch.zeros(4, 2, device=device)[:, :1]
    backward_refused(case, call, statistics._replace(mean=wide), "mean must be a contiguous Float")
