"""Bytes that one forward of a model saves for backward."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memopt.checkpoint.stage_bytes import storages


def saved_bytes(model: nn.Module, sample_input: Any) -> int:
    """Bytes of the distinct storages that autograd is given to save, without the parameters and
    buffers, which are there anyway.

    Counted by saved-tensor hooks around the call: what a hook inside keeps in another form (a
    recipe, a region's slot) is not given to them. The model runs in its own mode, with gradients
    enabled; random number generators and buffers are afterwards as they were, and no gradient is
    computed.

    Args:
        sample_input: a tensor, or a tuple or list of positional arguments, or a mapping of keyword
            arguments.
    """
    constant = set(storages((*model.parameters(), *model.buffers())))
    saved: dict[Hashable, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.update({s: n for s, n in storages([tensor]).items() if s not in constant})
        return tensor

    with (
        _same_generators_and_buffers(model),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        output = _call(model, sample_input)
        del output
    return sum(saved.values())


def _call(model: nn.Module, sample_input: Any) -> Any:
    if isinstance(sample_input, Mapping):
        return model(**sample_input)
    if isinstance(sample_input, (tuple, list)):
        return model(*sample_input)
    return model(sample_input)


@contextmanager
def _same_generators_and_buffers(model: nn.Module) -> Iterator[None]:
    before = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    copies = [
        (tensor, tensor.detach().clone())
        for _, buffers in before
        for tensor in buffers.values()
        if tensor is not None
    ]
    try:
        with _fork_rng(model):
            yield
    finally:
        for now, buffers in before:
            now.clear()
            now.update(buffers)
        with torch.no_grad():
            for tensor, copy in copies:
                # Not all are: a graph that is there already may have saved them. Batch norm writes
                # to its statistics without a new version.
                if not tensor.is_meta and not torch.equal(tensor, copy):
                    tensor.copy_(copy)


def _fork_rng(model: nn.Module) -> Any:
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    accelerators = sorted({d.index for d in devices if d.type == "cuda" and d.index is not None})
    return torch.random.fork_rng(devices=accelerators)
