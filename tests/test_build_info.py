"""Proves: build_info() and `python -m memopt env` say what was built and what is in use, and a
native library that is missing or does not load is an ImportError that says what was found and what
to run.
"""

from __future__ import annotations

import importlib.machinery
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memopt

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
MEND = "pip install --no-build-isolation --force-reinstall --no-deps ."


def test_keys_and_types() -> None:
    info = memopt.build_info()
    assert set(info) == {
        "version",
        "torch",
        "torch_running",
        "torch_cuda",
        "cuda",
        "cuda_architectures",
        "compiler",
        "cpu_capabilities",
        "cpu_capability",
        "compile_policy",
    }
    assert info["compile_policy"] is True  # in every PyTorch that memopt supports
    assert info["version"] == memopt.__version__
    assert info["torch_running"] == torch.__version__
    assert info["cpu_capability"] in info["cpu_capabilities"]
    assert isinstance(info["compiler"], str)
    assert info["compiler"]
    assert (info["cuda"] is None) == (info["cuda_architectures"] is None)


def test_version_is_a_version() -> None:
    assert memopt.__version__.count(".") == 2
    assert memopt.__version__[0].isdigit()


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="instruction sets of x86"
)
def test_x86_builds_hold_every_instruction_set() -> None:
    assert memopt.build_info()["cpu_capabilities"] == ["baseline", "avx2", "avx512"]


def test_a_gpu_is_not_left_unused_in_silence() -> None:
    """PyTorch sees a GPU: then this build has kernels for it, or its tests would skip it unseen."""
    if torch.cuda.is_available():
        assert memopt.build_info()["cuda"] is not None


def test_command_line_prints_it(child_environment: dict[str, str]) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "memopt", "env"],
        env=child_environment,
        capture_output=True,
        text=True,
        check=True,
    )
    for value in (memopt.__version__, torch.__version__, memopt.build_info()["cpu_capability"]):
        assert value in child.stdout


def import_copy(folder: Path, environment: dict[str, str], library: dict[str, bytes]) -> str:
    """Copies memopt without its native library, adds the files of `library`, imports it; what it
    wrote to stderr.
    """
    source = Path(memopt.__file__).parent
    ignore = shutil.ignore_patterns("_C.*.so", "__pycache__")
    shutil.copytree(source, folder / "memopt", ignore=ignore)
    for name, content in library.items():
        (folder / "memopt" / name).write_bytes(content)
    child = subprocess.run(
        [sys.executable, "-c", "import memopt"],
        env={**environment, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert child.returncode != 0
    last = child.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: memopt ")
    assert memopt.__version__ in last
    assert torch.__version__ in last
    assert MEND in last
    return last


def test_missing_library(tmp_path: Path, child_environment: dict[str, str]) -> None:
    message = import_copy(tmp_path, child_environment, {})
    assert "it has not been built" in message


def test_library_for_another_python(tmp_path: Path, child_environment: dict[str, str]) -> None:
    other = "_C.cpython-399-x86_64-linux-gnu.so"
    message = import_copy(tmp_path, child_environment, {other: b""})
    assert f"it was built for another Python ({other})" in message


def test_library_that_does_not_load(tmp_path: Path, child_environment: dict[str, str]) -> None:
    """As after an upgrade of PyTorch, when symbols are missing; here the file is no library."""
    message = import_copy(tmp_path, child_environment, {f"_C{SUFFIX}": b"no library" * 100})
    assert "it does not load, most often because it was built for another PyTorch" in message
