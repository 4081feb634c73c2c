"""Proves: an activation that writes over its input keeps PyTorch's semantics to the letter, whoever
holds the tensor, and loses nothing that a recipe can make again: behind a norm it keeps not a byte,
elsewhere what it overwrites and not its result.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
import memopt.functional as M
from memopt._extension import _C
from tests.recipes.support import assert_same_gradients, gradients, kept_bytes, leaf
from tests.support.cases.activation import SCALARS

pytestmark = pytest.mark.usefixtures("collector_off")

SHAPE = (2, 6, 3, 5)
FEATURES = SHAPE[-1]
ONE = 2 * 6 * 3 * 5 * 4
STATISTICS = 2 * 6 * 3 * 8
X, W, B = leaf(*SHAPE), leaf(FEATURES, seed=1), leaf(FEATURES, seed=2)
KERNEL = leaf(4, 6, 3, 3, seed=3)
LEAVES = [X, W, B, KERNEL]

# PyTorch's in-place op saves its result, which the next layer saves as well, or a clone of what it
# overwrites.
SAVES_RESULT = {
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "leaky_relu": lambda x: F.leaky_relu(x, SCALARS["leaky_relu"], inplace=True),
    "elu": lambda x: F.elu(x, SCALARS["elu"], inplace=True),
}
SAVES_CLONE = {
    "relu6": lambda x: F.relu6(x, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
}
TORCH: dict[str, Callable[[Tensor], Tensor]] = {**SAVES_RESULT, **SAVES_CLONE}

every_activation = pytest.mark.parametrize("name", M.ACTIVATIONS)
every_of_torch = pytest.mark.parametrize("name", TORCH)


def over(x: Tensor, name: str) -> Tensor:
    return M.activation_(x, name, SCALARS.get(name))


def apart(x: Tensor, name: str) -> Tensor:
    return M.activation(x, name, SCALARS.get(name))


Activate = Callable[[Tensor, str], Tensor]


def assert_same_as_apart(run: Callable[[Activate], Tensor]) -> None:
    """The gradients of ops that write elsewhere, in every bit, both with recipes."""
    live = _C.live_handles()
    actual, expected = (
        gradients(lambda: run(activate), LEAVES, recipes=True)  # noqa: B023
        for activate in (over, apart)
    )
    for a, b in zip(actual, expected, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    assert _C.live_handles() == live


def norm() -> Tensor:
    return M.layer_norm(X, (FEATURES,), W, B)


def convolved(x: Tensor) -> Tensor:
    return F.conv2d(x, KERNEL, padding=1)


@every_activation
def test_behind_a_norm_nothing_is_kept_but_what_the_norm_keeps(name: str) -> None:
    def run() -> Tensor:
        return convolved(over(norm(), name))

    assert kept_bytes(run, [W, B, KERNEL]) == ONE + STATISTICS
    if name not in SAVES_RESULT:  # which are PyTorch's without recipes
        assert_same_gradients(lambda: run().square().sum(), LEAVES)


@every_activation
def test_gradients_have_the_bits_of_the_op_that_writes_elsewhere(name: str) -> None:
    assert_same_as_apart(lambda activate: convolved(activate(norm(), name)).sum())


@pytest.mark.parametrize("name", SAVES_CLONE)
def test_elsewhere_a_clone_of_the_input_is_kept_and_the_result_is_not(name: str) -> None:
    """PyTorch's keeps both."""
    torchs = lambda: convolved(TORCH[name](X * 2))  # noqa: E731
    ours = lambda: convolved(over(X * 2, name))  # noqa: E731
    assert kept_bytes(torchs, [KERNEL], recipes=False) == 2 * ONE
    assert kept_bytes(ours, [KERNEL]) == ONE
    assert_same_gradients(lambda: ours().square().sum(), LEAVES[::3])


@pytest.mark.parametrize("name", SAVES_RESULT)
def test_elsewhere_one_whose_result_is_enough_is_pytorch_s(name: str) -> None:
    torchs = lambda: convolved(TORCH[name](X * 2)).square().sum()  # noqa: E731
    ours = lambda: convolved(over(X * 2, name)).square().sum()  # noqa: E731
    assert kept_bytes(lambda: convolved(over(X * 2, name)), [KERNEL]) == ONE
    for a, b in zip(
        gradients(ours, [X, KERNEL], recipes=True),
        gradients(torchs, [X, KERNEL], recipes=False),
        strict=True,
    ):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_one_behind_the_other() -> None:
    """Recipes chain through what is overwritten again and again in one piece of memory."""

    def run(activate: Activate) -> Tensor:
        h = norm()
        for name in ("relu", "hardswish", "sigmoid", "leaky_relu", "silu"):
            h = activate(h, name)
        return convolved(h)

    assert kept_bytes(lambda: run(over), [W, B, KERNEL]) == ONE + STATISTICS
    assert_same_as_apart(lambda activate: run(activate).square().sum())


@every_of_torch
def test_whoever_holds_the_tensor_finds_the_activated_values(name: str) -> None:
    h = norm()
    expected = TORCH[name](h.detach().clone())
    with memopt.recipes():
        h = norm()
        view, alias, version = h[0, 1:], h.detach(), h._version
        result = over(h, name)
    assert result is h
    assert h._version == version + 1
    for seen in (h, result, alias):
        torch.testing.assert_close(seen, expected)
    torch.testing.assert_close(view, expected[0, 1:])


