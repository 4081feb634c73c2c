"""A region's name in error messages: its module's path in the model, or its function's name."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

from torch import nn


def region_name(subject: object) -> str:
    """The name of a module, of a module's method, or of anything callable.

    A module is named by its path from the outermost module that holds it ("Model.layers.3") and
    its class. Looking for that walks all living modules, which only an error message may cost.
    """
    subject = unwrapped(subject)
    if isinstance(subject, nn.Module):
        return _module_name(subject)
    if isinstance(subject, MethodType) and isinstance(subject.__self__, nn.Module):
        return f"{_module_name(subject.__self__)}.{subject.__name__}"
    named: Any = subject if hasattr(subject, "__qualname__") else type(subject)
    return f"{named.__module__}.{named.__qualname__}"


def unwrapped(subject: Any) -> Any:
    """The function that a partial, or a function or object around another one, calls in the end."""
    while isinstance(subject, functools.partial) or hasattr(subject, "__wrapped__"):
        subject = subject.func if isinstance(subject, functools.partial) else subject.__wrapped__
    return subject


def joined(paths: Iterable[str]) -> str:
    """The names in one text: both of two, or the first and the last of more."""
    paths = list(paths)
    return ", ".join(paths) if len(paths) <= 2 else f"{paths[0]}, ..., {paths[-1]}"


def by_reason(reasons: Mapping[str, str]) -> str:
    """Names with the reasons that are said of them, those of one reason together."""
    grouped: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        grouped.setdefault(reason, []).append(path)
    return "; ".join(f"{joined(paths)} ({reason})" for reason, paths in grouped.items())


def _module_name(module: nn.Module) -> str:
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    path = _path(module)
    return f"{path} ({kind})" if path else kind


def _path(module: nn.Module) -> str:
    """The path from the outermost module that holds `module`; empty if none does."""
    holders: dict[int, tuple[nn.Module, str]] = {}
    for holder in gc.get_objects():
        if issubclass(type(holder), nn.Module):  # isinstance asks proxies, which may be dead
            for name, child in holder.__dict__.get("_modules", {}).items():
                holders.setdefault(id(child), (holder, name))
    names: list[str] = []
    seen: set[int] = set()
    while id(module) in holders and id(module) not in seen:
        seen.add(id(module))
        module, name = holders[id(module)]
        names.append(name)
    return ".".join([type(module).__qualname__, *reversed(names)]) if names else ""
