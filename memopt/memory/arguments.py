"""An operator's arguments by the names in its schema."""

from __future__ import annotations

from typing import Any


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a call gives: those with their defaults are left out."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs
