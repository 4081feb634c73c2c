"""Proves: first and second derivatives are those of the function (gradcheck, gradgradcheck in
float64), only what is asked for is computed, and backward neither changes what it is given nor
misses a change of what was saved.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from tests.support.cases import NORM_CASES, OP_CASES, Call, OpCase, evaluate
from tests.support.record_ops import RecordOps
from tests.support.shapes import BFLOAT16, FLOAT32, FLOAT64, Dtypes, make_call

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)


def as_function(case: OpCase, call: Call):
    """The op as a function of those of its tensors that are there, and these tensors as leaves."""
    leaves = call.leaves()
    names = [n for n in ("input", "weight", "bias") if getattr(leaves, n) is not None]

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return case.memopt(dataclasses.replace(leaves, **dict(zip(names, tensors, strict=True))))

    return function, tuple(getattr(leaves, n) for n in names)


@every_op
@pytest.mark.parametrize("size", [(3, 5), (2, 1), (1, 4), (2, 2, 3)], ids=str)
def test_gradcheck(case: OpCase, size: tuple[int, ...], device: torch.device) -> None:
    function, tensors = as_function(case, make_call(case, size, FLOAT64, device))
    torch.autograd.gradcheck(function, tensors)


@every_op
@pytest.mark.parametrize("size", [(2, 4), (2, 1), (2, 1, 3)], ids=str)
def test_gradgradcheck(case: OpCase, size: tuple[int, ...], device: torch.device) -> None:
    function, tensors = as_function(case, make_call(case, size, FLOAT64, device))
    torch.autograd.gradgradcheck(function, tensors)


@every_norm
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_gradcheck_and_gradgradcheck_without_weight_or_bias(
    case: OpCase, weight: bool, bias: bool, device: torch.device
) -> None:
    call = make_call(case, (2, 3), FLOAT64, device, weight=weight, bias=bias)
    function, tensors = as_function(case, call)
    torch.autograd.gradcheck(function, tensors)
    torch.autograd.gradgradcheck(function, tensors)


@every_norm
def test_gradcheck_of_two_normalized_dimensions(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (2, 2, 2), FLOAT64, device, normalized_dims=2)
    function, tensors = as_function(case, call)
    torch.autograd.gradcheck(function, tensors)
    torch.autograd.gradgradcheck(function, tensors)


@every_op
def test_gradient_penalty_equals_pytorchs(case: OpCase, device: torch.device) -> None:
    """The usual reason for a double backward, in float32."""

    def penalty(function) -> tuple[torch.Tensor, ...]:
        leaves = make_call(case, (4, 33), FLOAT32, device).leaves()
        (grad,) = torch.autograd.grad(
            function(leaves).square().sum(), leaves.input, create_graph=True
        )
        wanted = [t for t in (leaves.input, leaves.weight, leaves.bias) if t is not None]
        return torch.autograd.grad(grad.square().sum(), wanted)

    for ours, torchs in zip(penalty(case.memopt), penalty(case.torch), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4 * float(torchs.abs().max()))


@every_op
def test_create_graph_gives_the_same_first_gradient(case: OpCase, device: torch.device) -> None:
    leaves = make_call(case, (4, 33), FLOAT64, device).leaves()
    output = case.memopt(leaves)
    (plain,) = torch.autograd.grad(output, leaves.input, leaves.grad_output, retain_graph=True)
    (graph,) = torch.autograd.grad(output, leaves.input, leaves.grad_output, create_graph=True)
    assert graph.requires_grad
    assert not plain.requires_grad
    torch.testing.assert_close(graph.detach(), plain, rtol=1e-12, atol=1e-12)


@every_op
@pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)
def test_backward_twice_with_retain_graph(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    leaves = make_call(case, (9, 130), dtypes, device).leaves()
    wanted = [t for t in (leaves.input, leaves.weight, leaves.bias) if t is not None]
    output = case.memopt(leaves)
    first = torch.autograd.grad(output, wanted, leaves.grad_output, retain_graph=True)
    first = [t.clone() for t in first]
    second = torch.autograd.grad(output, wanted, leaves.grad_output, retain_graph=True)
    third = torch.autograd.grad(output, wanted, leaves.grad_output)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output, wanted, leaves.grad_output)


@every_op
def test_backward_changes_nothing_that_it_is_given(case: OpCase, device: torch.device) -> None:
    leaves = make_call(case, (9, 130), FLOAT32, device).leaves()
    output = case.memopt(leaves)
    output.retain_grad()
    tensors = [leaves.input, leaves.grad_output, output]
    tensors += [t for t in (leaves.weight, leaves.bias) if t is not None]
    before = [(t.detach().clone(), t._version) for t in tensors]
    output.backward(leaves.grad_output)
    for tensor, (value, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), value)
        assert tensor._version == version
    assert torch.equal(output.grad, leaves.grad_output)


@every_op
def test_gradient_that_has_another_consumer_survives(case: OpCase, device: torch.device) -> None:
    """The incoming gradient also goes to a second branch, which must see it as it was."""
    leaves = make_call(case, (9, 130), FLOAT32, device).leaves()
    other = torch.zeros_like(leaves.input, requires_grad=True)
    (case.memopt(leaves) + other).backward(leaves.grad_output)
    assert torch.equal(other.grad, leaves.grad_output)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "input") for case in OP_CASES),
        *((case, "weight") for case in NORM_CASES),
        *((case, "bias") for case in NORM_CASES[1:]),
    ],
    ids=str,
)
def test_in_place_change_of_what_backward_reads_is_an_error(
    case: OpCase, name: str, device: torch.device
) -> None:
    leaves = make_call(case, (9, 130), FLOAT32, device).leaves()
    saved = getattr(leaves, name)
    output = case.memopt(leaves)
    with torch.no_grad():
        saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(leaves.grad_output)


@every_norm
@pytest.mark.parametrize(
    "names",
    [
        names
        for count in (1, 2, 3)
        for names in itertools.combinations(("input", "weight", "bias"), count)
    ],
    ids="+".join,
)
def test_any_subset_of_arguments_may_require_grad(
    case: OpCase, names: tuple[str, ...], device: torch.device
) -> None:
    """Frozen ones get no gradient; the others get the bits that they get when nothing is frozen."""
    call = make_call(case, (67, 130), FLOAT32, device)
    expected = evaluate(case.memopt, call)
    subset = call.map(torch.Tensor.clone)
    for name in names:
        getattr(subset, name).requires_grad_()
    case.memopt(subset).backward(subset.grad_output)
    for name in ("input", "weight", "bias"):
        grad = getattr(subset, name).grad
        if name in names:
            assert torch.equal(grad, getattr(expected, f"grad_{name}")), name
        else:
            assert grad is None, name


@every_norm
@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_backward_computes_only_the_gradients_asked_for(
    case: OpCase, name: str, device: torch.device
) -> None:
    call = make_call(case, (67, 130), FLOAT32, device)
    getattr(call, name).requires_grad_()
    output = case.memopt(call)
    with RecordOps() as ops:
        output.backward(call.grad_output)
    (arguments,) = [args for op, args in ops.calls if op == case.dispatcher_op("backward")]
    output_mask = tuple(bool(wanted) for wanted in arguments[7])
    assert output_mask == tuple(name == n for n in ("input", "weight", "bias"))


@every_op
def test_undefined_gradient(case: OpCase, device: torch.device) -> None:
    """A later node that sends back no gradient leaves the leaves without one, or with zeros."""

    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> None:
            return None

    leaves = make_call(case, (4, 33), FLOAT32, device).leaves()
    NoGradient.apply(case.memopt(leaves)).sum().backward()
    for leaf in (leaves.input, leaves.weight, leaves.bias):
        assert leaf is None or leaf.grad is None or not leaf.grad.any()


@every_op
def test_gradient_is_added_to_an_existing_one(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (4, 33), FLOAT32, device)
    expected = evaluate(case.memopt, call)
    leaves = call.leaves()
    leaves.input.grad = torch.ones_like(leaves.input)
    case.memopt(leaves).backward(leaves.grad_output)
    assert torch.equal(leaves.input.grad, 1 + expected.grad_input)


@every_op
def test_result_is_differentiable_exactly_where_an_argument_is(
    case: OpCase, device: torch.device
) -> None:
    call = make_call(case, (4, 33), FLOAT32, device)
    assert not case.memopt(call).requires_grad
    output = case.memopt(call.leaves())
    assert output.requires_grad
    assert not output.is_leaf
    with torch.no_grad():
        assert not case.memopt(call.leaves()).requires_grad
