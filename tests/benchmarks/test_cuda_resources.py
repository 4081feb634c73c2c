"""Proves: what cuobjdump prints of kernels is read as it is meant, and kernels' worst variants are
what a row says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cuda_resources
from benchmarks.cuda_resources import Kernel, kernels_in, resident_warps, rows_of, tables

RESOURCES = """
arch = sm_90
 Function _Z1a:
  REG:54 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:729 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z1b:
  REG:72 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:728 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z4more:
  REG:9 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:1 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
CODE = """
		Function : _Z1a
        /*0110*/                   LDG.E.128.CONSTANT R4, desc[UR6][R2.64] ;
        /*0120*/                   STG.E.U16 desc[UR6][R2.64], R4 ;
		Function : _Z1b
        /*0110*/                   LDG.E R4, desc[UR6][R2.64] ;
        /*0120*/                   STL [R1], R4 ;
        /*0130*/                   LDG.E.64 R4, desc[UR6][R2.64] ;
"""
NAMES = {
    "_Z1a": "void memopt::(anonymous namespace)::rows<memopt::Norm, __nv_bfloat16, float>(P)",
    "_Z1b": "void memopt::(anonymous namespace)::rows<memopt::Other, __nv_bfloat16>(P)",
    "_Z4more": "more(int)",
}


def test_reads_registers_stack_and_accesses() -> None:
    first, second = kernels_in(RESOURCES, CODE, NAMES)
    assert first == Kernel("rows", "bfloat16", 54, 0, {"LDG.128": 1, "STG.16": 1})
    assert second == Kernel("rows", "bfloat16", 72, 16, {"LDG.32": 1, "STL": 1, "LDG.64": 1})


def test_a_row_has_the_worst_of_its_variants() -> None:
    ((key, row),) = rows_of("sm_90", kernels_in(RESOURCES, CODE, NAMES)).items()
    assert key == "sm_90/rows/bfloat16"
    assert (row["variants"], row["registers"], row["stack_bytes"]) == (2, [54, 72], 16)
    assert (row["with_stack"], row["resident_warps"]) == (1, 28)
    assert row["accesses"] == {"LDG.128": 1, "LDG.32": 1, "LDG.64": 1, "STG.16": 1, "STL": 1}


def test_a_table_has_columns_for_each_architecture() -> None:
    kernels = kernels_in(RESOURCES, CODE, NAMES)
    cases = rows_of("sm_80", kernels[:1]) | rows_of("sm_90", kernels[1:])
    text = tables({"cases": cases})
    assert "sm_80: registers" in text
    row = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    stack = "1, up to 16 bytes"
    assert row == ["`rows`", "bfloat16", "1", "54", "36", "none", "72", "28", stack]


@pytest.mark.parametrize(("registers", "warps"), [(32, 64), (33, 51), (64, 32), (128, 16)])
def test_warps_that_registers_allow(registers: int, warps: int) -> None:
    assert resident_warps(registers) == warps


def test_nothing_to_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_resources, "newest_objects", list)
    assert cuda_resources.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "objects of CUDA kernels" in capsys.readouterr().err
