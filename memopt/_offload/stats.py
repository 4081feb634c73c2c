"""`memopt.offload.stats`: what offloading has done, and what to do where it did not help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memopt._extension import _C
from memopt.memory.sizes import as_text

__all__ = ["Link", "OffloadStats", "PlaceStats", "offload_stats"]

# Waiting for copies that is worth a word: this share of the time that copies took.
_WORTH_A_WORD = 0.05


@dataclass(frozen=True)
class Link:
    """One direction of the copies."""

    copies: int
    bytes: int
    bytes_timed: int
    """Bytes of the copies that are done; the times are of these."""
    busy_seconds: float
    """Time with a copy under way."""
    stall_seconds: float
    """Time in which the device waited for a copy."""
    most_in_flight: int
    most_bytes_in_flight: int

    @property
    def bytes_per_second(self) -> float:
        """The link's bandwidth while it was busy; 0 before the first copy is done."""
        return self.bytes_timed / self.busy_seconds if self.busy_seconds > 0 else 0.0


@dataclass(frozen=True)
class PlaceStats:
    """Counts of what was offloaded from one device to one place."""

    device: str
    directory: str
    """The file's directory; empty for host memory."""
    out: Link
    back: Link
    prefetch_hits: int
    """Tensors that were back, or on their way, when backward asked."""
    prefetch_misses: int
    """Tensors whose copy back began only then."""
    never_left: int
    """Tensors that backward wanted before they had left."""
    found_elsewhere_bytes: int
    """Bytes of wasted copies: something else held the memory when it was wanted."""
    refused_bytes: int
    """Bytes that stayed on the device, since there was no space."""
    failed_bytes: int
    """Bytes that stayed on the device, since the copy failed."""
    bytes_away: int
    """Bytes that are offloaded now."""
    bytes_held: int
    """Bytes that were to be offloaded and are on the device now."""
    room_in_use: int
    room_high_water: int
    """The most bytes of the pool or the file that were in use at one time."""
    room_allocated: int
    room_pageable: int
    """Bytes of the pool that could not be pinned."""
    peak_bytes: int
    """The device's peak by PyTorch's count (a CPU's: resident memory), if it was reached since the
    counts began; else 0."""
    peak_bytes_away: int
    """Bytes that were offloaded when that peak was reached."""

    @property
    def name(self) -> str:
        return f"{self.device} to {self.directory or 'host memory'}"

    def advice(self) -> Iterator[str]:
        """Advice on what to change, where offloading did not do what it is for."""
        if self.bytes_pinned_share < 1:
            yield (
                f"{as_text(self.room_pageable)} of host memory could not be pinned: copies to it "
                "are slower and hold the host up (ulimit -l, or the memory limit of the container)"
            )
        if self.refused_bytes:
            yield f"{as_text(self.refused_bytes)} found no space and stayed on the device"
        if self.failed_bytes:
            yield f"{as_text(self.failed_bytes)} could not be written and stayed on the device"
        if self.found_elsewhere_bytes:
            yield (
                f"copies of {as_text(self.found_elsewhere_bytes)} were wasted: something else held "
                "the memory (a variable of the training loop, a list of outputs)"
            )
        out, back = self.out, self.back
        if out.stall_seconds > _WORTH_A_WORD * out.busy_seconds:
            hidden = max(0.0, 1 - out.stall_seconds / out.busy_seconds)
            yield (
                f"the computation could not hide the copies out: the device waited "
                f"{out.stall_seconds:.3g} s for {out.busy_seconds:.3g} s of copies at "
                f"{_rate(out)}; about {hidden:.0%} of these bytes would be hidden (fraction=). A "
                "block of width h and sequence length s hides its input if 12 h + s is at least "
                "the device's operations a second by the link's bytes a second"
            )
        if back.stall_seconds > _WORTH_A_WORD * back.busy_seconds:
            yield (
                f"backward waited {back.stall_seconds:.3g} s for copies back at {_rate(back)}: "
                "offload less (fraction=), keep more of the last ones (keep_last=), or allow more "
                "copies ahead (memopt.offload.configure(copies_in_flight=))"
            )
        if self.peak_bytes and self.out.copies and not self.peak_bytes_away:
            yield (
                f"the peak of {as_text(self.peak_bytes)} is reached while nothing is offloaded (in "
                "the optimizer's step, by gradients, outside of the context): offloading does not "
                "lower it"
            )

    @property
    def bytes_pinned_share(self) -> float:
        return 1 - self.room_pageable / self.room_allocated if self.room_allocated else 1.0


@dataclass(frozen=True)
class OffloadStats:
    """The counts of offloading since the process began, or since they were reset."""

    places: tuple[PlaceStats, ...]

    @property
    def bytes_out(self) -> int:
        return sum(place.out.bytes for place in self.places)

    @property
    def bytes_back(self) -> int:
        return sum(place.back.bytes for place in self.places)

    @property
    def stall_seconds(self) -> float:
        return sum(place.out.stall_seconds + place.back.stall_seconds for place in self.places)

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice on what to change, where offloading did not do what it is for."""
        return tuple(f"{place.name}: {text}" for place in self.places for text in place.advice())

    def __str__(self) -> str:
        used = [p for p in self.places if p.out.copies or p.bytes_away or p.refused_bytes]
        if not used:
            return "memopt.offload: nothing was offloaded"
        lines = []
        for place in used:
            out, back = place.out, place.back
            lines += [
                f"memopt.offload, {place.name}:",
                f"  out   {as_text(out.bytes)} in {out.copies} copies at {_rate(out)}, "
                f"stall {out.stall_seconds:.3g} s",
                f"  back  {as_text(back.bytes)} in {back.copies} copies at {_rate(back)}, "
                f"stall {back.stall_seconds:.3g} s",
                f"  found {place.prefetch_hits} on time or on their way, {place.prefetch_misses} "
                f"not begun, {place.never_left} had not left",
                f"  space {as_text(place.room_high_water)} in use at most, of "
                f"{as_text(place.room_allocated)}",
            ]
        return "\n".join([*lines, *(f"  note: {text}" for text in self.advice)])


def offload_stats(*, reset: bool = False, wait: bool = False) -> OffloadStats:
    """Return the counts of offloading: bytes, copies, waiting, bandwidth, prefetching, space; and
    advice where it could not help.

    Args:
        reset: set all counts to zero after this.
        wait: first wait for the copies that are under way. Without it their times are missing.

    Returns:
        One row for each device and place (`places`), sums, and `advice`. `print` it.
    """
    rows = _C.offload_stats(reset=reset, wait=wait)
    return OffloadStats(tuple(_place(row) for row in rows))


def _place(row: dict[str, Any]) -> PlaceStats:
    links = {name: Link(**row[name]) for name in ("out", "back")}
    return PlaceStats(**{**row, **links})


def _rate(link: Link) -> str:
    return f"{link.bytes_per_second / 1e9:.3g} GB/s"
