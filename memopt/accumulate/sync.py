"""When gradients travel between processes: with the last micro-batch only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def is_sharded(model: nn.Module) -> bool:
    """Whether the model is FSDP2's, each of whose forwards is a collective."""
    return hasattr(model, "set_requires_gradient_sync")


def bucket_bytes(model: nn.Module | None) -> int:
    """Of the buckets in which DistributedDataParallel reduces gradients, beside these; 0 where they
    are views of them, and of another model.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return 0
    if model.gradient_as_bucket_view:
        return 0
    sizes: list[int] = [p.nbytes for p in model.parameters() if p.requires_grad]
    return sum(sizes)


@contextmanager
def synchronized(model: nn.Module, now: bool) -> Iterator[None]:
    """Forward and backward of a micro-batch run inside. What the model is told is undone."""
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
