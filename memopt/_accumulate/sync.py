"""When gradients travel between processes: with the last micro-batch only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from memopt.memory.parallel import is_sharded


@contextmanager
def syncing(model: nn.Module, now: bool) -> Iterator[None]:
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
