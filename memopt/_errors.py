"""Errors name the function that the user called, and warnings the line that called it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

USAGE_ERROR = 2
"""The exit status of a command whose arguments cannot be run."""


class UsageError(Exception):
    """The arguments cannot be run; the message is one line for the user."""


@contextmanager
def in_the_name_of(who: str, *callees: str) -> Iterator[None]:
    """Raises the errors of other public functions in the name of `who`, which calls them. Also a
    decorator.

        @in_the_name_of("fit", "plan")        # "fit: budget must be ...", of memopt.fit

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


def warn(message: str) -> None:
    """Warns of the innermost line that is neither memopt's nor PyTorch's. Python shows a message
    once for each such line.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level + 1)


_INSIDE = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))


def _is_inside(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_INSIDE) or file == contextlib.__file__
