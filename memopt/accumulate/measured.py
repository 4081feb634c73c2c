"""The peak of a step that runs, whatever it does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt.anatomy.ledger import Ledger

NEVER_FITS = 1 << 62


def bytes_of(who: str, budget: object) -> int:
    """Raises TypeError where a budget is no number of bytes."""
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"{who}: budget must be an int of bytes, got {type(budget).__name__}")
    return budget


def peak_of(function: Callable[[int], object], rows: int) -> int:
    """The most bytes at any time of `function(rows)`: on an accelerator what its allocator says; on
    the CPU of what it makes, and of what it reads that was there before. NEVER_FITS where memory
    runs out.
    """
    try:
        if torch.accelerator.is_available():
            return _on_accelerator(function, rows)
        ledger = _Everything(nn.Module())
        with ledger:
            function(rows)
    except torch.OutOfMemoryError:
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        return NEVER_FITS
    return ledger.most()


def _on_accelerator(function: Callable[[int], object], rows: int) -> int:
    torch.accelerator.reset_peak_memory_stats()
    function(rows)
    torch.accelerator.synchronize()
    most: int = torch.accelerator.max_memory_allocated()
    return most


class _Everything(Ledger):
    """Knows nothing of the step: what operators read and did not make was there before."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.adopt("", [("", (args, kwargs))])
        return super().run(func, args, kwargs)

    def most(self) -> int:
        """Bytes at the peak. What was found late was there from the beginning."""
        before = [entry for entry in self.log if entry.piece.phase == "before" and entry.sign > 0]
        later = [entry for entry in self.log if entry.piece.phase != "before" or entry.sign < 0]
        sizes = (entry.sign * entry.piece.nbytes for entry in later)
        start = sum(entry.piece.nbytes for entry in before)
        return max(itertools.accumulate(sizes, initial=start))
