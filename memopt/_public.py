"""A public function that other public names stand under: memopt.offload() and memopt.offload.stats.

A plain function would take attributes too, but type checkers and editors would not know them.
Names from before are answered with a warning.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

# Names that stood at the top level before, and where they are now.
MOVED = {
    "Accumulated": "types.Accumulated",
    "Anatomy": "types.Anatomy",
    "CheckpointBuffers": "types.CheckpointBuffers",
    "CompiledPlan": "types.CompiledPlan",
    "Fitted": "types.Fitted",
    "OffloadStats": "types.OffloadStats",
    "Report": "types.Report",
    "apply_checkpointing": "apply_activation_checkpointing",
    "checkpoint_buffers": "checkpoint.buffers",
    "compile_options": "compile.options",
    "configure_offload": "offload.configure",
    "disable_checkpointing": "checkpoint.disable",
    "empty_offload_cache": "offload.empty_cache",
    "is_checkpointing": "checkpoint.is_checkpointing",
    "is_recomputing": "checkpoint.is_recomputing",
    "offload_stats": "offload.stats",
    "ops_worth_saving": "checkpoint.ops_worth_saving",
    "patch_functional": "convert.functions",
}

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class PublicFunction(Generic[P, R_co]):
    """Calls `function`, under its name in memopt. Subclasses hold the names that stand under it.

    Signature and documentation are the function's. Pickle and copy keep it by name, so that a model
    that holds it (in functools.partial, say) can be saved and copied.
    """

    def __init__(self, function: Callable[P, R_co]) -> None:
        functools.update_wrapper(self, function)
        self.__module__ = "memopt"
        self.__signature__ = inspect.signature(function)
        self._function = function

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> str:
        return self._function.__name__

    def __repr__(self) -> str:
        return f"<function memopt.{self._function.__name__}>"


def moved(memopt: ModuleType, name: str) -> Any:
    """The object that `name` stood for, with a warning that says where it is now."""
    if name not in MOVED:
        raise AttributeError(f"module 'memopt' has no attribute {name!r}")
    warnings.warn(f"memopt.{name} is now memopt.{MOVED[name]}", DeprecationWarning, stacklevel=3)
    return attrgetter(MOVED[name])(memopt)
