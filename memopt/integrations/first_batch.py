"""The first batch of a loader, which is looked at before training begins."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.data import IterableDataset

from memopt.memory.generators import kept_generator
from memopt.memory.unchanged import unchanged

# Where loaders of PyTorch and accelerate have the parts that draw numbers and read data.
_PARTS = ("base_dataloader", "batch_sampler", "sampler")


def first_batch(who: str, loader: Any) -> Any:
    """The first batch that a loader gives, after which it, its data and all generators are as
    before.

    Raises:
        ValueError: its data can be read once, and cannot be copied.
    """
    parts = list(_parts_of(loader))
    with ExitStack() as stack:
        stack.enter_context(unchanged(loader, gradients=True))
        for value in [value for part in parts for value in vars(part).values()]:
            put_back = kept_generator(value)
            if put_back is not None:
                stack.callback(put_back)
        if not getattr(loader, "num_workers", 0):  # the processes of workers read copies
            stack.enter_context(_copied_streams(who, parts))
        batches = iter(loader)
        try:
            return next(batches)
        finally:
            del batches


def _parts_of(loader: Any) -> Iterator[Any]:
    yield loader
    for name in _PARTS:
        part = vars(loader).get(name)
        if hasattr(part, "__dict__"):
            yield from _parts_of(part)


@contextmanager
def _copied_streams(who: str, parts: list[Any]) -> Iterator[None]:
    """Puts copies in the place of datasets that may be read once, in this scope."""
    streams = [part for part in parts if isinstance(vars(part).get("dataset"), IterableDataset)]
    before = [(part, part.dataset) for part in streams]
    copies: dict[int, Any] = {}
    for _, dataset in before:
        try:
            copies.setdefault(id(dataset), copy.deepcopy(dataset))
        except Exception as error:
            raise ValueError(
                f"{who}: the dataset must be one that can be copied, since a batch is looked at "
                f"before training begins, and a stream can be read once, got "
                f"{type(dataset).__name__} ({error}); give a batch of your own"
            ) from error
    try:
        for part, dataset in before:
            vars(part)["dataset"] = copies[id(dataset)]
        yield
    finally:
        for part, dataset in before:
            vars(part)["dataset"] = dataset
