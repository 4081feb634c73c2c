"""The result of `memopt.check`: a table, and whether everything that was asked took effect."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from memopt._arguments import as_path
from memopt.memory.sizes import as_text
from memopt.show.sections import Section, Tables
from memopt.show.shown import Shown


class FateWithoutEffect(RuntimeError):
    """Something that was asked of a model does nothing; the message is the report."""


@dataclass(frozen=True)
class CheckedBlock:
    """One block: what was asked, and what happened."""

    path: str
    asked: str
    """The fate that it is set to: "keep", or who made it a region."""
    happened: str
    """The fate that it had in the step."""
    calls: int
    """Forwards in the step, without those in backward."""
    again: int
    """How often backward recomputes it for each of them."""
    plain_kept: int | None
    """Bytes that it keeps for backward without any of what was asked; None: not known."""
    kept: int | None
    """Bytes that it keeps as it is; what a region is given belongs to what is around it."""
    problem: str
    """Why what was asked has no effect; empty: it has."""


@dataclass(frozen=True)
class Check(Shown):
    """`print` it; `ok` says whether everything took effect, `raise_if_not_ok` raises where it did
    not.
    """

    model: str
    blocks: tuple[CheckedBlock, ...]
    kept: int | None
    """Bytes that are allocated when forward has ended, by the allocator; None: nothing ran."""
    peak: int | None
    """The most of forward and backward, by the allocator, beyond what was there before."""
    predicted_kept: int | None
    """Bytes kept for backward, by a predicted step; None: the step cannot be predicted."""
    plain_kept: int | None
    """Bytes kept for backward without any of what was asked."""
    plain_peak: int | None
    """The peak without any of what was asked, of a predicted step."""
    plain_margin: int
    """Bytes of `plain_peak` that may not be allocated: a kernel's scratch that has only a bound."""
    offloaded: int
    """Bytes that left the device in the step."""
    problems: tuple[str, ...]
    """Problems of the model as a whole; those of blocks stand with these."""
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything that was asked took effect."""
        return not self.problems and not any(block.problem for block in self.blocks)

    def raise_if_not_ok(self) -> None:
        """Raise where something has no effect, for CI.

        Raises:
            FateWithoutEffect: something that was asked took no effect.
        """
        if not self.ok:
            raise FateWithoutEffect(str(self))

    def tables(self) -> Tables:
        """The report: blocks with problems first, equal blocks in one row."""
        rows = [
            [
                _range(paths),
                one.asked,
                one.happened,
                str(one.calls),
                str(one.again),
                _bytes(one.plain_kept),
                _bytes(one.kept),
            ]
            for paths, one in _alike(self.blocks)
        ]
        headings = ("Block", "Asked", "Happened", "calls", "again", "kept plain", "kept")
        problems = [f"{b.path or 'the model'}: {b.problem}" for b in self.blocks if b.problem]
        all_problems = (*self.problems, *problems)
        lines = [f"no effect: {line}" for line in all_problems] or [
            "everything that was asked took effect"
        ]
        return Tables(self._title(), [Section("Blocks", headings, rows)], (*lines, *self.notes))

    def _title(self) -> str:
        known = []
        if self.predicted_kept is not None and self.plain_kept is not None:
            known.append(
                f"kept for backward: {as_text(self.plain_kept)} plain, "
                f"{as_text(self.predicted_kept)} as it is"
            )
        if self.kept is not None and self.peak is not None:
            line = (
                f"by the allocator: {as_text(self.kept)} after forward, peak {as_text(self.peak)}"
            )
            if self.plain_peak is not None:
                line += f", plain {as_text(self.plain_peak)} (predicted)"
            known.append(line)
            if self.plain_margin:
                known.append(
                    f"up to {as_text(self.plain_margin)} of the predicted peak may not be "
                    "allocated: a bound of kernels' scratch"
                )
        if self.offloaded:
            known.append(f"offloaded: {as_text(self.offloaded)}")
        return "\n".join([self.model, *known])

    def to_json(self, path: str | Path) -> None:
        """Write all fields to a file, as JSON."""
        as_path("Check.to_json", path).write_text(
            json.dumps({**asdict(self), "ok": self.ok}, indent=1) + "\n"
        )


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else as_text(nbytes)


def _alike(blocks: tuple[CheckedBlock, ...]) -> list[tuple[list[str], CheckedBlock]]:
    """Blocks that stand one after another and differ in their paths alone, together."""
    found: list[tuple[list[str], CheckedBlock]] = []
    for block in sorted(blocks, key=lambda b: not b.problem):
        if found and _but_path(found[-1][1]) == _but_path(block):
            found[-1][0].append(block.path)
        else:
            found.append(([block.path], block))
    return found


def _but_path(block: CheckedBlock) -> tuple[object, ...]:
    return tuple(value for name, value in asdict(block).items() if name != "path")


def _range(paths: list[str]) -> str:
    first, last = paths[0] or "the model", paths[-1]
    return first if len(paths) == 1 else f"{first}, ..., {last} ({len(paths)})"
