"""Proves: the build says in one line what it needs or was asked for and cannot do, before it
compiles anything; and which CUDA architectures it would build for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of the variables that setup.py reads."""
    for name in ("MEMOPT_NATIVE", "MEMOPT_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)


def functions() -> dict[str, Any]:
    """What setup.py defines, without its last line, which builds."""
    source = (ROOT / "setup.py").read_text().split("os.chdir(ROOT)")[0]
    namespace: dict[str, Any] = {"__file__": "setup.py", "__name__": "setup"}
    exec(source, namespace)
    return namespace


def message(run: Callable[[], object]) -> str:
    """Of the exit that it ends in."""
    with pytest.raises(SystemExit) as ended:
        run()
    return str(ended.value)


def test_without_torch_it_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert message(functions) == (
        "memopt: building needs PyTorch in the same environment: pip install torch, then "
        "pip install --no-build-isolation . (or MEMOPT_NATIVE=0 pip install . for regions, "
        "plan and anatomy without kernels)"
    )


def test_without_native_library_it_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("MEMOPT_NATIVE", "0")
    assert "setup" in functions()


def test_unknown_value_of_memopt_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_NATIVE", "no")
    assert message(functions) == "memopt: MEMOPT_NATIVE must be 0 or 1, got 'no'"


def test_unknown_value_of_memopt_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CUDA", "yes")
    expected = "memopt: MEMOPT_CUDA must be auto, 0 or 1, got 'yes'"
    assert message(functions()["choose_cuda"]) == expected


@pytest.mark.parametrize(
    ("wanted", "torch_cuda", "toolkit", "built"),
    [
        ("auto", None, "/toolkit", False),  # a CPU-only PyTorch could never run the kernels
        ("auto", "13.0", "/toolkit", True),
        ("auto", "13.0", None, False),
        ("1", None, "/toolkit", True),
        ("0", "13.0", "/toolkit", False),
    ],
)
def test_when_cuda_kernels_are_built(
    wanted: str,
    torch_cuda: str | None,
    toolkit: str | None,
    built: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    namespace = functions()
    monkeypatch.setenv("MEMOPT_CUDA", wanted)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    namespace["find_cuda_home"] = lambda: toolkit
    assert (namespace["choose_cuda"]() is not None) == built


def test_one_without_a_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = functions()
    monkeypatch.setenv("MEMOPT_CUDA", "1")
    namespace["find_cuda_home"] = lambda: None
    assert message(namespace["choose_cuda"]) == (
        "memopt: MEMOPT_CUDA=1 needs the CUDA compiler: put nvcc on PATH or set CUDA_HOME"
    )


@pytest.mark.parametrize("command", ["bdist_wheel", "editable_wheel"])
@pytest.mark.parametrize(
    ("given", "gpu", "chosen"),
    [
        (None, False, "8.0;9.0;12.0+PTX"),  # what both this nvcc and the list have
        ("all", True, "8.0;9.0;12.0+PTX"),
        ("9.0", True, "9.0"),
        (None, True, "8.9"),
    ],
)
def test_architectures(
    given: str | None, gpu: bool, chosen: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["setup.py", command])
    namespace = functions()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (8, 9))
    supported = "compute_75\ncompute_80\ncompute_90\ncompute_120"
    namespace["nvcc_output"] = lambda home, option: supported
    if given is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    assert namespace["architectures"](None) == chosen


def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(object, source) of all that setup.py compiles in a folder, in the link's order."""
    namespace = functions()
    monkeypatch.chdir(folder)
    found = []
    for step in namespace["steps"](folder / "made", [], []):
        part = folder / "made" / Path(step.source).name
        files = part.read_text().split('"')[1::2] if part.exists() else [step.source]
        found += [(step.object, file) for file in files]
    return found


def test_every_source_is_found_and_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    by_copy: dict[str, list[str]] = {}
    for made, source in compiled(tmp_path, monkeypatch):
        by_copy.setdefault(Path(made).parent.name, []).append(source)
    found = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cpp")}
    kernels = {f for f in found if "kernels" in f and not f.endswith("dispatch.cpp")}
    # The linker keeps the first copy of an inline function: one that every processor runs.
    assert list(by_copy)[:2] == ["made", "baseline"]
    assert sorted(by_copy.pop("made")) == sorted(found - kernels)
    for sources in by_copy.values():
        assert sorted(sources) == sorted(kernels)


SAMPLES = {
    "a": "namespace {\nusing T = int;\nstruct Same {\n  int other;\n};\n"
    "class A : public Base {\n};\n}  // namespace\n",
    "b": "namespace {\nusing T = int;\nint other(int x) {\n  return x;\n}\n"
    "class B : public Base {\n};\n}  // namespace\n",
    "c": "namespace {\nconst std::pair<int, int>& Same(int);\n}  // namespace\n",
    "d": "namespace {\nusing T = long;\n}  // namespace\nvoid T::member() {}\n",
    "e": "int outside;\n" * 3500,
}


def test_files_with_the_same_local_name_are_compiled_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are more lines than one compilation should have."""
    folder = tmp_path / "csrc" / "ops"
    folder.mkdir(parents=True)
    for name, text in SAMPLES.items():
        (folder / f"{name}.cpp").write_text(text)
    parts: dict[str, str] = {}
    for made, source in compiled(tmp_path, monkeypatch):
        if Path(source).parent.name == "ops":
            parts[Path(made).stem] = parts.get(Path(made).stem, "") + Path(source).stem
    assert parts == {"ops_1": "ab", "ops_2": "cd", "ops_3": "e"}


def test_without_ninja_it_says_what_to_run() -> None:
    namespace = functions()
    namespace["sysconfig"] = SimpleNamespace(get_path=lambda name: "/nowhere")
    namespace["shutil"] = SimpleNamespace(which=lambda name: None)
    assert message(namespace["find_ninja"]) == (
        "memopt: building needs ninja in the same environment: pip install ninja"
    )


def requirements(name: str) -> set[str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    texts = (line.partition("#")[0].strip() for line in lines)
    return {text for text in texts if text}


def test_requirements_are_those_of_the_package() -> None:
    """pip reads pyproject.toml, make reads requirements/."""
    text = (ROOT / "pyproject.toml").read_text()

    def listed(key: str) -> set[str]:
        found = re.search(rf"^{key} = \[(.*)\]$", text, re.MULTILINE)
        assert found is not None, key
        return set(re.findall(r'"([^"]+)"', found[1]))

    assert requirements("build") == listed("requires")
    assert requirements("demo") == listed("demo")
