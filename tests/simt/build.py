"""Compiles .cu files as host C++ into shared libraries under build/simt, one object each."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.support.cpp_build import Compilation, build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KERNELS = ROOT / "csrc" / "kernels"
BUILD = ROOT / "build" / "simt"

RUNTIME_SOURCES = sorted((HERE / "runtime").glob("*.cpp"))
KERNEL_SOURCES = sorted((KERNELS / "cuda").glob("*.cu"))

# Kernels reinterpret memory as vectors, which CUDA allows and strict aliasing does not. A local
# variable that is read before it is written holds a pattern, the same in every run. The checks of
# alignment and bounds report to runtime/checks.cpp; each access to memory, but for those to a
# variable that cannot go wrong, calls runtime/guards.cpp.
COMMON_FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-fmax-errors=5")
KERNEL_FLAGS = (
    "-w",  # warnings are for the builds that ship
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=alignment,bounds",
    "-fsanitize=kernel-address",
    *("--param", "asan-instrumentation-with-call-threshold=0"),
    *("--param", "asan-stack=0", "--param", "asan-globals=0"),
)
RUNTIME_FLAGS = ("-Wall", "-Wextra")
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


def library(name: str, sources: Sequence[Path]) -> Path:
    """The shared library of the runtime and `sources`, built if need be."""
    folder = BUILD / "-".join(("plain", *EXTRA_FLAGS))
    everything = [_compilation(source) for source in (*RUNTIME_SOURCES, *sources)]
    # -Bsymbolic: the library's own cudaGetDevice, even where PyTorch has loaded the real one.
    return build(folder, f"lib{name}.so", everything, ["-shared", "-Wl,-Bsymbolic"])


def _compilation(source: Path) -> Compilation:
    flags = [*COMMON_FLAGS, *(RUNTIME_FLAGS if source in RUNTIME_SOURCES else KERNEL_FLAGS)]
    include = ["-I", str(HERE / "runtime"), "-I", str(KERNELS), "-isystem", str(cuda_include())]
    return Compilation(source, [*flags, *EXTRA_FLAGS, *include, "-x", "c++"])
