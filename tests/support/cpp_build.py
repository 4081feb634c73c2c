"""Compiles C++ for the tests: programs and shared libraries, an object for each source.

An object is made again when its text, a header of this repository that it includes, the compiler or
the flags have changed, and at no other time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Compilation(NamedTuple):
    source: Path
    flags: list[str]


def compiler() -> str:
    """The C++ compiler: $CXX, or g++."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise RuntimeError("tests: no C++ compiler found (g++, or what CXX names)")
    return found


@cache
def sanitizer_library(name: str) -> Path | None:
    """The run-time library of a sanitizer ("asan", "tsan"), or None where the compiler has none."""
    printed = subprocess.run(
        [compiler(), f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True
    )
    path = Path(printed.stdout.strip())
    return path.resolve() if path.is_absolute() else None


def joined(folder: Path, name: str, sources: Sequence[Path]) -> Path:
    """A file in `folder` that includes the sources: what they include takes longer to compile than
    they do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    text = "".join(f'#include "{source}"\n' for source in sources)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def build(
    folder: Path, name: str, compilations: Sequence[Compilation], link_flags: Sequence[str]
) -> Path:
    """The program or library `name` in `folder`, built if need be.

    Its file's name says what it was made of: one that is loaded is not written over. In one folder
    a source is always compiled with the same flags.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # of test processes side by side, one builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(lambda one: _object(one, folder), compilations))
        command = [compiler(), *link_flags, *map(str, objects)]
        stem, suffix = Path(name).stem, Path(name).suffix
        target = folder / f"{stem}-{_digest(command, objects)}{suffix}"
        if not target.exists():
            outdated = list(folder.glob(f"{stem}-{'[0-9a-f]' * 16}{suffix}"))
            _run_compiler(command, target)
            for path in outdated:
                path.unlink(missing_ok=True)
        return target


def _object(compilation: Compilation, folder: Path) -> Path:
    source, flags = compilation
    command = [compiler(), *flags, "-c", str(source)]
    target = folder / f"{source.parent.name}-{source.stem}.o"
    listing = target.with_suffix(".d")  # the headers that it was made from, as make would read them
    stamp = target.with_suffix(".key")
    made = target.exists() and listing.exists() and stamp.exists()
    if made and stamp.read_text() == _digest(command, _dependencies(listing)):
        return target
    _run_compiler([*command, "-MMD", "-MF", str(listing)], target)
    stamp.write_text(_digest(command, _dependencies(listing)))
    return target


def _dependencies(listing: Path) -> list[Path]:
    _, _, files = listing.read_text().replace("\\\n", " ").partition(":")
    return [Path(file) for file in files.split()]


def _digest(command: Sequence[str], files: Sequence[Path]) -> str:
    digest = hashlib.sha256("\0".join((_compiler_version(), *command)).encode())
    for file in files:
        digest.update(file.read_bytes() if file.exists() else b"missing")
    return digest.hexdigest()[:16]


@cache
def _compiler_version() -> str:
    command = [compiler(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _run_compiler(command: Sequence[str], target: Path) -> None:
    """Compiles or links to `target`, which appears whole or, where the run is ended, not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        result = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"tests: {' '.join(command)}\n{result.stderr}")
        made.replace(target)
