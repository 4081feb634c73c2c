"""Ranks that are threads of this process, joined by a link with a time of its own.

The k-th gather that one rank starts is the k-th of every other, as in a process group; ranks that
disagree about its size, or never start it, get an error. Nothing is copied before someone waits,
as late as a slow link would. Each rank has a clock, which only `work` and waiting move: a gather
begins when the last rank has started it and the one before has ended.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from memopt._checkpoint.partition import Partition
from memopt._extension import _C
from tests.support.patience import PATIENCE_S


class Rank:
    """One thread's end of the link."""

    def __init__(self, link: VirtualRanks, number: int) -> None:
        self.number = number
        self.clock = 0.0
        self.started: list[int] = []
        """Bytes of this rank's part of each gather, in the order of starts."""
        self.log: list[str] = []
        """What happened here: "start 0", "wait 0" and what tests add."""
        self.partition = Partition(number, link.count, ["cpu"], self._start)
        self._link = link

    def work(self, seconds: float) -> None:
        self.clock += seconds

    def _start(self, part: Tensor, whole: Tensor) -> _Work:
        assert whole.numel() == self._link.count * part.numel()
        number = len(self.started)
        self.started.append(part.numel())
        self.log.append(f"start {number}")
        self._link.deposit(number, self, part)
        return _Work(self._link, self, number, whole)


class _Work:
    def __init__(self, link: VirtualRanks, rank: Rank, number: int, whole: Tensor) -> None:
        self._link, self._rank, self._number, self._whole = link, rank, number, whole

    def wait(self) -> None:
        self._rank.log.append(f"wait {self._number}")
        parts, end = self._link.collect(self._number)
        for chunk, part in zip(self._whole.chunk(len(parts)), parts, strict=True):
            chunk.copy_(part)
        self._rank.clock = max(self._rank.clock, end)

    def is_completed(self) -> bool:
        return self._link.is_complete(self._number)


class VirtualRanks:
    """`count` of them."""

    def __init__(self, count: int, seconds_per_byte: float = 0.0) -> None:
        """`seconds_per_byte`: of a gather, for the bytes that a rank receives."""
        self.count = count
        self._seconds_per_byte = seconds_per_byte
        self._condition = threading.Condition()
        self._parts: list[dict[int, tuple[Tensor, float]]] = []
        self.ranks = [Rank(self, number) for number in range(count)]
        gc.collect()
        self.regions_before = _C.live_regions()  # what other tests have left

    def run(self, function: Callable[[Rank], Any]) -> list[Any]:
        """`function(rank)` in all threads at once; what it returned, by rank."""
        results: list[Any] = [None] * self.count
        errors: list[BaseException] = []

        def call(rank: Rank) -> None:
            try:
                results[rank.number] = function(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def deposit(self, number: int, rank: Rank, part: Tensor) -> None:
        with self._condition:
            while len(self._parts) <= number:
                self._parts.append({})
            self._parts[number][rank.number] = (part, rank.clock)
            self._condition.notify_all()

    def is_complete(self, number: int) -> bool:
        with self._condition:
            return len(self._parts[number]) == self.count

    def collect(self, number: int) -> tuple[list[Tensor], float]:
        """Every rank's part, and when the gather ends."""
        with self._condition:
            if not self._condition.wait_for(
                lambda: len(self._parts[number]) == self.count, PATIENCE_S
            ):
                raise TimeoutError(f"gather {number} was started by {set(self._parts[number])}")
            parts = [self._parts[number][rank][0] for rank in range(self.count)]
            sizes = {part.numel() for part in parts}
            assert len(sizes) == 1, f"gather {number} has parts of {sizes} bytes"
            return parts, self._end(number)

    def _end(self, number: int) -> float:
        end = 0.0
        for deposits in self._parts[: number + 1]:
            begin = max(clock for _, clock in deposits.values())
            size = next(iter(deposits.values()))[0].numel()
            end = max(end, begin) + self._seconds_per_byte * size * (self.count - 1)
        return end