@every_of_torch
def test_a_view_read_after_it_has_the_gradient_of_the_activated_values(name: str) -> None:
    def run(activate: Callable[[Tensor], Tensor]) -> Tensor:
        h = norm()
        view = h.transpose(1, 2)[0]
        activate(h)
        return (view * 3).sin().sum() + h.square().sum()

    expected = gradients(lambda: run(TORCH[name]), LEAVES[:3], recipes=False)
    for a, b in zip(
        gradients(lambda: run(lambda x: over(x, name)), LEAVES[:3], recipes=True),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_hooks_and_retained_gradients_see_what_they_see_in_pytorch() -> None:
    def run(activate: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        seen: list[Tensor] = []
        h = norm()
        h.retain_grad()
        h.register_hook(lambda grad: seen.append(grad.clone()))
        activate(h)
        h.register_hook(lambda grad: seen.append(grad.clone()))
        h.square().sum().backward()
        assert h.grad is not None
        for tensor in LEAVES:
            tensor.grad = None
        return seen, h.grad

    expected, retained = run(TORCH["silu"])
    with memopt.recipes():
        seen, grad = run(lambda x: over(x, "silu"))
    assert len(seen) == len(expected) == 2
    for a, b in zip([*seen, grad], [*expected, retained], strict=True):
        torch.testing.assert_close(a, b)


@every_of_torch
def test_what_another_op_has_saved_of_the_input_raises_as_in_pytorch(name: str) -> None:
    with memopt.recipes():
        h = X * 2
        other = h.square()
        over(h, name)
        loss = other.sum() + h.sum()
    with pytest.raises(RuntimeError, match=r"must not be written in place|inplace operation"):
        torch.autograd.grad(loss, X)


def test_what_another_op_has_saved_of_a_norm_s_output_is_made_as_it_was() -> None:
    with memopt.recipes():
        h = norm()
        other = h.square()
        over(h, "silu")
        loss = other.sum() + h.sum()
    found = torch.autograd.grad(loss, LEAVES[:3])
    h = norm()
    expected = torch.autograd.grad(h.square().sum() + M.silu(h).sum(), LEAVES[:3])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_recipe_that_reads_what_is_overwritten_begins_at_the_norm() -> None:
    def run(activate: Activate) -> Tensor:
        h = norm()
        first = M.gelu(h)
        return convolved(first) + convolved(activate(h, "silu"))

    assert kept_bytes(lambda: run(over), [W, B, KERNEL]) == ONE + STATISTICS
    assert_same_as_apart(lambda activate: run(activate).square().sum())


def test_written_again_by_others_it_is_kept() -> None:
    def run(activate: Activate) -> Tensor:
        h = activate(norm(), "relu")
        h += 1
        return convolved(h)

    assert kept_bytes(lambda: run(over), [W, B, KERNEL]) == 2 * ONE + STATISTICS
    assert_same_as_apart(lambda activate: run(activate).square().sum())


@every_of_torch
def test_what_pytorch_refuses_is_refused(name: str) -> None:
    with memopt.recipes():
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            over(X, name)
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            over(X[0], name)
    before = X.detach().clone()
    with torch.no_grad(), memopt.recipes():
        copy = over(X.detach().clone(), name)
    torch.testing.assert_close(copy, TORCH[name](before.clone()))
    assert torch.equal(X, before)


@every_of_torch
@pytest.mark.parametrize("made", ["view", "strided", "expanded"])
def test_views_and_other_layouts(name: str, made: str) -> None:
    def run(activate: Callable[[Tensor], Tensor]) -> Tensor:
        h = norm()
        part = {"view": lambda: h[1], "strided": lambda: h[..., ::2], "expanded": lambda: h}[made]()
        if made == "expanded":
            part = (h.mean(1, keepdim=True).expand(SHAPE)).contiguous().transpose(1, 3)
        activate(part)
        return part.sin().sum() + h.cos().sum()

    expected = gradients(lambda: run(TORCH[name]), LEAVES[:3], recipes=False)
    actual = gradients(lambda: run(lambda x: over(x, name)), LEAVES[:3], recipes=True)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_channels_last_is_written_where_it_lies() -> None:
    def run() -> Tensor:
        h = M.silu(X.contiguous(memory_format=torch.channels_last))
        assert h.is_contiguous(memory_format=torch.channels_last)
        return convolved(over(h, "relu"))

    assert kept_bytes(run, [KERNEL]) == ONE
    assert_same_gradients(lambda: run().square().sum(), LEAVES[::3])


@every_activation
def test_second_derivatives_are_those_of_the_op_that_writes_elsewhere(name: str) -> None:
    def second(activate: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with memopt.recipes():
            loss = activate(norm()).square().sum()
        (first,) = torch.autograd.grad(loss, X, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), LEAVES[:3], allow_unused=True)

    scalar = SCALARS.get(name)
    for a, b in zip(
        second(lambda h: over(h, name)),
        second(lambda h: M.activation(h, name, scalar)),
        strict=True,
    ):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_nothing_stays_alive() -> None:
    live = _C.live_handles()
    with memopt.recipes():
        h = over(norm(), "silu")
    assert _C.live_handles() > live
    del h
    gc.collect()
    assert _C.live_handles() == live


def test_bad_input_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"activation_: activation must be one of .* 'tanhh'"):
        M.activation_(torch.ones(2), "tanhh")
    with pytest.raises(RuntimeError, match="activation_: input must have dtype float32"):
        M.activation_(torch.ones(2, dtype=torch.int32), "relu")
    with pytest.raises(RuntimeError, match="activation_scalar must be finite and positive"):
        M.activation_(torch.ones(2), "leaky_relu", -1.0)
