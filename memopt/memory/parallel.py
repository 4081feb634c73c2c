"""Models that train on several devices: what of their memory is known from what wraps them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def without_ddp(model: nn.Module) -> nn.Module:
    """The module that DistributedDataParallel runs, whose reducer is no part of a step; another
    model itself.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inside: nn.Module = model.module
        return inside
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether the model is FSDP2's, each of whose forwards is a collective."""
    return hasattr(model, "set_requires_gradient_sync")


@contextmanager
def syncing(model: nn.Module, now: bool) -> Iterator[None]:
    """Forward and backward of a micro-batch run inside. Gradients travel between processes with the
    last one only, `now`; what the model is told of that is undone.
    """
    unknown: Any = model
    if is_sharded(model):
        unknown.set_requires_gradient_sync(now)
        try:
            yield
        finally:
            unknown.set_requires_gradient_sync(True)
    elif not now and callable(getattr(model, "no_sync", None)):
        with unknown.no_sync():
            yield
    else:
        yield


def gathers_parameters(module: nn.Module) -> bool:
    """Whether FSDP, of either kind, has the module's parameters there only around its own calls and
    its own backward, or those of a module around it.
    """
    return getattr(module, "_is_fsdp_managed_module", False)


def bucket_bytes(model: nn.Module | None) -> int:
    """Bytes of DistributedDataParallel's buckets, in addition to the gradients.

    It is 0 where gradients are views of the buckets, and for another model.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return 0
    if model.gradient_as_bucket_view:
        return 0
    sizes: list[int] = [p.nbytes for p in model.parameters() if p.requires_grad]
    return sum(sizes)


def used_map_bytes(model: nn.Module | None) -> int:
    """Bytes of the map in which DistributedDataParallel(find_unused_parameters=True) notes which
    parameters had gradients: a step is seen to reach it in backward.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return 0
    if not model.find_unused_parameters:
        return 0
    return 4 * sum(p.requires_grad for p in model.parameters())
