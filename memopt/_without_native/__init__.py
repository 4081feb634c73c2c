"""Stands in for memopt._C where memopt was installed without its native library.

Regions are PyTorch's own checkpoint, plans are solved in Python, anatomy needs nothing native.
All that needs kernels, recipes or the offload engine raises `NativeLibraryMissing`, which says how
to get the library. Names and signatures are those of `_C.pyi`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from memopt._without_native.allocations import Allocations
from memopt._without_native.call_scopes import (
    CallHooks,
    become_call_hooks,
    end_interrupted_calls,
    enter_context,
    leave_call,
)
from memopt._without_native.flags import Flags, flags, set_flags
from memopt._without_native.missing import NativeLibraryMissing, Ops
from memopt._without_native.modules_reached import modules_reached
from memopt._without_native.plan import PlanChain, PlanFront
from memopt._without_native.region import RegionSettings, Stop, refuses_hooks, run_region

__all__ = [
    "Allocations",
    "CallHooks",
    "Flags",
    "NativeLibraryMissing",
    "Ops",
    "PlanChain",
    "PlanFront",
    "RegionSettings",
    "Stop",
    "become_call_hooks",
    "end_interrupted_calls",
    "enter_context",
    "flags",
    "leave_call",
    "modules_reached",
    "refuses_hooks",
    "run_region",
    "set_flags",
]

# What other files read when they are imported: there are no kernels.
INTERCEPT_KEY = "DeferredInit"
RECIPES_KEY = "memopt.convert: recipes"


def activations() -> dict[str, bool]:
    """No kernels, no names."""
    return {}


def dtypes() -> dict[Any, list[Any]]:
    """No kernels, no dtypes."""
    return {}


def device_types() -> list[str]:
    """No kernels, no devices."""
    return []


def recipes_are_on() -> bool:
    """Nothing has a recipe."""
    return False


def makes_output_again() -> bool:
    """Nothing has a recipe."""
    return False


def keeps_arguments() -> bool:
    """PyTorch's checkpoint saves the arguments of a region as any tensor."""
    return False


def offload_stats(*, reset: bool, wait: bool) -> list[dict[str, Any]]:
    """Nothing was offloaded."""
    return []


def functions_take(tensor: object, /) -> bool:
    """PyTorch's functions are never replaced."""
    return False


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NativeLibraryMissing(name)
