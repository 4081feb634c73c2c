"""Recipes: what memopt's ops return is made again in backward instead of being kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recompute() -> Iterator[None]:
    """In this scope and thread, a tensor that autograd saves and that an op of memopt returned is
    kept as its recipe.
    """
    yield
