"""First arguments of running functions, by their frames."""

from __future__ import annotations

import inspect
import sys
from functools import lru_cache
from types import CodeType, FrameType

_STAYS = sys.version_info < (3, 13)
"""Whether the dict of a frame's locals stays with the frame, and holds them."""
_MAY_HOLD_IT = frozenset(("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"))


def first_argument(frame: FrameType) -> object:
    """The value that a frame's first argument has now; None where its function has none.

    Before Python 3.13 the dict of locals that is read for that stays with its frame. A tensor whose
    name the function binds to another one (`x = layer(x)`) would live on in it, and count at peaks.
    So the dict is emptied again, which no local notices; but for functions that may have asked for
    the dict themselves, and under a debugger, which writes it back.
    """
    code = frame.f_code
    if not code.co_argcount:
        return None
    values = frame.f_locals
    first = values.get(code.co_varnames[0])
    if _STAYS and _is_ours_to_empty(code) and sys.gettrace() is None:
        values.clear()
    return first


@lru_cache(maxsize=4096)
def _is_ours_to_empty(code: CodeType) -> bool:
    """Whether the dict is a copy, and none but the frame can have it."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and _MAY_HOLD_IT.isdisjoint(code.co_names)
