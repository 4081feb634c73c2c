"""Facts about a model that hold for each copy of it. Many steps of one model are predicted, each of
a copy of its own; what takes a probe to know is found once for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Facts = dict[Hashable, Any]

_facts: ContextVar[Facts | None] = ContextVar("facts", default=None)


def known_facts() -> Facts:
    """Return those of the model that is looked at here; nothing is known, and nothing remembered,
    outside of `with_facts`.
    """
    facts = _facts.get()
    return {} if facts is None else facts


@contextmanager
def with_facts(facts: Facts) -> Iterator[None]:
    """Make `known_facts` these, one model's, in this scope and thread."""
    token = _facts.set(facts)
    try:
        yield
    finally:
        _facts.reset(token)
