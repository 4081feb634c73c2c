"""Loads the native library memopt._C, and explains a failure to load it.

An installation that has none (MEMOPT_NATIVE=0, see setup.py) gets the stand-in for it that is
written in Python, memopt/_without_native, and a warning that says so.
"""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memopt._compat import has_partitioner_option
from memopt._version import __version__
from memopt._without_native.missing import NativeLibraryMissing, Ops

__all__ = ["HAS_NATIVE", "_C", "build_info", "ops", "require_native"]

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def _built_files() -> list[str]:
    return sorted(path.name for path in Path(__file__).parent.glob("_C.*.so"))


def _explain(error: ImportError) -> str:
    """A text: what was built, what is installed here, and the command that mends it."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    built = _built_files()
    here = f"PyTorch {torch.__version__} and Python extensions {suffix}"
    if f"_C{suffix}" not in built:
        found = f"it was built for another Python ({', '.join(built)})"
    else:
        found = f"it does not load, most often because it was built for another PyTorch: {error}"
    return (
        f"memopt {__version__}: the native library memopt._C does not fit: {found}. "
        f"This environment has {here}. To mend it, run in memopt's source folder: {_REBUILD}"
    )


HAS_NATIVE = bool(_built_files())
"""Whether this installation has a native library, be it one that fits."""

if TYPE_CHECKING or HAS_NATIVE:
    try:
        # Importing it registers the operators torch.ops.memopt.*
        from memopt import _C
    except ImportError as error:
        raise ImportError(_explain(error)) from error
    ops: Any = torch.ops.memopt
else:
    from memopt import _without_native as _C

    ops = Ops()


_OF_BUILD = ("torch", "torch_cuda", "cuda", "cuda_architectures", "compiler", "cpu_capabilities")


def require_native(who: str) -> None:
    """Raises NativeLibraryMissing, in the name of what the user called, where there is none."""
    if not HAS_NATIVE:
        raise NativeLibraryMissing(who)


def build_info() -> dict[str, Any]:
    """Return what memopt was built for and what it uses here.

    Keys:
        version: memopt's version.
        native: whether there is a native library. Without one, all that is said of it is None.
        torch: the PyTorch that it was built with.
        torch_running: the PyTorch that is running.
        torch_cuda: the CUDA version of the PyTorch it was built with; None for a CPU build.
        cuda: the CUDA toolkit that compiled the CUDA kernels; None if there are none.
        cuda_architectures: what they were compiled for, as in TORCH_CUDA_ARCH_LIST; None if there
            are none.
        compiler: the C++ compiler's version.
        cpu_capabilities: the instruction sets that the CPU kernels were compiled for.
        cpu_capability: the one in use: the best that this processor runs, or what the environment
            variable MEMOPT_CPU_CAPABILITY names.
        compile_policy: whether this PyTorch lets `memopt.compile` choose what compiled graphs save;
            without, it is torch.compile.

    Raises:
        RuntimeError: MEMOPT_CPU_CAPABILITY names an instruction set that is not compiled in or
            cannot run here.
    """
    info: dict[str, Any] = dict(_C.build_info()) if HAS_NATIVE else dict.fromkeys(_OF_BUILD)
    info["version"] = __version__
    info["native"] = HAS_NATIVE
    info["torch_running"] = torch.__version__
    info["cpu_capability"] = _C.cpu_capability() if HAS_NATIVE else None
    info["compile_policy"] = has_partitioner_option()
    return info
