"""Compiles .cu files as host C++ into shared libraries under build/simt, one object each.

An object is made again when its text, a header of this repository that it includes, the compiler or
the flags have changed, and at no other time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KERNELS = ROOT / "csrc" / "kernels"
BUILD = ROOT / "build" / "simt"

RUNTIME_SOURCES = sorted((HERE / "runtime").glob("*.cpp"))
KERNEL_SOURCES = sorted((KERNELS / "cuda").glob("*.cu"))

# Kernels reinterpret memory as vectors, which CUDA allows and strict aliasing does not. A local
# variable that is read before it is written holds a pattern, the same in every run. The checks of
# alignment and bounds report to runtime/checks.cpp.
COMMON_FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-fmax-errors=5")
KERNEL_FLAGS = (
    "-w",  # warnings are for the builds that ship
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=alignment,bounds",
)
RUNTIME_FLAGS = ("-Wall", "-Wextra")
# What compiles fastest: AddressSanitizer's checks as calls, without optimisation; -O1 with inline
# checks takes five times as long. The runtime tells it of fibers and guard zones, and is not
# instrumented itself: every switch would be a detour.
SANITIZED_KERNEL_FLAGS = (
    "-fsanitize=address",
    *("--param", "asan-instrumentation-with-call-threshold=0"),
    *("-O0", "-fno-sanitize=alignment,bounds"),
)
SANITIZED_RUNTIME_FLAGS = ("-DSIMT_ADDRESS_SANITIZER",)

# For debugging: added last, so that MEMOPT_SIMT_CXXFLAGS="-O0 -g3" replaces what is above.
EXTRA_FLAGS = tuple(os.environ.get("MEMOPT_SIMT_CXXFLAGS", "").split())


def compiler() -> str:
    """The C++ compiler: $CXX, or g++."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise RuntimeError("simt: no C++ compiler found (g++, or what CXX names)")
    return found


@cache
def cuda_include() -> Path:
    """The folder of the CUDA headers: of the toolkit, else of the wheels that stand in for it."""
    nvcc = shutil.which("nvcc")
    toolkits = [
        os.environ.get("CUDA_HOME"),
        "/usr/local/cuda",
        nvcc and Path(nvcc).resolve().parents[1],
        Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13",
    ]
    candidates = [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    needed = ("cuda_runtime_api.h", "cuda_fp16.h", "crt/host_defines.h", "nv/target")
    for folder in candidates:
        if all((folder / header).is_file() for header in needed):
            return folder
    raise RuntimeError(
        "simt: no CUDA headers found; install the CUDA toolkit, or: pip install "
        "'nvidia-cuda-runtime>=13,<14' 'nvidia-cuda-crt>=13,<14' 'nvidia-cuda-cccl>=13,<14'"
    )


@cache
def address_sanitizer() -> Path | None:
    """AddressSanitizer's run-time library, or None where the compiler has none."""
    printed = subprocess.run(
        [compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    path = Path(printed.stdout.strip())
    return path.resolve() if path.is_absolute() else None


def library(name: str, sources: Sequence[Path], *, sanitize: bool = False) -> Path:
    """The shared library of the runtime and `sources`, built if need be.

    sanitize: with AddressSanitizer.
    """
    folder = BUILD / "-".join(("address" if sanitize else "plain", *EXTRA_FLAGS))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # of test processes side by side, one builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(name, sources, folder, sanitize)


def _build(name: str, sources: Sequence[Path], folder: Path, sanitize: bool) -> Path:
    everything = [*RUNTIME_SOURCES, *sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda source: _object(source, folder, sanitize), everything))
    sanitizer = ["-fsanitize=address"] if sanitize else []
    # -Bsymbolic: the library's own cudaGetDevice, even where PyTorch has loaded the real one.
    command = [compiler(), "-shared", "-Wl,-Bsymbolic", *sanitizer, *map(str, objects)]
    target = folder / f"lib{name}-{_digest(command, objects)}.so"
    if not target.exists():
        outdated = list(folder.glob(f"lib{name}-*.so"))
        _run_compiler(command, target)
        for path in outdated:
            path.unlink(missing_ok=True)
    return target


def _object(source: Path, folder: Path, sanitize: bool) -> Path:
    is_runtime = source in RUNTIME_SOURCES
    flags = [*COMMON_FLAGS, *(RUNTIME_FLAGS if is_runtime else KERNEL_FLAGS)]
    if sanitize:
        flags += SANITIZED_RUNTIME_FLAGS if is_runtime else SANITIZED_KERNEL_FLAGS
    command = [
        *(compiler(), *flags, *EXTRA_FLAGS),
        *("-I", str(HERE / "runtime"), "-I", str(KERNELS), "-isystem", str(cuda_include())),
        *("-x", "c++", "-c", str(source)),
    ]
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
            raise RuntimeError(f"simt: {' '.join(command)}\n{result.stderr}")
        made.replace(target)


def run_sanitized(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs Python with AddressSanitizer loaded, which libraries built with it need."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(address_sanitizer()),
        "ASAN_OPTIONS": "detect_leaks=0",  # CPython and torch keep memory until they exit
        "MEMOPT_SIMT_SANITIZE": "1",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
