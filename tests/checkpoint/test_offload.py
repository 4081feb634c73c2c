"""Proves: with offload_to_cpu the region gives its input tensors' device memory back and rebuilds
them equal in values, strides, requires_grad and identity; parameters, CPU tensors and what the
graph or the caller holds anyway stay where they are. Without an accelerator the same code runs with
CPU tensors taken for the device's; the copies are then watched from here. (How the engine orders
copies: tests/offload.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import memopt
from memopt._checkpoint import checkpoint_wrapper
from tests.checkpoint.support import Watch, left, mlp, step_results, taken_for_an_accelerator
from tests.support.bits import assert_same_bits


@pytest.fixture
def watch(device: torch.device) -> Iterator[Watch]:
    """Takes the tensors of `device` for an accelerator's and watches the copies. A graph of an
    earlier test, in garbage, would be fetched with this one's, in the order of the thread.
    """
    gc.collect()
    with taken_for_an_accelerator(device):
        yield Watch()


class Attend(nn.Module):
    """Takes tensors in every place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(dropout=0.3)

    def forward(self, x: Tensor, rest: list[Tensor], *, mask: Tensor, scale: float) -> Tensor:
        return self.body(x * rest[0]) * mask * scale


def test_gradients_are_those_of_the_plain_run(device: torch.device, watch: Watch) -> None:
    module = Attend().to(device)
    x, y = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    mask = torch.rand(8, device=device) > 0.5
    tensors = [x, y, *module.parameters()]

    def call() -> Tensor:
        return left(module(x * 1, [y * 1], mask=mask.clone(), scale=0.5))

    expected = step_results(call, tensors)
    checkpoint_wrapper(module, offload_to_cpu=True)
    assert_same_bits(step_results(call, tensors), expected)
    # Two inputs of float32 and the mask of bool.
    assert watch.to_host == watch.to_device == (3, 2 * 4 * 8 * 4 + 8)


def test_device_memory_is_released_after_forward(device: torch.device, watch: Watch) -> None:
    """Neither tensor nor storage lives on once the caller drops it, though backward still works."""
    module = checkpoint_wrapper(Attend(), offload_to_cpu=True).to(device)
    x = torch.randn(4, 8, device=device)
    storage = StorageWeakRef(x.untyped_storage())
    y = module(x, [torch.ones(8, device=device)], mask=torch.ones(8, device=device), scale=1.0)
    assert not storage.expired()
    del x
    memopt.offload.stats(wait=True)  # until the copies are done
    assert storage.expired()
    y.sum().backward()
    assert module.body[0].weight.grad is not None


def test_without_offload_the_region_holds_its_input(device: torch.device) -> None:
    """The counterpart, without which the test above would prove nothing."""
    module = checkpoint_wrapper(mlp()).to(device)
    x = torch.randn(4, 8, device=device)
    storage = StorageWeakRef(x.untyped_storage())
    y = module(x)
    del x
    assert not storage.expired()
    y.sum().backward()


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "slice of wider rows": lambda t: t[:, 2:7],
    "every other row": lambda t: t[::2],
    "offset": lambda t: t.flatten()[3:],
    "channels last": lambda t: t.reshape(2, 4, 3, 4).to(memory_format=torch.channels_last),
    "overlapping windows": lambda t: t.flatten().unfold(0, 5, 2),
    "empty": lambda t: t[:0],
    "scalar": lambda t: t[0, 0],
    "expanded": lambda t: t[:, :1].expand(8, 5),
    "complex": lambda t: torch.complex(t, t),
    "bfloat16": lambda t: t.bfloat16(),
}


