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


def at_least(bound: int, got: int) -> tuple[str, str]:
    """A bound from below, and what was got in place of it, for an error. The bound is rounded up:
    what it says is enough. Where both would read alike they are in bytes.
    """
    said = _in_mb(-(-bound * 10 // MB) / 10) if bound >= 0.05 * MB else f"{bound:,} B"
    if said != as_text(int(got)):
        return said, as_text(got)
    given = getattr(got, "given", "")
    return f"{bound:,} B", f"{given} ({got:,} B)" if given else f"{got:,} B"


def _in_mb(megabytes: float) -> str:
    return f"{megabytes:,.1f} MB"
