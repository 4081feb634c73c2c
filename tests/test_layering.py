"""Proves that dependencies point one way: kernels <- ops <- autograd <- saved <- python in csrc,
functional <- nn <- checkpoint <- convert <- the rest in memopt; that the kernels know no PyTorch,
that no file knows c10/cuda, and that no file is too long to read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}

# Each folder of csrc may include itself and the ones before it.
CSRC_LAYERS = ("kernels", "ops", "autograd", "saved", "python")

# Each package or module of memopt may import itself and the ones before it. Those of one line do
# not know each other. The demo is a user of the public names in __init__.
MEMOPT_LAYERS = (
    {"_version"},
    {"_C"},
    {"_compat", "_extension"},
    {"_class_patch", "measure", "recipes"},
    {"functional"},
    {"nn"},
    {"checkpoint", "offload"},
    {"convert"},
    {"anatomy"},
    {"plan"},
    {"integrations"},
    {"__init__"},
    {"demo"},
    {"__main__"},
)

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
PYTORCH = re.compile(r"^(torch|ATen|c10|caffe2|pybind11|pyconfig|Python\.h)")
MOST_LINES = 400


def sources(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in CPP_SUFFIXES)


def includes(file: Path) -> Iterator[tuple[str, str]]:
    """(bracket, path) of every include of the file."""
    for match in INCLUDE.finditer(file.read_text()):
        yield match[1], match[2]


def parametrize_files(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=lambda f: str(f.relative_to(ROOT)))


@parametrize_files(sources(CSRC / "kernels"))
def test_kernels_include_no_pytorch(file: Path) -> None:
    """Except its header-only vectors, in the CPU kernels."""
    for _, path in includes(file):
        if PYTORCH.match(path):
            assert path.startswith("ATen/cpu/vec/"), path
            assert file.parent == CSRC / "kernels" / "cpu", path


@parametrize_files(sources(CSRC))
def test_includes_point_down_the_layers(file: Path) -> None:
    layer = file.relative_to(CSRC).parts[0]
    allowed = CSRC_LAYERS[: CSRC_LAYERS.index(layer) + 1]
    for bracket, path in includes(file):
        if bracket == '"':
            target = (file.parent / path).resolve()
            assert target.is_file(), f'"{path}" is no file of this folder; use <> for others'
            assert target.relative_to(CSRC).parts[0] in allowed, path


@parametrize_files(sources(CSRC))
def test_only_the_kernels_and_their_launch_know_cuda(file: Path) -> None:
    """And they know the CUDA runtime, not c10/cuda: so that a build links beside any PyTorch."""
    for _, path in includes(file):
        assert not path.startswith(("c10/cuda", "ATen/cuda", "torch/csrc/cuda")), path
        if path.startswith("cuda") and path.endswith(".h"):
            assert file.parent == CSRC / "kernels" / "cuda", path


@parametrize_files(sources(CSRC))
def test_only_the_python_folder_includes_pybind11(file: Path) -> None:
    """Directly, or through the headers that bring all of torch."""
    for _, path in includes(file):
        if path.startswith(("pybind11", "Python.h")):
            assert file.parent == CSRC / "python", path
        assert path not in ("torch/extension.h", "torch/all.h", "ATen/ATen.h"), (
            "include what is used"
        )


@parametrize_files([f for f in sources(CSRC) if f.suffix in (".h", ".cuh")])
def test_headers_have_pragma_once(file: Path) -> None:
    assert "#pragma once" in file.read_text()


@pytest.mark.parametrize(
    "concept", ["activation", "dropout", "gated", "layer_norm", "layer_norm_gelu"]
)
def test_one_concept_bears_one_name_in_every_layer(concept: str) -> None:
    for path in (
        f"csrc/kernels/{concept}.h",
        f"csrc/kernels/cpu/{concept}.cpp",
        f"csrc/kernels/cuda/{concept}.cu",
        f"csrc/ops/{concept}.cpp",
        f"csrc/autograd/{concept}.cpp",
        f"memopt/nn/{concept}.py",
        f"tests/ops/test_{concept}.py",
        f"tests/nn/test_{concept}.py",
        f"benchmarks/{concept}.py",
    ):
        assert (ROOT / path).is_file(), path


def memopt_files() -> list[Path]:
    return sorted((ROOT / "memopt").rglob("*.py"))


def layer_of(module: str) -> int:
    """Index in MEMOPT_LAYERS of memopt's module or subpackage of this name."""
    for index, names in enumerate(MEMOPT_LAYERS):
        if module in names:
            return index
    raise AssertionError(f"memopt.{module} has no place in MEMOPT_LAYERS")


def imported_modules(file: Path) -> Iterator[str]:
    """First names after `memopt.` that a file imports at any level of nesting; "__init__" for
    memopt itself.
    """
    in_package = (ROOT / "memopt").joinpath
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names):
                if name == "memopt":
                    yield "__init__"
                elif name.startswith("memopt."):
                    yield name.split(".")[1]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            module = node.module or ""
            if module == "memopt":
                for alias in node.names:
                    is_module = (
                        in_package(alias.name).is_dir()
                        or in_package(f"{alias.name}.py").is_file()
                        or alias.name == "_C"
                    )
                    yield alias.name if is_module else "__init__"
            elif module.startswith("memopt."):
                yield module.split(".")[1]


@parametrize_files(memopt_files())
def test_imports_point_down_the_layers(file: Path) -> None:
    own = file.relative_to(ROOT / "memopt").with_suffix("").parts[0]
    for module in imported_modules(file):
        if module != own:
            assert layer_of(module) < layer_of(own), f"memopt.{own} imports memopt.{module}"


def all_sources() -> list[Path]:
    python = [p for d in ("memopt", "tests", "benchmarks") for p in (ROOT / d).rglob("*.py")]
    cpp = [p for d in ("csrc", "tests") for p in sources(ROOT / d)]
    return sorted([*python, *cpp, ROOT / "setup.py"])


@parametrize_files(all_sources())
def test_no_file_is_too_long_to_read(file: Path) -> None:
    """A file that passes 300 lines asks to be two; one of 400 has stopped asking."""
    assert len(file.read_text().splitlines()) <= MOST_LINES
