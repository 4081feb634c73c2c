"""A small model of memopt's ops and PyTorch's, and how it is run with and without recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

import memopt
from memopt._extension import _C
from memopt.memory.saved import SavedTensors

FEATURES = 16


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def kept_bytes(
    run: Callable[[], object], exclude: Iterable[Tensor] = (), recipes: bool = True
) -> int:
    """What is saved for backward while `run` runs and has no recipe; 16 bytes of a state count."""
    with SavedTensors(exclude=exclude) as saved, scope(recipes):
        result = run()
    del result
    return saved.bytes


def scope(recipes: bool):  # type: ignore[no-untyped-def]
    return memopt.recipes() if recipes else nullcontext()


def gradients(
    run: Callable[[], Tensor], leaves: list[Tensor], recipes: bool
) -> tuple[Tensor | None, ...]:
    torch.manual_seed(1)
    with scope(recipes):
        loss = run()
    loss.backward()  # and not grad(), which PyTorch's reentrant checkpoints refuse
    found = tuple(tensor.grad for tensor in leaves)
    for tensor in leaves:
        tensor.grad = None
    return found


def assert_same_gradients(run: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    """With recipes and without, in every bit; and nothing stays alive."""
    live = _C.live_handles()
    expected = gradients(run, leaves, recipes=False)
    actual = gradients(run, leaves, recipes=True)
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        assert a is None or torch.equal(a, e)
    assert _C.live_handles() == live
