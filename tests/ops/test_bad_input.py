"""Proves: every argument that breaks a rule raises an error that names the op, the rule and what
was got, at the call and not in a kernel, and nothing is changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memopt
from tests.support.cases import GELU_CASES, NORM_CASES, NORMALIZING_CASES, OP_CASES, Call, OpCase
from tests.support.cases.op import Saved
from tests.support.shapes import FLOAT32, FLOAT64, Dtypes

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORMALIZING_CASES, ids=str)
every_parameter = pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in NORMALIZING_CASES for name in case.parameters]
)
every_statistic = pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in NORMALIZING_CASES for name in case.saved]
)


def refused(case: OpCase, call: Call, rule: str, private: bool = True) -> None:
    """The public op raises "<op>: <rule>", and so does the private forward op unless that takes no
    such argument; the arguments stay as they were.
    """
    tensors = [t for t in call.given.values() if isinstance(t, torch.Tensor) and not t.is_meta]
    versions = [t._version for t in tensors]
    calls = [(case.public_op, case.public_arguments(call))]
    if private:
        calls.append((case.forward_op, case.forward_arguments(call)))
    for op, (arguments, keywords) in calls:
        with pytest.raises(RuntimeError, match=re.escape(f"{case.family}: {rule}")):
            op(*arguments, **keywords)
    assert [t._version for t in tensors] == versions


def first_replaced(call: Call, value: Any) -> tuple[str, Call]:
    """The call with its first tensor replaced, and that tensor's name."""
    name = next(iter(call.tensors))
    return name, call.replace(**{name: value})


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
    call = case.make_call((4, 8), FLOAT32, device)
    name, call = first_replaced(call, convert(call.first))
    rule = f"{name} must have dtype float32, float16, bfloat16 or float64, got {got}"
    refused(case, call, rule)


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
    call = case.make_call((4, 8), FLOAT32, device)
    name, call = first_replaced(call, convert(call.first))
    refused(case, call, f"{name} must be a dense (strided) tensor, got layout {got}")


@every_op
@pytest.mark.parametrize("value", [None, 1.0, [1.0, 2.0], "x"], ids=str)
def test_input_that_is_no_tensor(case: OpCase, value: object) -> None:
    """None reaches the op; PyTorch's dispatcher refuses the rest, naming op, argument and type."""
    call = case.make_call((4, 8), FLOAT32, torch.device("cpu"))
    name, call = first_replaced(call, value)
    arguments, keywords = case.public_arguments(call)
    public = case.public_op.name().removeprefix("memopt::")
    message = rf"memopt::{public}\(\).*'{name}'"
    if value is None:
        message = f"{case.family}: {name} must be a tensor, got None"
    with pytest.raises((RuntimeError, TypeError), match=message):
        case.public_op(*arguments, **keywords)


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
    call = case.make_call((4, 8), FLOAT32, device, weight=False, bias=False)
    refused(case, call.replace(normalized_shape=normalized_shape), rule, private=False)


@every_norm
def test_empty_normalized_dimension(case: OpCase, device: torch.device) -> None:
    call = case.make_call((4, 0), FLOAT32, device)
    rule = "normalized_shape must be positive in every dimension, got [0]"
    refused(case, call, rule)


@every_norm
def test_input_without_dimensions(case: OpCase, device: torch.device) -> None:
    call = case.make_call((8,), FLOAT32, device)
    rule = "normalized_shape must be the last dimensions of input's shape [], got [8]"
    refused(case, call.replace(input=torch.ones((), device=device)), rule, private=False)


@every_parameter
@pytest.mark.parametrize("size", [(7,), (1,), (1, 8), (4, 8), ()], ids=str)
def test_parameter_shape(
    case: OpCase, name: str, size: tuple[int, ...], device: torch.device
) -> None:
    call = case.make_call((4, 8), FLOAT32, device)
    call = call.replace(**{name: torch.ones(size, device=device)})
    rule = f"{name} must have shape [8] (normalized_shape), got {list(size)}"
    refused(case, call, rule)


@every_parameter
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
    call = case.make_call((4, 8), dtypes, device)
    call = call.replace(**{name: torch.ones(8, device=device, dtype=parameter)})
    refused(case, call, f"{name} {rule}")


@pytest.mark.parametrize("case", [c for c in NORMALIZING_CASES if "bias" in c.parameters], ids=str)
def test_weight_and_bias_of_different_dtypes(case: OpCase, device: torch.device) -> None:
    call = case.make_call((4, 8), Dtypes(torch.bfloat16, torch.bfloat16), device)
    call = call.replace(weight=call.weight.float())
    rule = "bias must have weight's dtype Float, got BFloat16"
    refused(case, call, rule)


