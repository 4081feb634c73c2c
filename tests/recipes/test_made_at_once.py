"""Proves, of an activation behind a norm over channels inside recipes: its output is made again in
one call, and its gradient computed in one, without the norm's output, which is not in memory in
backward; where the norm's output is there already, it is read. Gradients have the bits of plain
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import memopt
import memopt.functional as MF
from tests.support.allocator import allocated_by
from tests.support.bits import assert_same_bits
from tests.support.record_ops import RecordOps
from tests.support.shapes import channels_last, random_normal

FORWARD = torch.ops.memopt._channel_norm_forward.default
ACTIVATION = torch.ops.memopt._activation_forward.default
GRADIENT = torch.ops.memopt._channel_norm_activation_backward.default
CHANNELS = 8

Norm = Callable[..., Tensor]
NORMS: dict[str, Norm] = {
    "group_norm": lambda x, *affine: MF.group_norm(x, 2, *affine),
    "instance_norm": lambda x, w, b: MF.instance_norm(x, weight=w, bias=b),
    "batch_norm": lambda x, *affine: MF.batch_norm(x, None, None, *affine, training=True),
}


def tensors(layout: Callable[[Tensor], Tensor] = torch.clone) -> list[Tensor]:
    """Input, weight and bias of a norm, and a kernel."""
    sizes = ((2, CHANNELS, 12, 11), (CHANNELS,), (CHANNELS,), (4, CHANNELS, 3, 3))
    made = [random_normal(*size, seed=seed).float() for seed, size in enumerate(sizes)]
    return [t.requires_grad_() for t in (layout(made[0]), *made[1:])]


def block(norm: Norm, activation: str, x: Tensor, w: Tensor, b: Tensor, kernel: Tensor) -> Tensor:
    return F.conv2d(MF.activation(norm(x, w, b), activation), kernel)


def recorded(output: Tensor, retain: bool = False) -> RecordOps:
    with RecordOps() as record:
        output.square().sum().backward(retain_graph=retain)
    return record


def gradients(leaves: list[Tensor]) -> list[Tensor | None]:
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def in_recipes(run: Callable[[], Tensor], leaves: list[Tensor]) -> RecordOps:
    """The backward of what runs inside recipes, whose gradients have the bits of a plain run."""
    recorded(run())
    expected = gradients(leaves)
    with memopt.recipes():
        output = run()
    record = recorded(output)
    assert_same_bits(gradients(leaves), expected)
    return record


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu_tanh"])
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_one_call_makes_the_activation(
    norm: str, activation: str, layout: Callable[[Tensor], Tensor]
) -> None:
    leaves = tensors(layout)
    run = partial(block, NORMS[norm], activation, *leaves)
    record = in_recipes(run, leaves)
    assert ACTIVATION not in record.ops
    assert [call["activation"] for call in record.arguments_of(FORWARD)] == [activation]
    assert [call["activation"] for call in record.arguments_of(GRADIENT)] == [activation]


def test_in_place_too() -> None:
    leaves = tensors()

    def run() -> Tensor:
        y = MF.group_norm(leaves[0], 2, *leaves[1:3])
        MF.activation_(y, "hardswish")
        return F.conv2d(y, leaves[3])

    record = in_recipes(run, leaves)
    assert record.arguments_of(FORWARD)[0]["activation"] == "hardswish"


class Consumer(torch.autograd.Function):
    """Reads its input and its gradient in backward, as a convolution does, and makes one."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return grad * z


def test_the_norms_output_is_not_there_while_a_consumer_runs_backward() -> None:
    """Three tensors at a time, of the size of the norm's: the activation, its consumer's two
    gradients. It was one more.
    """
    x = torch.randn(1, 64, 64, 64, requires_grad=True)
    weight = torch.randn_like(x)
    with memopt.recipes():
        loss = (Consumer.apply(MF.silu(MF.group_norm(x, 8))) * weight).sum()
    peak = allocated_by(lambda: torch.autograd.grad(loss, x, retain_graph=True))
    assert peak < 3.1 * x.nbytes


