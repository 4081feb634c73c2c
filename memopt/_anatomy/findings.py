"""Findings about the memory of a training step: predicted, measured, and by formula."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memopt.memory.pieces import CATEGORIES, Piece
from memopt.memory.trace import Moment, Trace
from memopt.whatif.advice import Advice


@dataclass(frozen=True)
class CategoryRow:
    """A category at the peak of what was predicted."""

    category: str
    predicted: int | None
    measured: int | None
    formula: int | None

    @property
    def error(self) -> float | None:
        """The error of the prediction, relative to what was measured."""
        return _relative(self.predicted, self.measured)

    @property
    def formula_error(self) -> float | None:
        """The error of the formula, relative to what was measured, or else predicted."""
        return _relative(
            self.formula, self.measured if self.measured is not None else self.predicted
        )


@dataclass(frozen=True)
class AllocatorRow:
    """The counts of PyTorch's allocator on a measured step on a GPU, next to the ledger's."""

    peak_allocated: int
    peak_reserved: int
    before: int
    """Allocated when the step began."""
    in_ledger: int
    """Bytes that the ledger knew of then."""

    @property
    def scratch(self) -> int:
        """The allocator's peak beyond the ledger's: kernels' own scratch, library workspaces, and
        memory of others. Negative where frees come late.
        """
        return self.peak_allocated - self.before


@dataclass(frozen=True)
class Findings:
    """The memory of one training step, in bytes."""

    model: str
    device: str
    """The device that the step was predicted for."""
    parameters: int
    trained: int
    rows: int
    """Rows of the batch."""
    options: str
    """Fates, autocast, accumulation and optimizer, in words."""
    predicted: Trace | None
    measured: Trace | None
    formula: dict[str, int] | None
    """Bytes of a transformer by category."""
    flops_6nd: int | None
    """6 N D for N parameters of matrices and D tokens, to compare with the counted operations."""
    advice: tuple[Advice, ...]
    overhead: float | None
    """Time of the measured step under the ledger by that of one without."""
    allocator: AllocatorRow | None
    notes: tuple[str, ...]
    pieces: tuple[Piece, ...] = field(default=(), repr=False, compare=False)
    """All memory of the step, each piece with its birth and its end. Not in `to_dict`."""

    @property
    def trace(self) -> Trace:
        """The measured step, or else the predicted one."""
        trace = self.measured or self.predicted
        assert trace is not None  # anatomy makes one of them
        return trace

    @property
    def peak(self) -> Moment:
        return self.trace.peak

    def moment_bytes(self, name: str) -> dict[str, int]:
        """Bytes by category at "peak" or one of the moments' names."""
        return self.trace.moment(name).by_category

    def categories(self, moment: str = "peak") -> tuple[CategoryRow, ...]:
        """Predicted, measured and by formula, at the peak or one of the moments."""
        values = [
            trace.moment(moment).by_category if trace is not None else {}
            for trace in (self.predicted, self.measured)
        ]
        formula = self.formula or {}
        return tuple(
            CategoryRow(c, values[0].get(c), values[1].get(c), formula.get(c)) for c in CATEGORIES
        )

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings, numbers and None, as JSON has them."""
        return {
            **_without_pieces(self),
            "peak": asdict(self.peak),
            "categories": [
                {**asdict(row), "error": row.error, "formula_error": row.formula_error}
                for row in self.categories()
            ],
        }


def _without_pieces(findings: Findings) -> dict[str, Any]:
    found = asdict(replace(findings, pieces=()))
    del found["pieces"]
    return found


def _relative(value: int | None, reference: int | None) -> float | None:
    if value is None or not reference:
        return None
    return (value - reference) / reference
