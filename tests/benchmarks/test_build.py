"""Proves what the benchmark of building promises: it builds what git tracks, from an empty folder,
and counts the processor time of what it started.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import build


def _is_checkout() -> bool:
    """Whether git tracks these files. A copy inside of a checkout, as test-versions makes: none."""
    command = ["git", "ls-files", "--error-unmatch", "setup.py"]
    return subprocess.run(command, cwd=build.ROOT, capture_output=True).returncode == 0


@pytest.mark.skipif(not _is_checkout(), reason="git tracks none of these files")
def test_only_tracked_files_are_built(tmp_path: Path) -> None:
    build.tracked_copy(tmp_path)
    assert (tmp_path / "setup.py").read_bytes() == (build.ROOT / "setup.py").read_bytes()
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.so")}
    assert not names
    assert not (tmp_path / "build").exists()


def test_processor_time_is_that_of_the_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.run
    started = []

    def busy(command: list[str], **options: object) -> object:
        if "pip" not in command:
            return real(command, **options)  # type: ignore[call-overload]
        started.append(options["env"])
        loop = "import time\nwhile time.process_time() < 0.3: pass"
        return real([command[0], "-c", loop], check=True)

    monkeypatch.setattr(subprocess, "run", busy)
    out = tmp_path / "build.json"
    assert build.main(["--cuda", "9.0", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["cases"]["wheel"]["variants"]["memopt"]
    assert 0.3 <= found["processor_seconds"] < 5
    (environment,) = started
    assert environment["CCACHE_DISABLE"] == "1"
    assert environment["TORCH_CUDA_ARCH_LIST"] == "9.0"
