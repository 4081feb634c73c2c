"""Proves: what looks at a loader's first batch before training uses nothing up. The loader gives
the same batches as if nobody had looked, whatever draws their order and whatever they are read
from; data that can be read once, and not copied, is refused and not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from memopt.integrations.first_batch import first_batch

ROWS, SIZE = 16, 4


class Position(IterableDataset[Tensor]):
    """Goes on where it was, as one that resumes does."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < ROWS:
            self.position += 1
            yield torch.tensor(self.position)


class Stream(IterableDataset[Tensor]):
    """Is read once, as a socket is."""

    def __init__(self) -> None:
        self.rows = iter(torch.arange(ROWS))
        self.source = (row for row in self.rows)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.source


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def loader(kind: str, workers: int = 0) -> DataLoader[Any]:
    rows = torch.arange(ROWS)
    if kind == "in order":
        return DataLoader(rows, SIZE, num_workers=workers)  # type: ignore[arg-type]
    if kind == "shuffled":
        return DataLoader(rows, SIZE, shuffle=True, num_workers=workers)  # type: ignore[arg-type]
    if kind == "shuffled by a generator of its own":
        return DataLoader(rows, SIZE, shuffle=True, generator=generator())  # type: ignore[arg-type]
    if kind == "a sampler with a generator":
        sampler = RandomSampler(range(ROWS), generator=generator())
        return DataLoader(rows, SIZE, sampler=sampler)  # type: ignore[arg-type]
    return DataLoader(Position(), SIZE)


def batches(of: DataLoader[Any]) -> list[list[int]]:
    torch.manual_seed(0)
    return [batch.tolist() for batch in of]


@pytest.mark.parametrize(
    "kind",
    [
        "in order",
        "shuffled",
        "shuffled by a generator of its own",
        "a sampler with a generator",
        "a dataset that goes on",
    ],
)
def test_nothing_is_used_up(kind: str) -> None:
    expected = batches(loader(kind))
    looked_at = loader(kind)
    first = first_batch("test", looked_at)
    assert first.shape == (SIZE,)
    assert batches(looked_at) == expected


def test_the_batch_is_the_one_that_training_begins_with() -> None:
    looked_at = loader("shuffled by a generator of its own")
    assert first_batch("test", looked_at).tolist() == batches(looked_at)[0]


def test_a_stream_is_refused_and_not_read() -> None:
    stream = Stream()
    looked_at = DataLoader(stream, SIZE)
    with pytest.raises(ValueError, match=r"^test: the dataset must be .* got Stream .* a batch"):
        first_batch("test", looked_at)
    assert looked_at.dataset is stream
    assert batches(looked_at)[0] == list(range(SIZE))


def test_a_loader_of_accelerate_that_goes_on() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare_data_loader(loader("a dataset that goes on"))
    first_batch("test", prepared)
    assert batches(prepared) == batches(loader("a dataset that goes on"))