def test_the_norms_output_is_not_there_while_the_activation_runs_backward() -> None:
    """Two tensors at a time, the gradients of what each op makes and of what it reads."""
    x = torch.randn(1, 64, 64, 64, requires_grad=True)
    weight = torch.randn_like(x)
    with memopt.recipes():
        loss = (MF.silu(MF.group_norm(x, 8)) * weight).sum()
    peak = allocated_by(lambda: torch.autograd.grad(loss, x, retain_graph=True))
    assert peak < 2.1 * x.nbytes


def test_a_gradient_in_another_order_takes_the_activations_own() -> None:
    leaves = tensors()
    grad = channels_last(random_normal(2, CHANNELS, 12, 11, seed=9).float())

    def run() -> Tensor:
        return MF.activation(MF.group_norm(leaves[0], 2, *leaves[1:3]), "silu")

    expected = torch.autograd.grad(run(), leaves[:3], grad)
    with memopt.recipes():
        output = run()
    with RecordOps() as record:
        found = torch.autograd.grad(output, leaves[:3], grad)
    assert_same_bits(list(found), list(expected))
    assert GRADIENT not in record.ops


def test_second_derivatives_are_those_of_plain_calls() -> None:
    leaves = tensors()

    def penalty() -> list[Tensor]:
        output = block(NORMS["group_norm"], "silu", *leaves)
        (grad,) = torch.autograd.grad(output.square().sum(), leaves[0], create_graph=True)
        return list(torch.autograd.grad(grad.square().sum(), leaves[:3]))

    expected = penalty()
    with memopt.recipes():
        found = penalty()
    assert_same_bits(found, expected)


def test_hooks_of_others_see_the_norms_output() -> None:
    """Who stands between the node and the recipe gets what was saved, as before."""
    leaves = tensors()
    seen: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    def run() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            return MF.activation(MF.group_norm(leaves[0], 2, *leaves[1:3]), "silu")

    record = in_recipes(run, leaves)
    assert GRADIENT not in record.ops
    assert any(tensor.shape == leaves[0].shape for tensor in seen)


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    leaves = tensors()
    with memopt.recipes():
        output = block(NORMS["group_norm"], "silu", *leaves)
    first = recorded(output, retain=True)
    expected = gradients(leaves)
    second = recorded(output)
    assert_same_bits(gradients(leaves), expected)
    assert first.ops == second.ops


def test_what_another_reader_has_made_is_read() -> None:
    """A convolution behind the norm itself, whose backward comes first, has its output made."""
    leaves = tensors()

    def run() -> Tensor:
        y = MF.group_norm(leaves[0], 2, *leaves[1:3])
        early = F.conv2d(MF.activation(y, "silu"), leaves[3])
        return early + F.conv2d(y, leaves[3])

    record = in_recipes(run, leaves)
    assert [call.get("activation") for call in record.arguments_of(FORWARD)] == [None]
    assert record.ops.count(ACTIVATION) == 1
    assert GRADIENT not in record.ops


def test_a_dropped_activation_is_made_as_before() -> None:
    leaves = tensors()

    def run() -> Tensor:
        torch.manual_seed(0)
        y = MF.group_norm(leaves[0], 2, *leaves[1:3])
        return F.conv2d(MF.activation_dropout(y, 0.5, activation="silu"), leaves[3])

    record = in_recipes(run, leaves)
    assert GRADIENT not in record.ops
    assert all(call.get("activation") is None for call in record.arguments_of(FORWARD))


def test_an_activation_of_a_view_is_made_as_before() -> None:
    leaves = tensors()

    def run() -> Tensor:
        y = MF.group_norm(leaves[0], 2, *leaves[1:3])
        return F.conv2d(MF.activation(y[:, :, 1:], "silu"), leaves[3])

    record = in_recipes(run, leaves)
    assert all(call.get("activation") is None for call in record.arguments_of(FORWARD))
