"""Sizes in bytes as memopt says them: in tables, messages and errors alike, in one unit.

A size is in MB of 10^6 bytes with one digit, or in bytes where that would be 0. A budget that was
given as text is said as it was given, with the same in MB beside it: "24GiB (25,769.8 MB)".
"""

from __future__ import annotations

MB = 10**6


class Size(int):
    """Bytes, and how the user gave them. What is computed from one is a plain int."""

    given: str
    """As it was written; empty for a number."""

    def __new__(cls, nbytes: int, given: str = "") -> Size:
        size = super().__new__(cls, nbytes)
        size.given = given
        return size


def as_text(nbytes: int) -> str:
    """A size to read: "1,234.5 MB", "812 B"."""
    given = getattr(nbytes, "given", "")
    text = _in_mb(nbytes / MB) if abs(nbytes) >= 0.05 * MB or not nbytes else f"{nbytes:,} B"
    return f"{given} ({text})" if given else text


def at_least(nbytes: int) -> str:
    """A bound from below, rounded up, so that the size that it says is within the bound."""
    return _in_mb(-(-nbytes * 10 // MB) / 10) if nbytes >= 0.05 * MB else f"{nbytes:,} B"


def _in_mb(megabytes: float) -> str:
    return f"{megabytes:,.1f} MB"
