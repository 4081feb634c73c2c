"""For a package whose name in memopt is a function: the function has its modules as attributes.

Without them `import memopt.convert.report` binds a name under which `memopt.convert.report` is not
found, since `memopt.convert` is the function and not the package.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any


def add_submodules(function: Callable[..., Any], package: str) -> None:
    """Give `function` each module of `package` as an attribute, but for those named with a _."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        if not module.name.startswith("_"):
            setattr(function, module.name, importlib.import_module(f"{package}.{module.name}"))
