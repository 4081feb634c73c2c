"""Compiles backend/*.cpp into a shared library under build/accelerator."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils import cpp_extension

from tests.support.cpp_build import Compilation, build, joined

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BACKEND = HERE / "backend"
SOURCES = sorted(BACKEND.glob("*.cpp"))
# Compiled together.
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
    # PyTorch's headers count as the system's: its version names the folder.
    folder = ROOT / "build" / "accelerator" / f"torch-{torch.__version__}"
    operators = joined(folder, "operators.cpp", TOGETHER)
    include = [word for path in cpp_extension.include_paths() for word in ("-isystem", path)]
    flags = [*FLAGS, *include]
    sources = [operators, *(source for source in SOURCES if source not in TOGETHER)]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    # Named before the objects that need them.
    link = ["-shared", "-Wl,--no-as-needed", *libraries, "-ltorch_cpu", "-lc10"]
    return build(folder, "libsim.so", [Compilation(source, flags) for source in sources], link)
