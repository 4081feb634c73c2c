"""Functions of modules and classes, exchanged for a while in one thread.

Other threads may exchange the same function meanwhile, and end in any order: what stands in for it
is made for the first of them and taken away behind the last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

Instead = Callable[..., Any]
"""Called with the original and its arguments."""


class _StandIn:
    """Stands in for a function while it is exchanged in at least one thread."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.original = getattr(owner, name)
        self.is_inherited = name not in vars(owner)
        self.runs: dict[int, list[Instead]] = {}
        """Lists what each thread runs, the innermost last."""

        def function(*args: Any, **kwargs: Any) -> Any:  # a function: classes bind it to instances
            found: Callable[..., Any] = self.original
            for run in self.runs.get(threading.get_ident(), ()):
                found = partial(run, found)
            return found(*args, **kwargs)

        self.function = function

    def put(self) -> None:
        setattr(self.owner, self.name, self.function)

    def take_away(self) -> None:
        """Others who put theirs in its place meanwhile go on calling the original by it."""
        if vars(self.owner).get(self.name) is not self.function:
            return
        if self.is_inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


_lock = threading.Lock()
_stand_ins: dict[tuple[int, str], _StandIn] = {}
"""Keyed by the owner's address and the function's name."""


@contextmanager
def exchanged(owner: Any, name: str, run: Instead) -> Iterator[None]:
    """Have this thread call `run(original, ...)` where code calls `owner.name(...)`."""
    key, thread = (id(owner), name), threading.get_ident()
    with _lock:
        stand_in = _stand_ins.get(key)
        if stand_in is None or vars(owner).get(name) is not stand_in.function:
            stand_in = _stand_ins[key] = _StandIn(owner, name)
            stand_in.put()
        stand_in.runs.setdefault(thread, []).append(run)
    try:
        yield
    finally:
        with _lock:
            stand_in.runs[thread].remove(run)
            if not stand_in.runs[thread]:
                del stand_in.runs[thread]
            if not stand_in.runs:
                stand_in.take_away()
                if _stand_ins.get(key) is stand_in:
                    del _stand_ins[key]
