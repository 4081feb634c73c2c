"""Proves: arguments that cannot be run give one clear line and exit code 2, before any training;
and the table shows it when losses that must be equal are not.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memopt.demo.memory import MemoryProfile
from memopt.demo.modes import MODES
from memopt.demo.report import comparison
from memopt.demo.results import Result, agreement
from memopt.demo.train import Trainer
from memopt.show.sections import text_of
from tests.demo.conftest import RunDemo


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "0"), "--steps: must be at least 1, got 0"),
        (("--vocab", "255"), "--vocab: must be at least 256, one a byte, got 255"),
        (("--device", "abacus"), "--device: unknown device, got abacus"),
        (("--device", "meta"), "--device: must be cpu or cuda, got meta"),
        (("--modes", "eager,eagre"), "got 'eagre'"),
        (("--text", "absent.txt"), "--text: cannot read absent.txt: No such file or directory"),
        (("--text", "."), "--text: cannot read .: Is a directory"),
        (("--text", "short.txt"), "text too short: must have at least 129 bytes, got 128"),
        (("--out", "short.txt"), "--out: cannot make short.txt: File exists"),
    ],
)
def test_one_line_and_exit_code_2(
    options: tuple[str, str],
    message: str,
    tmp_path: Path,
    run_demo: RunDemo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("x" * 128)
    assert run_demo(tmp_path / "out", *options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("memopt demo: ")
    assert printed.err.endswith(f"{message}\n")
    assert printed.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(
    tmp_path: Path, run_demo: RunDemo, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(tmp_path, "--device", "cuda") == 2
    expected = "memopt demo: --device: PyTorch finds no CUDA GPU here, got cuda\n"
    assert capsys.readouterr().err == expected


def test_missing_packages_are_named(
    tmp_path: Path,
    run_demo: RunDemo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_demo(tmp_path) == 2
    expected = (
        'memopt demo: needs rich and matplotlib, memopt\'s extra "demo"; run: pip install rich '
        "matplotlib\n"
    )
    assert capsys.readouterr().err == expected


def test_a_gpu_too_small_for_every_mode(
    tmp_path: Path,
    run_demo: RunDemo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def exhaust(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Trainer, "measure_memory", exhaust)
    assert run_demo(tmp_path, "--modes", "eager") == 2
    assert capsys.readouterr().err == "memopt demo: no mode fits into the memory of cpu\n"


def test_declaring_the_arguments_imports_no_drawing_library(
    child_environment: dict[str, str],
) -> None:
    code = "import sys, memopt.demo; print([m for m in ('rich', 'matplotlib') if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout == "[]\n"


@pytest.mark.parametrize(
    ("losses", "difference"),
    [([2.0, 1.5], 0.5), ([2.0, float("nan")], float("inf")), ([2.0], 0.0)],
)
def test_a_broken_promise_is_shown(losses: list[float], difference: float) -> None:
    memory = MemoryProfile(saved=1, peak=1, forward_ms=1.0, ms=[0.0, 1.0], live=[0, 1])
    eager = Result(MODES["eager"], 1, [2.0, 1.0], [1.0, 1.0], memory)
    other = Result(MODES["checkpoint"], 1, losses, [1.0] * len(losses), memory)
    agreed = agreement(other, [eager, other])
    assert agreed is not None
    assert agreed.largest_difference == difference
    text = " ".join(text_of(comparison([eager, other])).split())
    assert ("should be equal" in text) == (difference > 0)