@every_parameter
def test_parameter_on_another_device(case: OpCase, name: str, device: torch.device) -> None:
    """meta beside the CPU, and the CPU beside CUDA where there is one."""
    for other in {"meta", "cpu"} - {device.type}:
        call = case.make_call((4, 8), FLOAT32, device)
        call = call.replace(**{name: torch.ones(8, device=other)})
        rule = f"{name} must be on input's device {call.input.device}, got {other}"
        refused(case, call, rule)


@every_parameter
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_parameter(case: OpCase, name: str, device: torch.device) -> None:
    call = case.make_call((4, 8), FLOAT32, device)
    call = call.replace(**{name: torch.ones(8, device=device).to_sparse()})
    rule = f"{name} must be a dense (strided) tensor, got layout Sparse"
    refused(case, call, rule)


@every_norm
@pytest.mark.parametrize(
    ("eps", "got"), [(-1e-5, "-1e-05"), (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_eps(case: OpCase, eps: float, got: str, device: torch.device) -> None:
    call = case.make_call((4, 8), FLOAT32, device)
    refused(case, call.replace(eps=eps), f"eps must be finite and not negative, got {got}")


@pytest.mark.parametrize("case", [GELU_CASES[0], NORM_CASES[1]], ids=str)
@pytest.mark.parametrize("approximate", ["", "erf", "Tanh", "none "])
def test_approximate(case: OpCase, approximate: str, device: torch.device) -> None:
    (*arguments,), _ = case.arguments(case.make_call((4, 8), FLOAT32, device))
    rule = f"{case.family}: approximate must be 'none' or 'tanh', got '{approximate}'"
    with pytest.raises(RuntimeError, match=re.escape(rule)):
        getattr(memopt.functional, case.family)(*arguments, approximate=approximate)


# The backward ops check what they are given too: a wrong call must not read past a buffer.


def backward_refused(case: OpCase, call: Call, saved: Saved, rule: str) -> None:
    """`rule` is a regular expression."""
    arguments, keywords = case.backward_arguments(call, saved)
    with pytest.raises(RuntimeError, match=f"{case.family} backward: {rule}"):
        case.backward_op(*arguments, **keywords)


@pytest.mark.parametrize("case", [case for case in OP_CASES if not case.linear], ids=str)
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda g: g[:-1], r"shape \[4, 8\], got \[3, 8\]"),
        (lambda g: g.bfloat16(), r"dtype Float, got BFloat16"),
        (lambda g: g.to("meta"), r"device {device}, got meta"),
        (lambda g: g.to_sparse(), r"a dense \(strided\) tensor, got layout Sparse"),
    ],
    ids=["shape", "dtype", "device", "layout"],
)
def test_gradients_given_to_the_backward_op(
    case: OpCase,
    change: Callable[[torch.Tensor], torch.Tensor],
    rule: str,
    device: torch.device,
) -> None:
    call = case.make_call((4, 8), FLOAT32, device)
    _, saved = case.forward(call)
    for name, gradient in call.incoming.items():
        # Of what: of input's shape, dtype and device, say.
        named = f"{name} must (be|have|be on) ([a-z_' ]* )?{rule.format(device=call.first.device)}"
        backward_refused(case, call.replace(**{name: change(gradient)}), saved, named)


@every_statistic
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
    call = case.make_call((4, 8), FLOAT32, device)
    _, saved = case.forward(call)
    saved[name] = change(saved[name])
    rule = re.escape(f"{name} {rule.format(device=call.input.device)}")
    backward_refused(case, call, saved, rule)


@every_norm
def test_strided_statistics_of_the_backward_op(case: OpCase, device: torch.device) -> None:
    call = case.make_call((4, 8), FLOAT32, device)
    _, saved = case.forward(call)
    saved["rstd"] = torch.zeros(4, 2, device=device)[:, :1]
    backward_refused(case, call, saved, "rstd must be a contiguous Float")


@every_norm
def test_a_weight_whose_memory_was_freed(case: OpCase, device: torch.device) -> None:
    """As sharded parameters' is, outside their module's forward and backward."""
    call = case.make_call((4, 8), FLOAT32, device)
    call.tensors["weight"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="weight must be in memory, got one whose storage was"):
        case.memopt(call)
