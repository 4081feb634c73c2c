"""The modules that `convert` leaves as they are because the caller says so."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from memopt.memory.modules import ByModule, paths_of

SkipOne = str | type[nn.Module] | Callable[[nn.Module], bool]
Skip = SkipOne | Sequence[SkipOne]


def skipped(model: nn.Module, skip: Skip | None) -> Mapping[nn.Module, str]:
    """The modules that `skip` names, and all modules inside these, by their first paths.

    Raises:
        TypeError: `skip` or a part of it is no path, class or function.
        ValueError: no module has such a path.
    """
    paths = paths_of(model)
    named = _named(paths, skip)
    return ByModule((inner, paths[inner]) for module in named for inner in module.modules())


def outermost(modules: Mapping[nn.Module, str]) -> list[str]:
    """The paths of those that are not inside another one, for the report."""
    inside = {child for module in modules for child in module.modules() if child is not module}
    return [path or "(the model)" for module, path in modules.items() if module not in inside]


def _named(paths: Mapping[nn.Module, str], skip: Skip | None) -> Iterator[nn.Module]:
    parts: Any = () if skip is None else skip
    for part in parts if isinstance(parts, (list, tuple, set, frozenset)) else (parts,):
        if isinstance(part, str):
            found = [m for m, path in paths.items() if fnmatch.fnmatchcase(path, part)]
            if not found:
                raise ValueError(
                    f"convert: skip must name modules by paths of named_modules() or patterns of "
                    f"them, got {part!r}, which no module has"
                )
            yield from found
        elif isinstance(part, type) and issubclass(part, nn.Module):
            yield from (module for module in paths if isinstance(module, part))
        elif callable(part) and not isinstance(part, (type, nn.Module)):
            yield from (module for module in paths if part(module))
        else:
            raise TypeError(
                "convert: skip must be a path, a subclass of nn.Module, a function of a module, or "
                f"a sequence of these, got {part!r}"
            )
