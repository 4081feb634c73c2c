"""The result of `memopt.fits`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memopt.memory.pieces import in_words
from memopt.memory.sizes import as_text
from memopt.show.sections import Section, Tables
from memopt.show.shown import Shown


@dataclass(frozen=True)
class Way:
    """A change to the step, and its peak with it."""

    how: str
    """The call that makes it."""
    peak: int
    """Bytes, predicted."""
    fits: bool


@dataclass(frozen=True)
class Fits(Shown):
    """Whether a training step fits into a device's memory. True in conditions where it does."""

    model: str
    device: str
    memory: int
    """Bytes of the device."""
    reserve: int
    """Bytes of them that are not the step's."""
    peak: int
    """Bytes of the step at its peak, predicted, of one rank."""
    phase: str
    """The phase of the step in which the peak is."""
    module: str
    by_category: dict[str, int]
    """Bytes of each category at the peak."""
    always: int
    """Bytes of weights, gradients and optimizer states, whatever becomes of activations."""
    ranks: int
    parallel: str
    """"fsdp" or "ddp"; empty for one rank."""
    weight_bits: int | None
    quantized: int
    """How many weights are stored in so many bits."""
    rows: int
    """Rows in the batch of one rank."""
    fates: str
    ways: tuple[Way, ...]
    """Changes with which it fits, at most three; where none is enough, the one that saves most."""

    def __bool__(self) -> bool:
        return self.spare >= 0

    @property
    def spare(self) -> int:
        """Bytes that are left of the device; below 0 the bytes that are missing."""
        return self.memory - self.reserve - self.peak

    def to_dict(self) -> dict[str, Any]:
        """All fields, with `fits` and `spare`."""
        return {**asdict(self), "fits": bool(self), "spare": self.spare}

    def tables(self) -> Tables:
        peak = [[in_words(name), as_text(nbytes)] for name, nbytes in self.by_category.items()]
        peak += [["total", as_text(self.peak)]]
        sections = [Section("At the peak", ("Category", "predicted"), peak)]
        if self.ways:
            rows = [[way.how, as_text(way.peak), "yes" if way.fits else "no"] for way in self.ways]
            title = "What would make it fit" if self.ways[0].fits else "What comes nearest"
            sections.append(Section(title, ("How", "peak", "Fits"), rows, is_urgent=True))
        return Tables(self._title(), sections, tuple(self._notes()))

    def _title(self) -> str:
        answer = (
            f"fits, with {as_text(self.spare)} to spare"
            if self
            else f"does not fit: {as_text(-self.spare)} are missing"
        )
        where = f" of {self.module}" if self.module else ""
        reserve = f", {as_text(self.reserve)} of it reserved" if self.reserve else ""
        return (
            f"{self.model}, a batch of {self.rows}, {self._setting()}: {answer}\n"
            f"peak {as_text(self.peak)} in {self.phase}{where}, memory {as_text(self.memory)}"
            f"{reserve}"
        )

    def _setting(self) -> str:
        words = [self.fates]
        if self.ranks > 1:
            name = "FSDP2" if self.parallel == "fsdp" else "DistributedDataParallel"
            words.append(f"one of {self.ranks} ranks of {name}")
        if self.weight_bits:
            words.append(f"{self.quantized} frozen weights in {self.weight_bits} bits")
        return ", ".join(words)

    def _notes(self) -> list[str]:
        notes = []
        if self.always > self.memory - self.reserve:
            notes.append(
                f"weights, gradients and optimizer states alone are {as_text(self.always)}: "
                "no fate of activations is enough; shard them over more ranks, freeze weights "
                "(LoRA), or take an optimizer with smaller states"
            )
        if self.reserve:
            notes.append(
                "the reserve stands for the CUDA context, workspaces and gaps between allocations, "
                "which are not predicted"
            )
        return notes
