"""Proves: saved-tensor hooks around memopt.recipes() get every tensor that has no recipe and no
other, once each; hooks inside get all; and the order of nesting changes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import memopt
import memopt.functional as M
from memopt._extension import _C
from tests.recipes.support import FEATURES, leaf

pytestmark = pytest.mark.usefixtures("collector_off")

X = leaf(6, FEATURES)
TURNED = leaf(FEATURES, 6, seed=7)
W, B = leaf(FEATURES, seed=1), leaf(FEATURES, seed=2)
LINEARS = [leaf(FEATURES, FEATURES, seed=3 + i) for i in range(3)]
LEAVES = [X, W, B, *LINEARS]


def run() -> Tensor:
    h = M.layer_norm(X, (FEATURES,), W, B)
    q, k, v = (F.linear(h, linear) for linear in LINEARS)
    return F.linear(M.gelu(q + k * v), LINEARS[0]).square().mean()


class Recorder:
    def __init__(self) -> None:
        self.packed: list[Tensor] = []
        self.unpacked: list[int] = []

    def hooks(self) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> int:
            self.packed.append(tensor.clone())
            return len(self.packed) - 1

        def unpack(index: int) -> Tensor:
            self.unpacked.append(index)
            return self.packed[index]

        return saved_tensors_hooks(pack, unpack)


def test_hooks_around_get_what_has_no_recipe() -> None:
    expected = torch.autograd.grad(run(), LEAVES)
    plain, around = Recorder(), Recorder()
    with plain.hooks():
        run()
    with around.hooks(), memopt.recipes():
        loss = run()
    # Three linears save the norm's output and one the GELU's.
    assert len(around.packed) == len(plain.packed) - 4
    for a, e in zip(torch.autograd.grad(loss, LEAVES), expected, strict=True):
        assert torch.equal(a, e)
    # A tensor that a recipe reads and the op itself reads comes back once for both.
    assert sorted(around.unpacked) == list(range(len(around.packed)))


def test_hooks_inside_get_everything() -> None:
    expected = torch.autograd.grad(run(), LEAVES)
    plain, inside = Recorder(), Recorder()
    with plain.hooks():
        run()
    with memopt.recipes(), inside.hooks():
        loss = run()
    assert len(inside.packed) == len(plain.packed)
    for a, e in zip(torch.autograd.grad(loss, LEAVES), expected, strict=True):
        assert torch.equal(a, e)


Nesting = Callable[[Callable[[], Tensor]], Tensor]


def under(*contexts: Callable[[], object]) -> Nesting:
    def call(f: Callable[[], Tensor]) -> Tensor:
        if not contexts:
            return f()
        with contexts[0]():  # type: ignore[attr-defined]
            return under(*contexts[1:])(f)

    return call


NESTINGS = {
    "save_on_cpu around": under(save_on_cpu, memopt.recipes),
    "save_on_cpu inside": under(memopt.recipes, save_on_cpu),
    "both": under(save_on_cpu, memopt.recipes, save_on_cpu, memopt.recipes),
    "twice": under(memopt.recipes, memopt.recipes),
    "region around": lambda f: memopt.checkpoint(lambda: under(memopt.recipes)(f)),
    "region inside": lambda f: under(memopt.recipes)(lambda: memopt.checkpoint(f)),
    "region, save_on_cpu, recipes": lambda f: memopt.checkpoint(
        lambda: under(save_on_cpu, memopt.recipes)(f)
    ),
    "save_on_cpu, region, recipes": lambda f: under(save_on_cpu)(
        lambda: memopt.checkpoint(lambda: under(memopt.recipes)(f))
    ),
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_the_order_of_nesting_changes_no_gradient(nesting: str) -> None:
    live = _C.live_handles()
    expected = torch.autograd.grad(run(), LEAVES)
    loss = NESTINGS[nesting](run)
    first = torch.autograd.grad(loss, LEAVES, retain_graph=True)
    second = torch.autograd.grad(loss, LEAVES)
    for a, b, e in zip(first, second, expected, strict=True):
        assert torch.equal(a, e)
        assert torch.equal(b, e)
    del loss
    assert _C.live_handles() == live


def test_hooks_that_change_strides() -> None:
    """save_on_cpu gives a transposed tensor back contiguous; the output made from it is not."""

    def strided() -> Tensor:
        return F.linear(M.gelu(TURNED.t() * 1), LINEARS[0]).square().sum()

    expected = torch.autograd.grad(strided(), [TURNED, LINEARS[0]])
    with save_on_cpu(), memopt.recipes():
        loss = strided()
    for a, e in zip(torch.autograd.grad(loss, [TURNED, LINEARS[0]]), expected, strict=True):
        assert torch.equal(a, e)


def test_errors_of_hooks_around_come_through() -> None:
    def bad_pack(tensor: Tensor) -> Tensor:
        raise ValueError("cannot pack")

    with (
        pytest.raises(ValueError, match="cannot pack"),
        saved_tensors_hooks(bad_pack, lambda t: t),
        memopt.recipes(),
    ):
        run()

    def bad_unpack(tensor: Tensor) -> Tensor:
        raise ValueError("cannot unpack")

    with saved_tensors_hooks(lambda t: t, bad_unpack), memopt.recipes():
        loss = run()
    with pytest.raises(ValueError, match="cannot unpack"):
        loss.backward()

    with saved_tensors_hooks(lambda t: t, lambda t: 3), memopt.recipes():
        loss = run()
    with pytest.raises(TypeError, match="must return a tensor, got int"):
        loss.backward()