class Sees(nn.Module):
    """Keeps what it is called with in the recompute and saves something for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.again: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if memopt.checkpoint.is_recomputing():
            self.again = x
        return self.weight.exp()


def offloaded(make: Callable[[], Tensor]) -> Tensor:
    """What a region with offload_to_cpu gets in the recompute for a tensor that is its alone."""
    module = checkpoint_wrapper(Sees(), offload_to_cpu=True)
    left(module(make())).backward()
    assert module.again is not None
    return module.again


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_come_back_with_strides_and_requires_grad(
    device: torch.device, watch: Watch, layout, requires_grad: bool
) -> None:
    base = torch.randn(8, 12, device=device)
    tensor = layout(base).detach()
    if requires_grad and not tensor.is_floating_point() and not tensor.is_complex():
        pytest.skip("integers have no gradient")
    # A result of an op, since a leaf that requires a gradient is held by the graph.
    needs_grad = torch.ones((), device=device, requires_grad=requires_grad)

    def make() -> Tensor:
        return layout(base.clone() * needs_grad)

    storage = make().untyped_storage().nbytes()
    again = offloaded(make)
    copied = (1, storage) if storage else (0, 0)
    assert watch.to_host == watch.to_device == copied
    assert (again.device, again.dtype, again.stride()) == (
        tensor.device,
        tensor.dtype,
        tensor.stride(),
    )
    assert again.requires_grad == requires_grad
    assert again.is_leaf or not storage
    assert torch.equal(again, tensor)


class Tagged(Tensor):
    """A subclass, whose values a plain copy would not keep."""


STAY = {
    "parameter": lambda: nn.Parameter(torch.randn(4)),
    "leaf that requires a gradient": lambda: torch.randn(4, requires_grad=True),
    "conjugate view": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "subclass": lambda: torch.randn(4).as_subclass(Tagged),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "meta": lambda: torch.empty(4, device="meta"),
}
GO = {
    "leaf": lambda: torch.randn(4),
    "view": lambda: torch.randn(4, 8)[:, 0],
    "expanded": lambda: torch.randn(4, 1).expand(4, 8),
    "integer": lambda: torch.arange(4),
}


@pytest.mark.parametrize("kind", [*STAY, *GO])
def test_what_stays_on_the_device(device: torch.device, watch: Watch, kind: str) -> None:
    with device:
        offloaded((STAY | GO)[kind])
    assert watch.to_host[0] == watch.to_device[0] == (kind in GO)


def test_a_tensor_that_the_caller_holds_comes_back_as_it_is(
    device: torch.device, watch: Watch
) -> None:
    """Its copy was in vain. From then on it is left alone."""
    x = torch.randn(64, device=device)
    for _ in range(2):
        again = offloaded(lambda: x)
        assert again.data_ptr() == x.data_ptr()
        assert watch.to_host[0] == 1
        assert watch.to_device[0] == 0


def test_real_cpu_tensors_are_kept_by_reference() -> None:
    x = torch.randn(3, requires_grad=True)
    assert offloaded(lambda: x) is x


def test_a_tensor_that_comes_twice_is_copied_once(device: torch.device, watch: Watch) -> None:
    class Same(nn.Module):
        def forward(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
            same.append(q is kv[0] and q is kv[1])
            return (q * kv[0]).exp() * kv[1]

    same: list[bool] = []
    x = torch.randn(3, device=device, requires_grad=True)
    module = Same()

    def call() -> Tensor:
        y = x * 1
        return left(module(y, (y, y)))

    expected = step_results(call, [x])
    checkpoint_wrapper(module, offload_to_cpu=True)
    assert_same_bits(step_results(call, [x]), expected)
    assert watch.to_host[0] == watch.to_device[0] == 1
    assert same == [True] * 3


def test_second_backward_loads_again(device: torch.device, watch: Watch) -> None:
    module = checkpoint_wrapper(mlp(), offload_to_cpu=True).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    y = left(module(x * 1).sum())
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert_same_bits(torch.autograd.grad(y, x), first)
    assert (watch.to_host[0], watch.to_device[0]) == (1, 2)


def test_no_copies_without_gradients(device: torch.device, watch: Watch) -> None:
    module = checkpoint_wrapper(mlp(), offload_to_cpu=True).to(device)
    with torch.no_grad():
        module(torch.randn(4, 8, device=device))
    assert watch.to_host == (0, 0)


def test_offload_of_nested_regions(device: torch.device, watch: Watch) -> None:
    inner = checkpoint_wrapper(mlp(dropout=0.2), offload_to_cpu=True)
    outer = checkpoint_wrapper(nn.Sequential(nn.Tanh(), inner, nn.Tanh()), offload_to_cpu=True)
    outer.to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    tensors = [x, *outer.parameters()]
    actual = step_results(lambda: outer(x), tensors)
    plain = nn.Sequential(nn.Tanh(), *inner, nn.Tanh())
    assert_same_bits(actual, step_results(lambda: plain(x), tensors))
