"""Proves: transforms of torch.func, torch.autograd.functional and forward-mode differentiation over
a region give the plain results, those inside a region too where PyTorch lets saved-tensor hooks be,
and batched backward (is_grads_batched) goes through regions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from torch.autograd import functional as autograd_functional
from torch.utils import _pytree as pytree

from memopt._checkpoint import checkpoint, checkpoint_wrapper
from tests.checkpoint.support import CountCalls, every_way, plain
from tests.support.bits import assert_same_bits

Function = Callable[[Tensor], Tensor]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4)


@pytest.fixture
def direction() -> Tensor:
    return torch.randn(4)


def scalar(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).sum()


def vector(x: Tensor) -> Tensor:
    return x.sin() * x.exp().sum()


# (transform, function): called with a function, a point and a direction.
TRANSFORMS: dict[str, tuple[Callable[[Function, Tensor, Tensor], Any], Function]] = {
    "grad": (lambda f, x, v: func.grad(f)(x), scalar),
    "grad of grad": (lambda f, x, v: func.grad(lambda x: func.grad(f)(x).sum())(x), scalar),
    "vjp": (lambda f, x, v: func.vjp(f, x)[1](v), vector),
    "jvp": (lambda f, x, v: func.jvp(f, (x,), (v,)), vector),
    "vmap": (lambda f, x, v: func.vmap(f)(torch.stack([x, v])), vector),
    "vmap of grad": (lambda f, x, v: func.vmap(func.grad(f))(torch.stack([x, v])), scalar),
    "jacrev": (lambda f, x, v: func.jacrev(f)(x), vector),
    "jacfwd": (lambda f, x, v: func.jacfwd(f)(x), vector),
    "hessian": (lambda f, x, v: func.hessian(f)(x), scalar),
    "functional.jvp": (lambda f, x, v: autograd_functional.jvp(f, x, v), vector),
    "functional.jacobian": (lambda f, x, v: autograd_functional.jacobian(f, x), vector),
    "functional.jacobian, vectorized": (
        lambda f, x, v: autograd_functional.jacobian(f, x, vectorize=True),
        vector,
    ),
    "functional.hessian": (lambda f, x, v: autograd_functional.hessian(f, x), scalar),
}
every_transform = pytest.mark.parametrize("name", TRANSFORMS)


@every_transform
@pytest.mark.parametrize("nested", [False, True])
def test_transforms_over_a_region(name: str, nested: bool, x: Tensor, direction: Tensor) -> None:
    transform, function = TRANSFORMS[name]

    def region(x: Tensor) -> Tensor:
        if nested:
            return checkpoint(lambda x: checkpoint(function, x), x)
        return checkpoint(function, x)

    actual, expected = transform(region, x, direction), transform(function, x, direction)
    assert_same_bits(pytree.tree_leaves(actual), pytree.tree_leaves(expected))


def test_gradients_of_a_wrapped_module_by_functional_call(x: Tensor) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return func.functional_call(module, parameters, x).sum()

    expected = func.grad(loss)(parameters)
    checkpoint_wrapper(module)
    assert_same_bits(func.grad(loss)(parameters).values(), expected.values())


def by_dual_numbers(function: Function, x: Tensor, direction: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent


def test_dual_numbers_through_a_region(x: Tensor, direction: Tensor) -> None:
    tangents = [
        by_dual_numbers(lambda t, way=way: way(vector, t), x, direction)
        for way in (plain, checkpoint)
    ]
    assert torch.equal(tangents[1], tangents[0])


@pytest.mark.parametrize("part", ["primal", "tangent"])
def test_gradients_of_dual_numbers_through_a_region(
    part: str, x: Tensor, direction: Tensor
) -> None:
    leaf = x.requires_grad_()
    results = []
    for way in (plain, checkpoint):
        with forward_ad.dual_level():
            result = forward_ad.unpack_dual(way(vector, forward_ad.make_dual(leaf, direction)))
            results.append(torch.autograd.grad(getattr(result, part).sum(), leaf))
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("part", ["primal", "tangent"])
def test_tangents_that_have_gone_before_the_recompute_are_noticed(
    part: str, x: Tensor, direction: Tensor
) -> None:
    """Without them it saves fewer tensors, whose places are others: never a wrong gradient."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(), direction)
        result = getattr(forward_ad.unpack_dual(checkpoint(vector, dual)), part)
    with pytest.raises(RuntimeError, match=r"recompute of region .*vector must save"):
        result.sum().backward()


# Functions of x and a direction that use a transform themselves.
INSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dual numbers": lambda x, v: by_dual_numbers(vector, x, v).exp(),
    "jvp": lambda x, v: func.jvp(vector, (x,), (v,))[1].exp(),
    "vmap": lambda x, v: func.vmap(lambda row: row.sin() * x.sum())(torch.stack([x, v])).exp(),
    "jacfwd": lambda x, v: func.jacfwd(vector)(x).exp(),
}


@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE.keys())
def test_transforms_inside_a_region(
    inside: Callable[[Tensor, Tensor], Tensor], x: Tensor, direction: Tensor
) -> None:
    leaf = x.requires_grad_()
    y, expected = checkpoint(inside, leaf, direction), inside(leaf, direction)
    assert_same_bits(
        [y, *torch.autograd.grad(y.sum(), leaf)],
        [expected, *torch.autograd.grad(expected.sum(), leaf)],
    )


@every_way
def test_reverse_mode_transforms_inside_a_region_are_refused(
    way: Callable[..., Any], x: Tensor
) -> None:
    """They allow no saved-tensor hooks around them. What raises leaves no hook behind."""
    named = "memopt's region .*<lambda> must not call torch.func.grad.*" * (way is checkpoint)
    with pytest.raises(RuntimeError, match=named + "saved tensor hooks"):
        way(lambda x: func.grad(scalar)(x).exp(), x.requires_grad_())
    assert isinstance(x.exp().grad_fn._saved_result, Tensor)
    assert torch.equal(func.grad(scalar)(x), func.grad(scalar)(x.detach()))


def test_batched_backward_through_a_region(x: Tensor) -> None:
    """The recompute is the same for all rows, and made once."""
    count, leaf = CountCalls(), x.requires_grad_()
    rows = torch.eye(4)
    results = [
        torch.autograd.grad(
            way(lambda x: vector(count(x)).exp(), leaf), leaf, rows, is_grads_batched=True
        )
        for way in (plain, checkpoint)
    ]
    assert_same_bits(results[1], results[0])
    assert count.calls == 3


def test_batched_backward_through_a_region_with_dropout(x: Tensor) -> None:
    leaf = x.requires_grad_()
    results = []
    for way in (plain, checkpoint):
        torch.manual_seed(0)
        y = way(lambda x: F.dropout(x, 0.5).exp().sin(), leaf)
        results.append(torch.autograd.grad(y, leaf, torch.eye(4), is_grads_batched=True))
    assert_same_bits(results[1], results[0])


def test_batched_backward_through_chunks_of_rows() -> None:
    """Gradients of inputs, of which each chunk has rows, and of parameters, which are sums."""
    module, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(6, 4)
    leaves = [x.requires_grad_(), *module.parameters()]
    rows = torch.eye(6)
    whole, in_chunks = (
        torch.autograd.grad(way(module, x).sum(-1), leaves, rows, is_grads_batched=True)
        for way in (plain, lambda *args: checkpoint(*args, chunks=3))
    )
    assert_same_bits(in_chunks[:1], whole[:1])
    torch.testing.assert_close(in_chunks, whole)
