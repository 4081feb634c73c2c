"""Compiles .cu files as host C++ into shared libraries under build/simt, one object each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.support.cpp_build import Compilation, build, sanitizer_library

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


def address_sanitizer() -> Path | None:
    """AddressSanitizer's run-time library, or None where the compiler has none."""
    return sanitizer_library("asan")


def library(name: str, sources: Sequence[Path], *, sanitize: bool = False) -> Path:
    """The shared library of the runtime and `sources`, built if need be.

    sanitize: with AddressSanitizer.
    """
    folder = BUILD / "-".join(("address" if sanitize else "plain", *EXTRA_FLAGS))
    everything = [_compilation(source, sanitize) for source in (*RUNTIME_SOURCES, *sources)]
    sanitizer = ["-fsanitize=address"] if sanitize else []
    # -Bsymbolic: the library's own cudaGetDevice, even where PyTorch has loaded the real one.
    return build(folder, f"lib{name}.so", everything, ["-shared", "-Wl,-Bsymbolic", *sanitizer])


def _compilation(source: Path, sanitize: bool) -> Compilation:
    is_runtime = source in RUNTIME_SOURCES
    flags = [*COMMON_FLAGS, *(RUNTIME_FLAGS if is_runtime else KERNEL_FLAGS)]
    if sanitize:
        flags += SANITIZED_RUNTIME_FLAGS if is_runtime else SANITIZED_KERNEL_FLAGS
    include = ["-I", str(HERE / "runtime"), "-I", str(KERNELS), "-isystem", str(cuda_include())]
    return Compilation(source, [*flags, *EXTRA_FLAGS, *include, "-x", "c++"])


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
