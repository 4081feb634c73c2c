"""Sizes in bytes: as people write them, and as memopt says them in tables, messages and errors.

A size is in MB of 10^6 bytes with one digit, or in bytes where that would be 0. A budget that was
given as text is said as it was given, followed by the size in MB: "24GiB (25,769.8 MB)".
"""

from __future__ import annotations

import re

MB = 10**6

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


class Size(int):
    """Bytes, and how the user gave them. What is computed from one is a plain int."""

    given: str
    """The text that the user wrote; empty for a number."""

    def __new__(cls, nbytes: int, given: str = "") -> Size:
        size = super().__new__(cls, nbytes)
        size.given = given
        return size


def as_bytes(who: str, size: object, least: int = 1) -> Size:
    """An int; or a string such as "40GiB" (2**30 bytes each), "24 GB" (10**9) or "1.5e9".

    Raises:
        TypeError, ValueError: it is not a size, or below `least`.
    """
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise TypeError(f"{who} must be bytes or a string such as '40GiB', got {size!r}")
    if isinstance(size, str):
        number = _parsed(size)
        if number is None:
            raise ValueError(f"{who} must be bytes or a string such as '40GiB', got {size!r}")
    else:
        number = float(size)
    if not least <= number < 1 << 62:
        raise ValueError(
            f"{who} must be at least {'one byte' if least else '0'} and below 2^62, got {size!r}"
        )
    given = size.strip() if isinstance(size, str) else getattr(size, "given", "")
    return Size(size if isinstance(size, int) else int(number), given)


class BudgetTooSmall(ValueError):
    """Nothing that memopt can choose stays within the budget."""

    def __init__(self, message: str, floor: int) -> None:
        super().__init__(message)
        self.floor = floor
        """The least budget that something was found for, in bytes."""


def as_text(nbytes: int) -> str:
    """A size to read: "1,234.5 MB", "812 B"."""
    given = getattr(nbytes, "given", "")
    text = _in_mb(nbytes / MB) if abs(nbytes) >= 0.05 * MB or not nbytes else f"{nbytes:,} B"
    return f"{given} ({text})" if given else text


def at_least(bound: int, got: int) -> tuple[str, str]:
    """A bound from below, and what was got in place of it, for an error. The bound is rounded up:
    what it says is enough. Where both texts would be equal they are in bytes.
    """
    said = _in_mb(-(-bound * 10 // MB) / 10) if bound >= 0.05 * MB else f"{bound:,} B"
    if said != as_text(int(got)):
        return said, as_text(got)
    given = getattr(got, "given", "")
    return f"{bound:,} B", f"{given} ({got:,} B)" if given else f"{got:,} B"


def _in_mb(megabytes: float) -> str:
    return f"{megabytes:,.1f} MB"


def _parsed(text: str) -> float | None:
    found = _SIZE.fullmatch(text)
    if found is None:
        try:
            return float(text)
        except ValueError:
            return None
    number, unit, binary = found.groups()
    if binary and not unit:
        return None
    return float(number) * (_BINARY if binary else _UNITS)[unit.upper()]
