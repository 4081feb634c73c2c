"""Compiles backend/*.cpp into a shared library under build/accelerator, one object each.

By the rules of tests/simt/build.py: an object is made again when its text, a header of this folder,
the compiler, the flags or PyTorch have changed, and at no other time.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

from tests.simt.build import _dependencies, _digest, _run_compiler, compiler

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BACKEND = HERE / "backend"
SOURCES = sorted(BACKEND.glob("*.cpp"))
# Compiled together, since PyTorch's headers take longer to compile than these files.
TOGETHER = [BACKEND / f"{name}.cpp" for name in ("autocast", "fallback", "operators", "random")]
TOGETHER += [BACKEND / "tensors.cpp"]

FLAGS = (
    *("-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-fmax-errors=5"),
    # The last: gcc 12's false alarm in PyTorch's intrusive_ptr.h.
    *("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-stringop-overflow"),
    # No header of PyTorch's includes all operators then.
    *("-DAT_PER_OPERATOR_HEADERS", "-DTORCH_API_INCLUDE_EXTENSION_H"),
)


def library() -> Path:
    """The shared library, built if need be."""
    folder = ROOT / "build" / "accelerator" / f"torch-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # of test processes side by side, one builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        joined = folder / "operators.cpp"
        joined.write_text("".join(f'#include "{source}"\n' for source in TOGETHER))
        sources = [joined, *(source for source in SOURCES if source not in TOGETHER)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(lambda source: _object(source, folder), sources))
        return _link(objects, folder)


def _object(source: Path, folder: Path) -> Path:
    include = [word for path in cpp_extension.include_paths() for word in ("-isystem", path)]
    ccache = [found] if (found := shutil.which("ccache")) else []
    command = [*ccache, compiler(), *FLAGS, *include, "-c", str(source)]
    target = folder / f"{source.stem}.o"
    listing = target.with_suffix(".d")
    stamp = target.with_suffix(".key")
    made = target.exists() and listing.exists() and stamp.exists()
    if made and stamp.read_text() == _digest(command, _dependencies(listing)):
        return target
    # -MMD: without the system's headers, among which PyTorch's are; its version names the folder.
    _run_compiler([*command, "-MMD", "-MF", str(listing)], target)
    stamp.write_text(_digest(command, _dependencies(listing)))
    return target


def _link(objects: list[Path], folder: Path) -> Path:
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = [compiler(), "-shared", *map(str, objects), *libraries, "-ltorch_cpu", "-lc10"]
    target = folder / f"libsim-{_digest(command, objects)}.so"
    if not target.exists():
        outdated = list(folder.glob("libsim-*.so"))
        _run_compiler(command, target)
        for path in outdated:
            path.unlink(missing_ok=True)
    return target
