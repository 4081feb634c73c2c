"""Proves: what watches an activation that writes over its input sees no write that no version
counts, and hooks of others, policies and regions get tensors that hold their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memopt
import memopt.functional as M
from tests.recipes.support import gradients
from tests.recipes.test_in_place import FEATURES, LEAVES, B, W, X, convolved, norm, over
from tests.support.bits import assert_same_bits


class Watch(TorchDispatchMode):
    """Keeps every tensor that it sees as it was, with the version that it had."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, int, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in [*args, result]:
            if isinstance(tensor, Tensor):
                self.seen.append((tensor, tensor._version, tensor.clone()))
        return result


def test_a_mode_sees_no_write_that_no_version_counts() -> None:
    with Watch() as watch, memopt.recipes():
        loss = convolved(over(norm(), "silu")).sum()
        torch.autograd.grad(loss, LEAVES)
    for tensor, version, copy in watch.seen:
        assert tensor._version > version or torch.equal(tensor, copy)


def test_hooks_inside_get_tensors_that_hold_their_values() -> None:
    """Hooks that are entered inside get all; there is no recipe then, and they get a clone."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with memopt.recipes(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = convolved(over(norm(), "silu")).sum()
    assert all(tensor.untyped_storage().nbytes() > 0 for tensor in packed)
    found = torch.autograd.grad(loss, LEAVES)
    expected = torch.autograd.grad(convolved(M.silu(norm())).sum(), LEAVES)
    assert_same_bits(found, expected)


POLICIES = {
    "recipes": "recipe",
    "by values": lambda tensor: "recipe" if tensor.sum() > 0 else "keep",
    "kept": "keep",
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_policies_and_hooks_around_get_tensors_that_hold_their_values(policy: Any) -> None:
    packed: list[Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor
    )
    with keep, memopt.saved_tensors(policy):
        loss = convolved(over(norm(), "hardswish")).sum()
    assert all(tensor.untyped_storage().nbytes() > 0 for tensor in packed)
    found = torch.autograd.grad(loss, LEAVES)
    expected = torch.autograd.grad(convolved(M.hardswish(norm())).sum(), LEAVES)
    assert_same_bits(found, expected)


REGIONS: dict[str, Callable[..., Tensor]] = {
    "memopt": memopt.checkpoint,
    "torch": lambda f, *args: torch_checkpoint(f, *args, use_reentrant=False),
    "torch, reentrant": lambda f, *args: torch_checkpoint(f, *args, use_reentrant=True),
}


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
@pytest.mark.parametrize("name", ["relu", "silu"])
@pytest.mark.parametrize("around", [True, False], ids=["recipes around", "recipes inside"])
def test_inside_regions(region: Callable[..., Tensor], name: str, around: bool) -> None:
    def block(x: Tensor) -> Tensor:
        h = over(M.layer_norm(x, (FEATURES,), W, B), name)
        return convolved(over(h * 2, name))

    def inside(x: Tensor) -> Tensor:
        with memopt.recipes():
            return block(x)

    expected = gradients(lambda: block(X).square().sum(), LEAVES, recipes=False)
    actual = gradients(
        lambda: region(block if around else inside, X * 1.0).square().sum(), LEAVES, around
    )
    for a, b in zip(actual, expected, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
