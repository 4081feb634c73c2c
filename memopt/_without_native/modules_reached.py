"""The modules that a call would use, as csrc/python/modules_reached.h finds them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from types import CellType, FunctionType, MethodType

from torch import nn


def modules_reached(*roots: object) -> list[nn.Module]:
    """The modules that calling one of `roots` can be seen to use, without asking them."""
    found: list[nn.Module] = []
    seen: set[int] = set()
    pending = list(roots)
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found.append(item)
        pending += _used_by(item)
    return found


def _used_by(item: object) -> Iterator[object]:
    if isinstance(item, nn.Module):
        yield from item._modules.values()
    elif isinstance(item, MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, FunctionType):
        yield from (item.__defaults__, item.__kwdefaults__)
        yield from item.__closure__ or ()
        named = (item.__globals__.get(name) for name in item.__code__.co_names)
        yield from (value for value in named if isinstance(value, nn.Module))
    elif isinstance(item, CellType):
        with suppress(ValueError):  # not assigned yet
            yield item.cell_contents
    elif isinstance(item, (list, tuple)):
        yield from item
    elif isinstance(item, dict):
        yield from item.values()
    elif callable(item) and not isinstance(item, type):
        yield from getattr(item, "__dict__", {}).values()
