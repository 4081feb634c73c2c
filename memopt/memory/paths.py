"""Paths of modules, as `nn.Module.named_modules` has them: which are inside which."""

from __future__ import annotations

from collections.abc import Collection


def paths_around(path: str) -> set[str]:
    """The paths of the modules around one; the empty path is the model's."""
    return {"", *(path[:end] for end, char in enumerate(path) if char == ".")} if path else set()


def owner_of(name: str) -> str:
    """The path of the module that a parameter's or a buffer's full name names."""
    return name.rpartition(".")[0]


def is_inside(path: str, other: str) -> bool:
    """Whether a module is inside another one."""
    return other in paths_around(path)


def overlap(one: str, other: str) -> bool:
    """Whether two are the same module, or one is inside the other."""
    return one == other or is_inside(one, other) or is_inside(other, one)


def outermost_paths(paths: Collection[str]) -> list[str]:
    """The paths that are inside no other of them, in their order."""
    those = set(paths)
    return [path for path in paths if paths_around(path).isdisjoint(those)]
