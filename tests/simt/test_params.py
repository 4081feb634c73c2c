"""Proves: the structs that params.py reads from the headers are laid out as the compiler lays them
out.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from tests.support.cpp_build import compiler

from . import build
from .params import activations, make_struct, struct_type

PARAMS = (
    "ActivationBackwardParams",
    "ActivationForwardParams",
    "ChannelNormBackwardParams",
    "ChannelNormForwardParams",
    "CrossEntropyParams",
    "DropoutParams",
    "GatedBackwardParams",
    "GatedForwardParams",
    "NormBackwardParams",
    "NormForwardParams",
    "SplitSumParams",
)


def test_layout_is_the_compilers(tmp_path: Path) -> None:
    headers = sorted(path.name for path in build.KERNELS.glob("*.h"))
    lines = [*(f'#include "{name}"' for name in headers), "#include <cstddef>"]
    lines.append("using namespace memopt::kernels;")
    for name in (*PARAMS, "ChannelShape", "DropoutRule", "ActivationSpec"):
        kind = struct_type(name)
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(kind)});")
        for field, *_ in kind._fields_:
            offset = getattr(kind, field).offset
            lines.append(f"static_assert(offsetof({name}, {field}) == {offset});")
    for name, number in activations().items():
        found = f'find_activation("{name}")->kind'
        lines.append(f"static_assert(static_cast<int>({found}) == {number});")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines) + "\n")
    command = [compiler(), "-std=c++20", "-fsyntax-only", "-I", str(build.KERNELS)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_params_struct_is_read() -> None:
    text = "".join(path.read_text() for path in build.KERNELS.glob("*.h"))
    assert set(PARAMS) == {line.split()[1] for line in text.splitlines() if "Params {" in line}


def test_an_unknown_field_or_struct_is_an_error() -> None:
    with pytest.raises(LookupError, match="DropoutParams has no field q"):
        make_struct("DropoutParams", {"q": 1})
    with pytest.raises(LookupError, match="no struct NoParams"):
        struct_type("NoParams")
