"""Proves: the races and bugs that offloading has had elsewhere do not occur here. Each is tested at
the level where it lives, and each test fails where the fault is planted.

====  ===============================================  ===========================================
 1    the source is freed before its copy ends         cpp/test_engine_faults.cpp
 2    the compute stream is remembered                 ../accelerator/inside/test_offload_races.py
 3    a non-contiguous source is copied too late       ../accelerator/inside/test_offload_races.py
 4    a copy back races its own copy away              cpp/test_engine_faults.cpp
 5    room is reused while a copy of the step          cpp/test_engine_faults.cpp
      before reads it
 6    views are told apart by address only             here; addresses that are used again:
                                                       ../accelerator/inside/test_offload_races.py
 7    memory that comes back is used too early         cpp/test_engine_faults.cpp
 8    each step makes new streams                      ../accelerator/inside/test_offload_races.py
 9    a step that is given up leaks                    cpp/test_engine_faults.cpp
10    buffers of inference_mode                        here
11    leaves that require a gradient are copied        here
12    host memory is not given back                    ../accelerator/inside/test_offload_races.py;
                                                       files: here
13    a write in place after the copy was queued       here
====  ===============================================  ===========================================

1, 7, 9 and 13 are tested on the simulated accelerator as well. Those that are here plant the fault
as hooks or a fate of the test's own: what a simpler offload would do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import memopt

Scope = Callable[[], AbstractContextManager[None]]


class _Copy:
    """A handle: a copy, as it was made."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def restore(self) -> Tensor:
        return self.tensor


def _naive() -> AbstractContextManager[None]:
    """Hooks that copy each tensor, and check nothing."""
    return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda copy: copy)


class _ByAddress:
    """A fate that copies what lies at an address once."""

    def __init__(self) -> None:
        self.copies: dict[int, _Copy] = {}

    def pack(self, tensor: Tensor) -> _Copy:
        copy = self.copies.setdefault(tensor.data_ptr(), _Copy(tensor.detach().clone()))
        return copy if copy.tensor.numel() == tensor.numel() else _Copy(tensor.detach().clone())


def _with_landing_buffers() -> AbstractContextManager[None]:
    """Hooks that copy back by way of buffers, which are made when they are first needed."""
    buffers: dict[torch.Size, Tensor] = {}

    def unpack(copy: Tensor) -> Tensor:
        if copy.shape not in buffers:
            buffers[copy.shape] = torch.empty_like(copy)
        return buffers[copy.shape].copy_(copy).clone()

    return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), unpack)


@pytest.fixture
def offload(directory: Path) -> Scope:
    return lambda: memopt.offload("disk", directory=directory, min_bytes=1, keep_last=0)


def test_6_views_of_one_address_come_back_as_they_were(offload: Scope) -> None:
    """A transpose, the tensor itself, and a part that begins at the same place."""
    torch.manual_seed(0)
    weight = torch.randn(12, 12, requires_grad=True)

    def gradient(scope: Scope | None) -> Tensor:
        def forward() -> Tensor:
            x = torch.arange(144.0).reshape(12, 12) / 100
            whole = (x @ weight).square().sum() + (x.t() @ weight).pow(3).sum()
            return whole + (x[:3] @ weight).sum() + (x[:, :5] @ weight[:5]).sum()

        if scope is None:
            loss = forward()
        else:
            with scope():
                loss = forward()
        (found,) = torch.autograd.grad(loss, [weight])
        return found

    expected = gradient(None)
    memopt.offload.stats(reset=True)
    assert torch.equal(gradient(offload), expected)
    # x, once for its four views, and the two products.
    assert memopt.offload.stats(wait=True).bytes_out == 3 * 144 * 4
    assert not torch.equal(gradient(lambda: memopt.saved_tensors(_ByAddress())), expected)


def _second_order(scope: Scope) -> tuple[Tensor, Tensor]:
    """Backward in inference mode, then one whose graph is differentiated again."""
    weight = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    with scope():
        loss = (weight * 1.5).exp().sin().sum()
    with torch.inference_mode():
        torch.autograd.grad(loss, [weight], retain_graph=True)
    (first,) = torch.autograd.grad(loss, [weight], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), [weight])
    return first.detach(), second


def test_10_inference_mode_leaves_no_inference_tensors(offload: Scope) -> None:
    with torch.inference_mode(), offload():
        torch.ones(8).exp()
    expected = _second_order(lambda: memopt.saved_tensors("keep"))
    for one, other in zip(_second_order(offload), expected, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        _second_order(_with_landing_buffers)


def test_11_leaves_that_require_a_gradient_are_not_copied(offload: Scope) -> None:
    """The graph holds a leaf, to which it adds the gradient: a copy of it would free nothing."""
    memopt.offload.stats(reset=True)

    def stays(scope: Scope) -> tuple[StorageWeakRef, Tensor]:
        leaf = torch.randn(32, 32, requires_grad=True)
        with scope():
            loss = leaf.square().sum() + leaf.t().pow(3).sum()
        return StorageWeakRef(leaf.untyped_storage()), loss

    held, loss = stays(offload)
    assert memopt.offload.stats(wait=True).bytes_out == 0
    assert not held.expired()
    loss.backward()
    held, loss = stays(_naive)  # copies it
    assert not held.expired()
    del loss
    gc.collect()
    assert held.expired()


def test_12_files_are_given_back(offload: Scope) -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    with offload():
        loss = (torch.ones(64, 64) * 2 @ weight).exp().sum()
    loss.backward()
    del loss
    (place,) = (p for p in memopt.offload.stats(wait=True).places if p.out.copies)
    assert place.room_in_use == 0
    assert place.room_allocated > 0  # for the next step
    assert memopt.offload.empty_cache() >= place.room_allocated
    assert all(p.room_allocated == 0 for p in memopt.offload.stats().places)


@pytest.mark.parametrize("how", ["tensor", "view", "before"])
def test_13_a_write_after_the_copy_was_queued_raises(offload: Scope, how: str) -> None:
    def write(scope: Scope) -> Tensor:
        x = torch.randn(64, 64) + 1
        part = x[3]
        weight = torch.randn(64, 64, requires_grad=True)
        with scope():
            loss = (x @ weight).sum()
        if how == "tensor":
            x.zero_()
        elif how == "view":
            part.zero_()
        else:
            x[1:].mul_(2)  # while other memory of its storage is left alone
        return loss

    with pytest.raises(RuntimeError, match="must not be written in place"):
        write(offload).backward()
    write(_naive).backward()  # raises nothing
