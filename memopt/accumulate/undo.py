"""A micro-batch that ran out of memory, undone: gradients, random numbers and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Generators:
    """The states of the CPU's generator and of a device's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # In Python's memory, which is no part of a budget of tensors.
        self._cpu = bytes(torch.get_rng_state().tolist())
        self._other = None
        if device.type not in ("cpu", "meta"):
            self._other = torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        torch.set_rng_state(torch.tensor(list(self._cpu), dtype=torch.uint8))
        if self._other is not None:
            torch.get_device_module(self._device).set_rng_state(self._other, self._device)


class Before:
    """What a forward may change besides gradients."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._generators = Generators(device)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        self._generators.restore()
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)


class Gradients:
    """Those that are there already, on the host. Where there are none, as is usual, it is free."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (p, p.grad, None if p.grad is None else p.grad.detach().to("cpu", copy=True))
            for p in model.parameters()
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, gradient, copy in self._before:
                parameter.grad = gradient
                if gradient is not None and copy is not None:
                    gradient.copy_(copy)


@contextmanager
def as_before(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Whatever forwards and backwards run inside, gradients, buffers and random numbers are those
    of before afterwards, also after an error. Inside there are no gradients at first.
    """
    before = Before(model, device)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        before.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def watched(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Says whether a gradient was accumulated since the last time it was asked."""
    touched: list[None] = []

    def touch(_: Tensor) -> None:
        if not touched:
            touched.append(None)

    handles = [
        p.register_post_accumulate_grad_hook(touch) for p in model.parameters() if p.requires_grad
    ]

    def was_touched() -> bool:
        found = bool(touched)
        touched.clear()
        return found

    try:
        yield was_touched
    finally:
        for handle in handles:
            handle.remove()
