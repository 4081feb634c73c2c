"""Arguments that a user gave: the error names the function, the rule and the value."""

from __future__ import annotations

import os
from pathlib import Path


def check_flags(who: str, **given: object) -> None:
    """Raises TypeError where one is neither True nor False: "no" would be taken for True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{who}: {name} must be True or False, got {value!r}")


def check_count(who: str, name: str, value: object, least: int = 1) -> int:
    """Return an int that a user gave. Raises TypeError or ValueError where it is none, or less."""
    rule = f"{who}: {name} must be an int of at least {least}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(rule)
    if value < least:
        raise ValueError(rule)
    return value


def as_path(who: str, path: object, name: str = "path") -> Path:
    """Return the path of a file. Raises TypeError where it is neither a str nor a path."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{who}: {name} must be a str or a path, got {path!r}")
    return Path(path)
