"""The place where something was made: the module whose forward ran, and the line of user code."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch


class CodePlace(NamedTuple):
    module: str
    line: str


NOWHERE = CodePlace("", "")

_MEMOPT = str(Path(__file__).parent.parent) + "/"
_STEP = str(Path(__file__).with_name("step.py"))
_LIBRARIES = (str(Path(torch.__file__).parent) + "/", _MEMOPT, "<")


@lru_cache(maxsize=4096)
def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES)


@lru_cache(maxsize=4096)
def _short(filename: str) -> str:
    return Path(filename).name


def line_of(frame: FrameType | None) -> str:
    """The line outside of PyTorch and memopt that `frame` runs in: "model.py:12"; empty: none, as
    where the step itself calls the operator, not the model or the loss.
    """
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename == _STEP:
            return ""
        if not _is_library(filename):
            return f"{_short(filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
