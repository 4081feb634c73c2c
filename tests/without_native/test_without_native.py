"""Proves that memopt works where it was installed without its native library: the tests in inside/
pass on a copy of the package that has none, in a process of their own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memopt

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, as a wheel of MEMOPT_NATIVE=0 installs it, and the tests."""
    folder = tmp_path_factory.mktemp("installed")
    package = Path(memopt.__file__).parent
    ignored = shutil.ignore_patterns("_C.*.so", "__pycache__")
    shutil.copytree(package, folder / "memopt", ignore=ignored)
    (folder / "tests").symlink_to(ROOT / "tests")
    (folder / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    return folder


def test_inside(installed: Path, child_environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "tests/without_native/inside"],
        cwd=installed,
        env={**child_environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ran.returncode != 0:
        pytest.fail(f"exit status {ran.returncode}\n{ran.stdout}\n{ran.stderr}", pytrace=False)


def test_import_says_so_once(installed: Path, child_environment: dict[str, str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-c", "import memopt, memopt.nn; import memopt"],
        cwd=installed,
        env={**child_environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    said = [line for line in ran.stderr.splitlines() if "without its native library" in line]
    assert len(said) == 1
    assert "<string>:1: UserWarning" in said[0]  # where memopt is imported, not inside of it
