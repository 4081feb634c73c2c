"""Errors name the function that the user called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

USAGE_ERROR = 2
"""The exit status of a command whose arguments cannot be run."""


class UsageError(Exception):
    """The arguments cannot be run; the message is one line for the user."""


@contextmanager
def in_the_name_of(who: str, *callees: str) -> Iterator[None]:
    """Raises the errors of other public functions in the name of `who`, which calls them. Also a
    decorator.

        @in_the_name_of("memopt.fit", "memopt.plan")        # "memopt.fit: budget must be ..."

    Args:
        callees: the names that those errors begin with.
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        text = str(error)
        begin = re.match(rf"(?:{'|'.join(map(re.escape, callees))}): ", text)
        if begin is not None:
            error.args = (f"{who}: {text[begin.end() :]}", *error.args[1:])
        raise
