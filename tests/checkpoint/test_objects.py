"""Proves: tensors that are attributes of an argument of any class (dataclass, slots, a plain class)
are seen by a region as those in containers are: written in place, backward raises; exchanged for
others, the recompute still has the first ones; offloaded, their device memory is given back; and
the user's object is never written. A torch.Size stays one.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef

from memopt._checkpoint import checkpoint, checkpoint_wrapper
from tests.checkpoint.support import Watch, taken_for_an_accelerator


@dataclasses.dataclass
class Batch:
    tensor: Tensor
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: Tensor


@dataclasses.dataclass(slots=True)
class Slots:
    tensor: Tensor
    other: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    tensor: Tensor


class Plain:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.lock = threading.Lock()


class ManyTensors:
    __slots__ = ("__dict__", "second", "unset")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.second = tensor


class Property:
    """Its tensor lies under another name than the one that reads it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def tensor(self) -> Tensor:
        return self._tensor


CLASSES = [Batch, Frozen, Slots, FrozenSlots, Plain, ManyTensors, Property]

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


class Product(nn.Module):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *objects: Any) -> Tensor:
        self.seen.append(objects)
        for item in objects:
            x = x * item.tensor
        return x.exp()


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(4, 4, device=device, requires_grad=True)


@every_class
@pytest.mark.parametrize("offloading", [False, True])
def test_a_tensor_written_after_forward(x: Tensor, cls: Any, offloading: bool) -> None:
    module = checkpoint_wrapper(Product(), offload_to_cpu=offloading)
    tensor = torch.ones(4, 4, device=x.device)
    with taken_for_an_accelerator(x.device):
        y = module(x, cls(tensor))
    tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"^checkpoint: positional argument 1 of region .*Produ"):
        y.sum().backward()


def test_a_tensor_written_after_forward_in_a_container_and_by_keyword(x: Tensor) -> None:
    tensor = torch.ones(4, 4, device=x.device)
    y = checkpoint(lambda x, *, batches: x.exp() * batches[0].tensor, x, batches=[Batch(tensor)])
    tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"argument 'batches' of region"):
        y.sum().backward()


@every_class
def test_offloaded(x: Tensor, cls: Any) -> None:
    values = torch.randn(4, 4)
    tensor = values.to(x.device, copy=True)
    module = checkpoint_wrapper(Product(), offload_to_cpu=True)
    item = cls(tensor)
    before = {name: id(value) for name, value in vars_of(item).items()}
    with taken_for_an_accelerator(x.device):
        watch = Watch()
        y = module(x * 1, item, item)
        assert {name: id(value) for name, value in vars_of(item).items()} == before
        module.seen.clear()
        storage = StorageWeakRef(tensor.untyped_storage())
        del item, tensor
        assert watch.to_host == (2, 2 * 4 * 4 * 4)  # waits until the copies are done
        assert storage.expired()
        y.sum().backward()
    ((first, second),) = module.seen
    assert type(first) is cls
    assert first is second
    expected = (x.detach() * values.to(x.device) ** 2).exp() * values.to(x.device) ** 2
    torch.testing.assert_close(x.grad, expected)


def vars_of(item: Any) -> dict[str, Any]:
    names = [*getattr(item, "__dict__", {}), *getattr(type(item), "__slots__", ())]
    return {name: getattr(item, name) for name in names if hasattr(item, name)}


def test_a_tensor_exchanged_after_forward(x: Tensor) -> None:
    """The recompute gets the tensor of the call, in an object of its own."""
    seen = []

    def function(x: Tensor, batch: Batch) -> Tensor:
        seen.append(batch)
        return (x * batch.tensor).exp()

    then, now = torch.full((4, 4), 2.0, device=x.device), torch.zeros(4, 4, device=x.device)
    batch = Batch(then)
    y = checkpoint(function, x, batch)
    batch.tensor = now
    y.sum().backward()
    torch.testing.assert_close(x.grad, (x.detach() * 2).exp() * 2)
    assert batch.tensor is now
    assert seen[0] is batch
    assert seen[1] is not batch
    assert seen[1].name == "batch"


def test_an_object_without_copies_is_kept_as_it_is(x: Tensor) -> None:
    class Single(Plain):
        def __copy__(self) -> Single:
            return self

    module = checkpoint_wrapper(Product(), offload_to_cpu=True)
    single = Single(torch.full((4, 4), 2.0, device=x.device))
    with taken_for_an_accelerator(x.device):
        y = module(x, single)
        assert single.tensor is not None
        y.sum().backward()
    assert [objects[0] is single for objects in module.seen] == [True, True]
    torch.testing.assert_close(x.grad, (x.detach() * 2).exp() * 2)

    with save_on_cpu():
        y = checkpoint(Product(), x, single)
    y.sum().backward()  # hooks give other tensors back

    y = checkpoint(Product(), x, single)
    single.tensor = single.tensor * 1
    with pytest.raises(TypeError, match=r"must have a shallow copy \(copy.copy\) .*Single"):
        y.sum().backward()


def test_modules_are_not_looked_into(x: Tensor) -> None:
    """Such as one that counts its calls in a tensor."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x.exp()

    module = Counts()
    checkpoint(lambda x, m: m(x), x, module).sum().backward()
    assert module.calls == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: checkpoint(f, x, x.shape),
        lambda f, x: checkpoint(f, x, size=x.shape),
        lambda f, x: checkpoint(lambda x, s: f(x, s[0]["size"]), x, [{"size": x.shape}]),
    ],
    ids=["positional", "keyword", "nested"],
)
def test_a_size_stays_a_size(x: Tensor, call: Any) -> None:
    kinds = []

    def function(x: Tensor, size: torch.Size) -> Tensor:
        kinds.append(type(size))
        return x.exp() / size.numel()

    call(function, x).sum().backward()
    assert kinds == [torch.Size, torch.Size]
    torch.testing.assert_close(x.grad, x.detach().exp() / 16)
