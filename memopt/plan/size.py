"""Sizes in bytes, as people write them. As memopt says them: memopt/memory/sizes.py."""

from __future__ import annotations

import re

from memopt.memory.sizes import Size

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


def as_bytes(who: str, size: object) -> Size:
    """An int; or a string such as "40GiB" (2**30 bytes each), "24 GB" (10**9) or "1.5e9".

    Raises:
        TypeError, ValueError: it is no size, or not above 0.
    """
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise TypeError(f"{who} must be bytes or a string such as '40GiB', got {size!r}")
    if isinstance(size, str):
        number = _parsed(size)
        if number is None:
            raise ValueError(f"{who} must be bytes or a string such as '40GiB', got {size!r}")
    else:
        number = float(size)
    if not 1 <= number < 1 << 62:
        raise ValueError(f"{who} must be at least one byte, got {size!r}")
    given = size.strip() if isinstance(size, str) else getattr(size, "given", "")
    return Size(size if isinstance(size, int) else int(number), given)


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
