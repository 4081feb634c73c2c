"""Proves: a call in chunks of rows returns the bits of the whole call and gives its inputs the bits
of their gradients where products allow; gradients of parameters are as exact as PyTorch's in their
dtype, are summed in a fixed order, and reach hooks once. Any number of rows, strides, several
outputs, arguments without rows, frozen parts, retained graphs and second derivatives will do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memopt._checkpoint import checkpoint
from tests.checkpoint.row_chunks import GatedMLP, H, gradients, in_chunks, inputs
from tests.checkpoint.support import plain
from tests.support.bits import assert_same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_outputs_and_gradients_of_inputs_have_the_bits_of_the_whole_call(
    chunks: int, dtype: torch.dtype
) -> None:
    module = GatedMLP().to(dtype)
    x, grad = inputs(dtype=dtype)
    whole = gradients(plain, module, x, grad)
    assert_same_bits(gradients(in_chunks(chunks), module, x, grad)[:2], whole[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [2, 7, 16])
def test_gradients_of_parameters_are_as_exact_as_pytorchs(chunks: int, dtype: torch.dtype) -> None:
    """By the root of the mean square. Each chunk's product rounds once, and the sum once more."""
    module = GatedMLP().to(dtype)
    x, grad = inputs((8, 64), dtype)
    exact = gradients(plain, copy.deepcopy(module).double(), x.double(), grad.double())

    def errors(results: list[Tensor | None]) -> list[float]:
        pairs = zip(results, exact, strict=True)
        return [float((a.double() - b).square().mean().sqrt()) for a, b in pairs if a is not None]

    ours = errors(gradients(in_chunks(chunks), module, x, grad))
    theirs = errors(gradients(plain, module, x, grad))
    for our, their, value in zip(ours, theirs, exact, strict=True):
        assert value is not None
        rounding = torch.finfo(dtype).eps / 2 * float(value.square().mean().sqrt())
        assert our <= 2 * max(their, rounding)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_of_16_bit_gradients_are_in_float32(dtype: torch.dtype) -> None:
    """In 16 bits 4,096 ones do not add up to more than 2,048 or 256."""
    weight = torch.zeros(1, dtype=dtype, requires_grad=True)
    x = torch.ones(4096, 1, dtype=dtype)
    checkpoint(lambda x: x * weight, x, chunks=4096).sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 4096


def test_the_order_of_the_sums_is_from_the_last_chunk_to_the_first() -> None:
    """Of numbers whose sum depends on it."""
    weight = torch.zeros(1, requires_grad=True)
    x = torch.tensor([[1.0], [-1e8], [1e8]])
    checkpoint(lambda x: x * weight, x, chunks=3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 1.0  # 1e8 - 1e8 + 1; the other way it is 0


@pytest.mark.parametrize("shape", [(7, 1), (1, 1), (2, 1), (3, 5), (1, 0), (0, 4)])
def test_any_number_of_rows(shape: tuple[int, int]) -> None:
    """Not divisible, fewer than chunks, one, none."""
    module = GatedMLP().double()
    x, grad = inputs(shape, torch.float64)
    whole = gradients(plain, module, x, grad)
    ours = gradients(in_chunks(4), module, x, grad)
    for a, b in zip(ours, whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(H,), (6, H), (2, 3, 4, H)])
