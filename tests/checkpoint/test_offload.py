"""Proves: with offload_to_cpu the region gives its input tensors' device memory back and rebuilds
them equal in values, strides, requires_grad and identity; parameters, CPU tensors and views of
smaller memory stay where they are. Without an accelerator the same code runs with CPU tensors taken
for the device's; the copies are then watched from here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.checkpoint import checkpoint_wrapper
from tests.checkpoint.support import (
    Watch,
    assert_same_bits,
    mlp,
    step_results,
    taken_for_an_accelerator,
)


@pytest.fixture
def watch(device: torch.device) -> Iterator[Watch]:
    """Takes the tensors of `device` for an accelerator's and watches the copies."""
    with taken_for_an_accelerator(device):
        yield Watch()


class Attend(nn.Module):
    """Takes tensors in every place; `seen` holds what each call got."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(dropout=0.3)
        self.seen: list[tuple[Tensor, ...]] = []

    def forward(self, x: Tensor, rest: list[Tensor], *, mask: Tensor, scale: float) -> Tensor:
        self.seen.append((x, *rest, mask))
        return self.body(x * rest[0]) * mask * scale


def test_gradients_are_those_of_the_plain_run(device: torch.device, watch: Watch) -> None:
    module = Attend().to(device)
    x, y = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    mask = torch.rand(8, device=device) > 0.5
    tensors = [x, y, *module.parameters()]

    def call() -> Tensor:
        return module(x * 1, [y], mask=mask, scale=0.5)

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
    module.seen.clear()
    assert not storage.expired()
    del x
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
    "complex": lambda t: torch.complex(t, t),
    "conjugate": lambda t: torch.complex(t, t).conj(),
    "bfloat16": lambda t: t.bfloat16(),
}


class Sees(nn.Module):
    """Keeps what it is called with and saves something for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.weight.exp()


def offloaded(tensor: Tensor) -> Tensor:
    """What the recompute of a region with offload_to_cpu gets in place of `tensor`."""
    module = checkpoint_wrapper(Sees(), offload_to_cpu=True)
    module(tensor).backward()
    first, again = module.seen
    assert first is tensor
    return again


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_come_back_with_strides_and_requires_grad(
    device: torch.device, watch: Watch, layout, requires_grad: bool
) -> None:
    tensor = layout(torch.randn(8, 12, device=device)).detach().requires_grad_(requires_grad)
    assert tensor.numel() == 0 or tensor.ndim == 0 or 0 not in tensor.stride()
    again = offloaded(tensor)
    assert watch.to_host == watch.to_device == (1, tensor.numel() * tensor.element_size())
    assert (again.device, again.dtype, again.stride()) == (
        tensor.device,
        tensor.dtype,
        tensor.stride(),
    )
    assert again.requires_grad == requires_grad
    assert again.is_leaf
    assert torch.equal(again, tensor)
    assert again.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or (
        tensor.numel() == 0
    )


class Tagged(Tensor):
    """A subclass, whose values a plain copy would not keep."""


STAY = {
    "parameter": lambda: nn.Parameter(torch.randn(4)),
    "expanded": lambda: torch.randn(4, 1).expand(4, 8),
    "subclass": lambda: torch.randn(4).as_subclass(Tagged),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "meta": lambda: torch.empty(4, device="meta"),
}
GO = {
    "leaf": lambda: torch.randn(4, requires_grad=True),
    "view": lambda: torch.randn(4, 8)[:, 0],
    "one row expanded to one": lambda: torch.randn(1, 4).expand(1, 4),
    "integer": lambda: torch.arange(4),
}


@pytest.mark.parametrize("kind", [*STAY, *GO])
def test_what_stays_on_the_device(device: torch.device, watch: Watch, kind: str) -> None:
    with device:
        tensor = (STAY | GO)[kind]()
    again = offloaded(tensor)
    assert (again is tensor) == (kind in STAY)
    assert watch.to_host[0] == (kind in GO)


def test_real_cpu_tensors_are_kept_by_reference() -> None:
    x = torch.randn(3, requires_grad=True)
    assert offloaded(x) is x


def test_a_tensor_that_comes_twice_is_copied_once(device: torch.device, watch: Watch) -> None:
    class Same(nn.Module):
        def forward(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
            same.append(q is kv[0] and q is kv[1])
            return (q * kv[0]).exp() * kv[1]

    same: list[bool] = []
    x = torch.randn(3, device=device, requires_grad=True)
    module = Same()
    expected = step_results(lambda: module(x, (x, x)), [x])
    checkpoint_wrapper(module, offload_to_cpu=True)
    assert_same_bits(step_results(lambda: module(x, (x, x)), [x]), expected)
    assert watch.to_host[0] == watch.to_device[0] == 1
    assert same == [True] * 3


def test_second_backward_loads_again(device: torch.device, watch: Watch) -> None:
    module = checkpoint_wrapper(mlp(), offload_to_cpu=True).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    y = module(x).sum()
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
