"""Proves: first and second derivatives are those of the function (gradcheck, gradgradcheck in
float64), only what is asked for is computed, and backward neither changes what it is given nor
misses a change of what was saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

from tests.support.cases import (
    NORMALIZING_CASES,
    OP_CASES,
    VALUE_CASES,
    Call,
    OpCase,
    as_tuple,
    evaluate,
)
from tests.support.record_ops import RecordOps
from tests.support.shapes import BFLOAT16, FLOAT32, FLOAT64, Dtypes

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_function = pytest.mark.parametrize("case", VALUE_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORMALIZING_CASES, ids=str)


def as_function(case: OpCase, call: Call):
    """The op as a function of its differentiable tensors, and these as leaves."""
    leaves = call.leaves()
    names = list(leaves.differentiable)

    def function(*tensors: torch.Tensor):
        return case.memopt(leaves.replace(**dict(zip(names, tensors, strict=True))))

    return function, tuple(leaves.differentiable.values())


def gradients(outputs, leaves: Call, wanted: list[torch.Tensor], **keywords):
    """Of the outputs with the call's gradients coming in."""
    incoming = list(leaves.incoming.values())
    return torch.autograd.grad(as_tuple(outputs), wanted, incoming, **keywords)


@every_function
@pytest.mark.parametrize("size", [(3, 5), (2, 1), (1, 4), (2, 2, 3)], ids=str)
def test_gradcheck(case: OpCase, size: tuple[int, ...], device: torch.device) -> None:
    function, tensors = as_function(case, case.make_call(size, FLOAT64, device))
    torch.autograd.gradcheck(function, tensors)


@every_function
@pytest.mark.parametrize("size", [(2, 4), (2, 1), (2, 1, 3)], ids=str)
def test_gradgradcheck(case: OpCase, size: tuple[int, ...], device: torch.device) -> None:
    function, tensors = as_function(case, case.make_call(size, FLOAT64, device))
    torch.autograd.gradgradcheck(function, tensors)


@every_norm
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_gradcheck_and_gradgradcheck_without_weight_or_bias(
    case: OpCase, weight: bool, bias: bool, device: torch.device
) -> None:
    call = case.make_call((2, 3), FLOAT64, device, weight=weight, bias=bias)
    function, tensors = as_function(case, call)
    torch.autograd.gradcheck(function, tensors)
    torch.autograd.gradgradcheck(function, tensors)


@every_norm
def test_gradcheck_of_two_normalized_dimensions(case: OpCase, device: torch.device) -> None:
    call = case.make_call((2, 2, 2), FLOAT64, device, normalized_dims=2)
    function, tensors = as_function(case, call)
    torch.autograd.gradcheck(function, tensors)
    torch.autograd.gradgradcheck(function, tensors)


@every_op
def test_gradient_penalty_equals_pytorchs(case: OpCase, device: torch.device) -> None:
    """The usual reason for a double backward, in float32."""

    def penalty(function) -> tuple[torch.Tensor | None, ...]:
        leaves = case.make_call((4, 33), FLOAT32, device).leaves()
        outputs = as_tuple(function(leaves))
        total = sum(output.square().sum() for output in outputs)
        (grad,) = torch.autograd.grad(total, leaves.first, create_graph=True)
        wanted = list(leaves.differentiable.values())
        return torch.autograd.grad(grad.square().sum(), wanted, allow_unused=True)

    for ours, torchs in zip(penalty(case.memopt), penalty(case.torch), strict=True):
        if torchs is None:
            assert ours is None or not ours.any()
            continue
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4 * float(torchs.abs().max()))


@every_op
def test_create_graph_gives_the_same_first_gradient(case: OpCase, device: torch.device) -> None:
    leaves = case.make_call((4, 33), FLOAT64, device).leaves()
    wanted = list(leaves.differentiable.values())
    outputs = case.memopt(leaves)
    plain = gradients(outputs, leaves, wanted, retain_graph=True)
    graph = gradients(outputs, leaves, wanted, create_graph=True)
    assert graph[0].requires_grad == (not case.linear)
    assert not plain[0].requires_grad
    for a, b in zip(graph, plain, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-12, atol=1e-12)


@every_op
@pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)
def test_backward_twice_with_retain_graph(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    leaves = case.make_call((9, 130), dtypes, device).leaves()
    wanted = list(leaves.differentiable.values())
    outputs = case.memopt(leaves)
    first = [t.clone() for t in gradients(outputs, leaves, wanted, retain_graph=True)]
    second = gradients(outputs, leaves, wanted, retain_graph=True)
    third = gradients(outputs, leaves, wanted)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(outputs, leaves, wanted)


@every_op
def test_backward_changes_nothing_that_it_is_given(case: OpCase, device: torch.device) -> None:
    leaves = case.make_call((9, 130), FLOAT32, device).leaves()
    outputs = as_tuple(case.memopt(leaves))
    for output in outputs:
        output.retain_grad()
    incoming = list(leaves.incoming.values())
    tensors = [*leaves.given.values(), *incoming, *outputs]
    before = [(t.detach().clone(), t._version) for t in tensors]
    torch.autograd.backward(outputs, incoming)
    for tensor, (value, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), value)
        assert tensor._version == version
    for output, gradient in zip(outputs, incoming, strict=True):
        assert torch.equal(output.grad, gradient)


