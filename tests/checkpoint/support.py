"""What the checkpoint tests share: ways to call a region, a training step's results, counters."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

import memopt
from memopt._checkpoint import checkpoint
from memopt._extension import _C
from memopt.memory.calls.measure import call_tree, sum_of_outputs
from memopt.memory.calls.tree import CallTree
from memopt.memory.step import Step


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """No region: what every other way must equal."""
    return fn(*args, **kwargs)


def torch_non_reentrant(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)


def torch_reentrant(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint.checkpoint(fn, *args, use_reentrant=True, **kwargs)


WAYS = (checkpoint, torch_non_reentrant)
every_way = pytest.mark.parametrize("way", WAYS, ids=["memopt", "torch"])
REGIONS = (*WAYS, torch_reentrant)


def step_results(
    call: Callable[[], Any], tensors: Iterable[Tensor], seed: int = 0
) -> list[Tensor | None]:
    """The loss of one training step on `call`'s outputs, then the gradient of each of `tensors`.

    Leaves `tensors` without gradients, so that steps can be compared.
    """
    tensors = list(tensors)
    torch.manual_seed(seed)
    outputs = [leaf for leaf in pytree.tree_leaves(call()) if isinstance(leaf, Tensor)]
    loss = sum((out.double() * (i + 1)).square().mean() for i, out in enumerate(outputs))
    assert isinstance(loss, Tensor)
    if loss.requires_grad:
        loss.backward()
    results = [loss.detach(), *(t.grad for t in tensors)]
    for tensor in tensors:
        tensor.grad = None
    return results


class CountCalls(nn.Module):
    """Passes its input on and counts how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x


def mlp(size: int = 8, dropout: float = 0.0) -> nn.Sequential:
    """Saves several tensors for backward, the output of its Tanh among them."""
    return nn.Sequential(
        nn.Linear(size, 2 * size), nn.Tanh(), nn.Dropout(dropout), nn.Linear(2 * size, size)
    )


@contextmanager
def taken_for_an_accelerator(device: torch.device | str) -> Iterator[None]:
    """In this scope `device`'s tensors are offloaded as an accelerator's are."""
    _C.pretend_accelerator(torch.device(device).type)
    try:
        yield
    finally:
        _C.pretend_accelerator(None)


class Watch:
    """What has been offloaded since this was made: (copies, bytes) each way."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> dict[str, tuple[int, int]]:
        places = memopt.offload.stats(wait=True).places
        return {
            way: (
                sum(getattr(place, way).copies for place in places),
                sum(getattr(place, way).bytes for place in places),
            )
            for way in ("out", "back")
        }

    def _since(self, way: str) -> tuple[int, int]:
        before, now = self._before[way], self._now()[way]
        return now[0] - before[0], now[1] - before[1]

    @property
    def to_host(self) -> tuple[int, int]:
        return self._since("out")

    @property
    def to_device(self) -> tuple[int, int]:
        return self._since("back")


T = TypeVar("T")


def left(result: T) -> T:
    """`result`, when what leaves the device has left: backward would keep what is still there."""
    memopt.offload.stats(wait=True)
    return result


@contextmanager
def collector_disabled() -> Iterator[None]:
    """What dies in this scope died by reference counting."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_objects(*kinds: type) -> int:
    """How many instances of `kinds` there are, garbage included."""
    return sum(issubclass(type(item), kinds) for item in gc.get_objects())


def live_tensors_and_regions() -> tuple[int, int]:
    return live_objects(Tensor), _C.live_regions()


class Net(nn.Module):
    """Importable, so that it can be pickled."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.count = CountCalls()
        self.linear = nn.Linear(size, size)
        self.register_buffer("scale", torch.full((size,), 2.0))

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        """Scale what linear gives."""
        return (self.linear(self.count(x)) * self.scale + shift).tanh()


def runs_twice(module: nn.Module, count: CountCalls) -> bool:
    """Whether one step calls `count` in forward and again in backward."""
    before = count.calls
    module(torch.randn(2, 4)).sum().backward()
    return count.calls == before + 2


def tree_of(model: nn.Module, x: Tensor) -> CallTree:
    """The tree of calls of a step on the sum of a model's outputs."""
    return call_tree(Step(model, x, None, sum_of_outputs, who="test"), None)
