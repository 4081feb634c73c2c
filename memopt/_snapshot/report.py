"""The report on a memory snapshot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memopt.memory.pieces import in_words
from memopt.memory.sizes import as_text
from memopt.show.sections import Section, Tables
from memopt.show.shown import Shown


@dataclass(frozen=True)
class LargeBlock:
    """One of the largest blocks at the peak."""

    nbytes: int
    category: str
    line: str
    """The innermost line outside of libraries that its stack has."""


@dataclass(frozen=True)
class Snapshot(Shown):
    """A device's memory as its allocator saw it, in bytes. `print` it."""

    device: int
    peak: int
    """The most that was allocated while the history ran; without a history what is allocated."""
    allocated: int
    """Allocated when the snapshot was taken."""
    reserved: int
    """Reserved from the device then: allocated, and free blocks in segments."""
    largest_free: int
    """The largest free block in a segment."""
    free_blocks: int
    events: int
    """Allocations and ends of them in the history."""
    by_category: dict[str, int]
    """Bytes at the peak; "not known" where no frame tells."""
    by_line: tuple[tuple[str, str, int], ...]
    """Line, category and bytes at the peak, the most first."""
    largest: tuple[LargeBlock, ...]

    @property
    def fragmented(self) -> float:
        """The share of what is reserved that is free, but not in the largest free block."""
        free = self.reserved - self.allocated
        return (free - self.largest_free) / self.reserved if self.reserved else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields, and `fragmented`."""
        return {**asdict(self), "fragmented": self.fragmented}

    def tables(self) -> Tables:
        categories = [[in_words(name), as_text(n)] for name, n in self.by_category.items()]
        categories.append(["total", as_text(self.peak)])
        lines = [[line or "?", in_words(c), as_text(n)] for line, c, n in self.by_line]
        blocks = [[as_text(b.nbytes), in_words(b.category), b.line or "?"] for b in self.largest]
        return Tables(
            self._title(),
            [
                Section("At the peak, by category", ("Category", "bytes"), categories),
                Section("At the peak, by line", ("Line", "Category", "bytes"), lines),
                Section("Largest at the peak", ("bytes", "Category", "Line"), blocks),
            ],
            tuple(self._notes()),
        )

    def _title(self) -> str:
        free = self.reserved - self.allocated
        return (
            f"device {self.device}: peak {as_text(self.peak)} allocated, {self.events:,} events\n"
            f"at the end {as_text(self.allocated)} of {as_text(self.reserved)} reserved; "
            f"{as_text(free)} free in {self.free_blocks:,} blocks, the largest "
            f"{as_text(self.largest_free)} ({self.fragmented:.0%} of the memory in smaller ones)"
        )

    def _notes(self) -> list[str]:
        if not self.events:
            return [
                "there is no history: torch.cuda.memory._record_memory_history() before the steps "
                "records one"
            ]
        if self.fragmented > 0.1:
            return [
                "many small free blocks: PYTORCH_ALLOC_CONF=expandable_segments:True lets the "
                "allocator join them"
            ]
        return []
