"""The places that tensors are offloaded to: "cpu", "disk", or a directory."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Literal, TypeAlias

from memopt._errors import warn
from memopt._extension import _C

Place: TypeAlias = Literal["cpu", "disk"] | os.PathLike[str]
"""Host memory, files in the directory that `configure_offload` was given, or files in this one."""


def check_names_place(who: str, place: object) -> None:
    """Raises TypeError or ValueError where `place` is no place; whether it can be written to is not
    asked.
    """
    if isinstance(place, os.PathLike):
        return
    if not isinstance(place, str):
        raise TypeError(f"{who}: must be 'cpu', 'disk' or a path, got {type(place).__name__}")
    if place not in ("cpu", "disk"):
        raise ValueError(
            f"{who}: must be 'cpu', 'disk' or a path, got {place!r} (a directory as pathlib.Path)"
        )


def check_is_elsewhere(who: str, place: object) -> None:
    """Raises ValueError where a step on the CPU is to have its activations in host memory."""
    if place == "cpu":
        raise ValueError(
            f"{who}: offload, of a step on the CPU, must be 'disk' or a path, got 'cpu', where "
            "everything is already"
        )


def directory_of(who: str, place: object, directory: object = None) -> str:
    """The directory of a place; "" for host memory.

    Raises:
        TypeError, ValueError: no place, or a directory where none is needed or the wrong way round.
        OSError: nothing can be written to the directory.
    """
    check_names_place(who, place)
    if place == "cpu":
        if directory is not None:
            raise ValueError(f"{who}: directory must be None with 'cpu', got {directory!r}")
        return ""
    if isinstance(place, os.PathLike):
        if directory is not None:
            raise ValueError(f"{who}: directory must be None with a path, got {directory!r}")
        return checked_directory(who, place)
    chosen = directory if directory is not None else _C.offload_directory()
    if chosen == "":
        raise ValueError(
            f"{who}: 'disk' needs a directory on a disk with space for the tensors: "
            "directory=, or once for all memopt.offload.configure(directory=), got none"
        )
    return checked_directory(who, chosen)


def copies_in_flight(who: str, place: Place) -> int:
    """The number of copies that may be under way to a place, or from it, at one time."""
    return _C.offload_copies_in_flight(directory_of(who, place))


def checked_directory(who: str, directory: object) -> str:
    """The directory's own path, in which a file could be made just now."""
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"{who}: directory must be a path, got {type(directory).__name__}")
    path = Path(os.fspath(directory)).resolve()
    _C.check_offload_directory(str(path))
    if _file_system(path) in ("tmpfs", "ramfs"):
        warn(f"{who}: {path} is in memory itself: to offload there frees nothing")
    return str(path)


@functools.cache  # asked at each context and region; a directory stays where it is mounted
def _file_system(path: Path) -> str | None:
    """A directory's file system type, by its nearest mount; None where the system does not say."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return None
    types = {}
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        types[point.replace("\\040", " ")] = kind  # the last one of a place covers the others
    return next((types[str(p)] for p in (path, *path.parents) if str(p) in types), None)
