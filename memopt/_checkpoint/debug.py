"""The log of `checkpoint(debug=True)`: operators of forward and recompute, and their first
difference.
"""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt.memory.storages import tensors_in
from memopt.memory.uncompiled_mode import UncompiledMode

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MEMOPT = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Operator(NamedTuple):
    """One operator call, as far as two runs should agree on it."""

    name: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


class OperatorLog(UncompiledMode):
    """Writes down the operators that run in its scope, with the line that called each."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.lines: list[str] = []

    def __enter__(self) -> OperatorLog:
        self.operators.clear()
        self.lines.clear()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensors = tensors_in((args, kwargs))
        self.operators.append(Operator(str(func), ", ".join(map(_describe, tensors))))
        self.lines.append(_calling_line())
        return func(*args, **(kwargs or {}))


class OperatorLogs:
    """The logs of a region's forward and of its latest recompute."""

    def __init__(self) -> None:
        self._forward, self._recompute = OperatorLog(), OperatorLog()

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The two contexts that `context_fn` has to return."""
        return self._forward, self._recompute

    def first_difference(self) -> str:
        """Text that goes on after an error message."""
        pairs = itertools.zip_longest(self._forward.operators, self._recompute.operators)
        for index, (then, now) in enumerate(pairs):
            if then != now:
                forward = _entry(self._forward, index)
                recompute = _entry(self._recompute, index)
                return (
                    f"; operator {index} is the first that differs: forward ran {forward}, "
                    f"recompute ran {recompute}"
                )
        return "; both ran the same operators"


def _entry(log: OperatorLog, index: int) -> str:
    if index >= len(log.operators):
        return "none"
    return f"{log.operators[index]} at {log.lines[index]}"


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _calling_line() -> str:
    """The innermost line outside PyTorch and memopt."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((_TORCH, _MEMOPT)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