def test_any_number_of_dims(shape: tuple[int, ...]) -> None:
    module = nn.Sequential(nn.Linear(H, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, grad = torch.randn(shape).double(), torch.randn(*shape[:-1], 3).double()
    ours = gradients(in_chunks(4), module, x, grad)
    for a, b in zip(ours, gradients(plain, module, x, grad), strict=True):
        torch.testing.assert_close(a, b)


def test_the_first_chunks_are_the_larger_ones() -> None:
    sizes: list[list[int]] = []

    def function(x: Tensor) -> Tensor:
        sizes.append(list(x.shape))
        return x.exp()

    x = torch.randn(2, 7, H)
    checkpoint(function, x, chunks=1)
    sizes.clear()
    checkpoint(function, x, chunks=4)
    assert sizes[-4:] == [[1, 4, H], [1, 4, H], [1, 3, H], [1, 3, H]]


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded"])
def test_inputs_and_gradients_of_any_strides(kind: str) -> None:
    def strided() -> Tensor:
        if kind == "transposed":
            return torch.randn(5, 3, H).transpose(0, 1)
        if kind == "sliced":
            return torch.randn(3, 9, H)[:, 1:6]
        return torch.randn(1, 1, H).expand(3, 5, H)

    module = GatedMLP()
    x, grad = strided(), strided()
    whole = gradients(plain, module, x, grad)
    assert_same_bits(gradients(in_chunks(3), module, x, grad)[:2], whole[:2])


class Both(NamedTuple):
    scaled: Tensor
    norms: Tensor


def test_several_outputs_and_arguments_of_all_kinds() -> None:
    """Tensors of the same rows are cut too, with a value per row or several; a weight, a number and
    a scale go whole to every chunk. One output is not used.
    """

    def function(
        x: Tensor, weight: Tensor, factor: float, *, bias: list[Tensor], scale: Tensor
    ) -> tuple[Both, Tensor, None, int]:
        y = (x + bias[0]) @ weight * factor
        return Both(y * scale.unsqueeze(-1), y.norm(dim=-1)), y.argmax(-1), None, 3

    tensors = [torch.randn(2, 5, H), torch.randn(H, 3), torch.randn(2, 5, H), torch.randn(2, 5)]
    tensors = [t.double().requires_grad_() for t in tensors]
    x, weight, bias, scale = tensors

    def run(way: Callable[..., Any]) -> list[Tensor]:
        both, best, nothing, three = way(function, x, weight, 0.5, bias=[bias], scale=scale)
        assert isinstance(both, Both)
        assert (nothing, three) == (None, 3)
        assert not best.requires_grad
        loss = both.scaled.square().sum()
        return [best.double(), *both, *torch.autograd.grad(loss, tensors)]

    for a, b in zip(run(in_chunks(3)), run(plain), strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_parameters_and_inputs_cost_no_gradient() -> None:
    module = GatedMLP()
    x, grad = inputs()
    module.gate.requires_grad_(False)
    ours = gradients(in_chunks(3), module, x, grad)
    assert_same_bits(ours[:2], gradients(plain, module, x, grad)[:2])
    assert module.gate.weight.grad is None
    y = checkpoint(module, x, chunks=3)
    y.backward(grad)
    assert module.up.weight.grad is not None
    module.requires_grad_(False)
    assert not checkpoint(module, x, chunks=3).requires_grad


def test_only_what_is_asked_for_is_computed() -> None:
    """Of the gradient of the input alone no weight's product is made."""
    products: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ == "mm":
                products.append(tuple(result.shape))
            return result

    linear = nn.Linear(H, 3, bias=False)
    x = torch.randn(10, H, requires_grad=True)
    y = checkpoint(lambda x: linear(x.exp()), x, chunks=2)
    with Watch():
        torch.autograd.grad(y.sum(), x)
    assert (3, H) not in products
    assert (H, 3) not in products


def test_retained_graphs_and_partial_backward() -> None:
    module = GatedMLP().double()
    x, grad = inputs(dtype=torch.float64)
    x.requires_grad_()
    y = checkpoint(module, x, chunks=3)
    (first,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    (weight,) = torch.autograd.grad(y, module.up.weight, grad, retain_graph=True)
    (again,) = torch.autograd.grad(y, x, grad)
    assert_same_bits([again], [first])
    expected = torch.autograd.grad(module(x), [x, module.up.weight], grad)
    torch.testing.assert_close([first, weight], list(expected))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, grad)


def test_second_derivatives() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def function(x: Tensor) -> Tensor:
        return checkpoint(module, x, chunks=2)

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))

    def of_weights(way: Callable[..., Any]) -> tuple[Tensor, ...]:
        (gx,) = torch.autograd.grad(way(module, x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gx.square().sum(), list(module.parameters())[:3])

    for a, b in zip(of_weights(in_chunks(2)), of_weights(plain), strict=True):
        torch.testing.assert_close(a, b)


def test_hooks_of_parameters_and_inputs_run_once_with_the_sum() -> None:
    module = GatedMLP().double()
    x, grad = inputs(dtype=torch.float64)
    weight = module.up.weight
    seen: list[Tensor] = []
    accumulated: list[Tensor] = []
    weight.register_hook(seen.append)
    weight.register_post_accumulate_grad_hook(accumulated.append)
    x.requires_grad_().register_hook(seen.append)
    checkpoint(module, x, chunks=4).backward(grad)
    assert len(accumulated) == 1
    expected = torch.autograd.grad(module(x), [weight, x], grad)
    assert sorted(t.numel() for t in seen[:2]) == sorted(t.numel() for t in expected)
    assert len(seen) == 4  # with the two of the call above
    torch.testing.assert_close(weight.grad, expected[0])


def test_a_tensor_that_the_function_closes_over_gets_the_sum() -> None:
    """It is no leaf, and the graph behind it is not part of a chunk."""
    leaf = torch.randn(H, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(6, H, dtype=torch.float64)

    def loss(way: Callable[..., Any]) -> Tensor:
        weight = leaf.sin()
        return (way(lambda x: (x @ weight).tanh(), x) + weight.sum()).square().sum()

    torch.testing.assert_close(
        torch.autograd.grad(loss(in_chunks(4)), leaf), torch.autograd.grad(loss(plain), leaf)
    )


@pytest.mark.parametrize("is_leaf", [False, True])
def test_a_tensor_that_is_passed_at_several_places(is_leaf: bool) -> None:
    """Its gradients are added: a chunk's of one place were written over those of the other."""

    def fn(x: Tensor, others: list[Tensor], *, scale: Tensor) -> Tensor:
        return (x * scale).sin() + others[0].square() + others[1] * x

    def grad(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        given = torch.randn(6, H, requires_grad=True)
        x, z = (given, torch.randn(6, H)) if is_leaf else (given * 2, given.exp())
        return torch.autograd.grad(call(fn, x, [z, x], scale=x).sum(), [given])

    assert_same_bits(
        grad(lambda *args, **kwargs: checkpoint(*args, chunks=3, **kwargs)),
        grad(lambda fn, *args, **kwargs: fn(*args, **kwargs)),
    )
