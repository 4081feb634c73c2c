"""What code that compares classes, methods and attributes finds in a module."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from memopt._forwards import is_ours


def looks(module: nn.Module) -> dict[str, Any]:
    """The very objects; without the attributes that memopt has put there."""
    cls = type(module)
    named = ((n, inspect.getattr_static(cls, n)) for n in dir(cls))
    methods = {n: getattr(module, n).__func__ for n, f in named if inspect.isfunction(f)}
    return {
        "class": (cls, module.__class__),
        "classes": cls.__mro__,
        "methods": methods,
        "globals": {name: id(method.__globals__) for name, method in methods.items()},
        "attributes": {
            name: id(value) for name, value in vars(module).items() if not is_ours(name)
        },
        "of the class": dict(vars(cls)),
    }
