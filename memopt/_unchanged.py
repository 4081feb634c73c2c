"""A model and its inputs as they were, whatever ran on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from memopt._compat import preserved_versions, wraps_tensors


@contextmanager
def unchanged(modules: Sequence[nn.Module], inputs: Sequence[Tensor]) -> Iterator[None]:
    """Whatever runs inside, modules, inputs and generators are afterwards as they were."""
    parameters = list({p: None for m in modules for p in m._parameters.values() if p is not None})
    buffers = list({b: None for m in modules for b in m._buffers.values() if b is not None})
    attributes = [(module, dict(module.__dict__)) for module in modules]
    leaves = [*parameters, *(tensor for tensor in inputs if tensor.is_leaf)]
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    with ExitStack() as stack:
        stack.enter_context(_same_buffers(modules, list(dict.fromkeys((*buffers, *inputs)))))
        stack.enter_context(_same_generators((*parameters, *buffers, *inputs)))
        try:
            for leaf, gradient in gradients:
                if gradient is not None:  # a backward inside would add to it in place
                    leaf.grad = None
            yield
        finally:
            for leaf, gradient in gradients:
                if leaf.grad is not gradient:
                    leaf.grad = gradient
            for module, before in attributes:  # flags, counters, what is kept of the last input
                module.__dict__.clear()
                module.__dict__.update(before)


@contextmanager
def _same_buffers(modules: Sequence[nn.Module], buffers: Sequence[Tensor]) -> Iterator[None]:
    registered = [(module._buffers, dict(module._buffers)) for module in modules]
    # Outside inference mode nothing can write to inference tensors, which have no version either.
    writable = tuple(buffer for buffer in buffers if not buffer.is_inference())
    with preserved_versions(writable):
        copies = [(buffer, buffer.detach().clone(), buffer._version) for buffer in writable]
        try:
            yield
        finally:
            for now, before in registered:
                now.clear()
                now.update(before)
            with torch.no_grad():
                for buffer, copy, version in copies:
                    if _was_written(buffer, copy, version):
                        buffer.copy_(copy)


def _was_written(buffer: Tensor, copy: Tensor, version: int) -> bool:
    if buffer.is_meta:
        return False
    if wraps_tensors(buffer) or buffer.layout is not torch.strided:
        return buffer._version != version
    return not torch.equal(buffer, copy)  # batch norm writes its statistics without a new version


@contextmanager
def _same_generators(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Forks the generators of the CPU and of the devices of `tensors`."""
    devices: dict[str, set[int]] = {}
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            devices.setdefault(tensor.device.type, set()).add(tensor.device.index or 0)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, indices in devices.items():
            stack.enter_context(torch.random.fork_rng(devices=sorted(indices), device_type=kind))
        yield
