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
        "native",
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


OTHER = "_C.cpython-399-x86_64-linux-gnu.so"
# What the folder of the package has in place of its native library, and what is said of it.
LIBRARIES = {
    "for another Python": ({OTHER: b""}, f"it was built for another Python ({OTHER})"),
    # As after an upgrade of PyTorch, when symbols are missing; here the file is no library.
    "does not load": (
        {f"_C{SUFFIX}": b"no library" * 100},
        "it does not load, most often because it was built for another PyTorch",
    ),
}
# A fork for each: they share what PyTorch takes to import, and a failed import is none of theirs.
IMPORTS = """
import os, sys, torch
for folder in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        sys.path.insert(0, folder)
        import memopt
        os._exit(0)
    assert os.waitpid(child, 0)[1] != 0, folder
"""


def test_library_that_cannot_be_loaded(tmp_path: Path, child_environment: dict[str, str]) -> None:
    source = Path(memopt.__file__).parent
    ignore = shutil.ignore_patterns("_C.*.so", "__pycache__")
    for name, (files, _) in LIBRARIES.items():
        shutil.copytree(source, tmp_path / name / "memopt", ignore=ignore)
        for file, content in files.items():
            (tmp_path / name / "memopt" / file).write_bytes(content)
    child = subprocess.run(
        [sys.executable, "-c", IMPORTS, *(str(tmp_path / name) for name in LIBRARIES)],
        env={**child_environment, "PYTHONPATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    said = [line for line in child.stderr.splitlines() if line.startswith("ImportError: memopt ")]
    for line, (_, expected) in zip(said, LIBRARIES.values(), strict=True):
        assert expected in line
        assert memopt.__version__ in line
        assert torch.__version__ in line
        assert MEND in line