@every_op
def test_gradient_that_has_another_consumer_survives(case: OpCase, device: torch.device) -> None:
    """The incoming gradient also goes to a second branch, which must see it as it was."""
    leaves = case.make_call((9, 130), FLOAT32, device).leaves()
    outputs = as_tuple(case.memopt(leaves))
    others = [torch.zeros_like(output, requires_grad=True) for output in outputs]
    sums = [output + other for output, other in zip(outputs, others, strict=True)]
    incoming = list(leaves.incoming.values())
    torch.autograd.backward(sums, incoming)
    for other, gradient in zip(others, incoming, strict=True):
        assert torch.equal(other.grad, gradient)


@every_op
def test_in_place_change_of_what_backward_reads_is_an_error(
    case: OpCase, device: torch.device
) -> None:
    call = case.make_call((9, 130), FLOAT32, device)
    for name in case.read_by_backward(call):
        leaves = call.leaves()
        outputs = as_tuple(case.memopt(leaves))
        with torch.no_grad():
            getattr(leaves, name).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(outputs, list(leaves.incoming.values()))


def subsets(names: Iterable[str]) -> list[tuple[str, ...]]:
    """All of them, or of many names each alone and all but each."""
    names = tuple(names)
    if len(names) <= 3:
        counts = range(1, len(names) + 1)
        return [some for count in counts for some in itertools.combinations(names, count)]
    return [(name,) for name in names] + [tuple(n for n in names if n != name) for name in names]


def backward(outputs: tuple[torch.Tensor, ...], call: Call) -> None:
    """From the outputs that require a gradient: those that are functions of what does."""
    pairs = zip(outputs, call.incoming.values(), strict=True)
    torch.autograd.backward(*zip(*(p for p in pairs if p[0].requires_grad), strict=True))


@every_op
def test_any_subset_of_arguments_may_require_grad(case: OpCase, device: torch.device) -> None:
    """Frozen ones get no gradient; the others get the bits that they get when nothing is frozen."""
    call = case.make_call((67, 130), FLOAT32, device)
    expected = evaluate(case.memopt, call)
    for names in subsets(call.differentiable):
        some = call.map(torch.Tensor.clone)
        for name in names:
            getattr(some, name).requires_grad_()
        backward(as_tuple(case.memopt(some)), some)
        for name, tensor in some.differentiable.items():
            if name in names:
                assert torch.equal(tensor.grad, expected[f"grad_{name}"]), f"{name} of {names}"
            else:
                assert tensor.grad is None, f"{name} of {names}"


@pytest.mark.parametrize("case", [case for case in OP_CASES if case.masked], ids=str)
def test_backward_computes_only_the_gradients_asked_for(case: OpCase, device: torch.device) -> None:
    """output_mask is true for what requires a gradient."""
    for name in case.masked:
        call = case.make_call((67, 130), FLOAT32, device)
        getattr(call, name).requires_grad_()
        outputs = as_tuple(case.memopt(call))
        with RecordOps() as ops:
            backward(outputs, call)
        (arguments,) = ops.arguments_of(case.backward_op)
        mask = list(map(bool, arguments["output_mask"]))
        wanted = [name == n for n in case.masked]
        assert mask == wanted + [False] * (len(mask) - len(wanted))  # RMSNorm has no bias


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

    leaves = case.make_call((4, 33), FLOAT32, device).leaves()
    outputs = as_tuple(case.memopt(leaves))
    sum(NoGradient.apply(output).sum() for output in outputs).backward()
    for leaf in leaves.differentiable.values():
        assert leaf.grad is None or not leaf.grad.any()


@every_op
def test_gradient_is_added_to_an_existing_one(case: OpCase, device: torch.device) -> None:
    call = case.make_call((4, 33), FLOAT32, device)
    expected = evaluate(case.memopt, call)
    leaves = call.leaves()
    for leaf in leaves.differentiable.values():
        leaf.grad = torch.ones_like(leaf)
    torch.autograd.backward(as_tuple(case.memopt(leaves)), list(leaves.incoming.values()))
    for name, leaf in leaves.differentiable.items():
        assert torch.equal(leaf.grad, 1 + expected[f"grad_{name}"]), name


@every_op
def test_result_is_differentiable_exactly_where_an_argument_is(
    case: OpCase, device: torch.device
) -> None:
    call = case.make_call((4, 33), FLOAT32, device)
    for output in as_tuple(case.memopt(call)):
        assert not output.requires_grad
    for output in as_tuple(case.memopt(call.leaves())):
        assert output.requires_grad
        assert not output.is_leaf
    with torch.no_grad():
        for output in as_tuple(case.memopt(call.leaves())):
            assert not output.requires_grad
