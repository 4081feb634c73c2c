"""Proves that dependencies point one way: kernels <- ops <- autograd <- offload <- saved <-
intercept <- plan <- python in csrc, memory <- functional <- nn <- offload <- checkpoint <- head <-
convert, compile <- applied <- the rest in memopt, where reports and accumulation stand side by side
on memory, and plans know no report; that no files of memopt import each other in a circle, that a
name of memopt means one thing, that the kernels, offload and plan know no PyTorch, that no file
knows c10/cuda, and that no file is too long to read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}

# Each folder of csrc may include itself and the ones before it.
CSRC_LAYERS = ("kernels", "ops", "autograd", "offload", "saved", "intercept", "plan", "python")

# Each package or module of memopt may import itself and the ones before it. Those of one line do
# not know each other. The demo is a user of the public names in __init__.
MEMOPT_LAYERS = (
    {"_version", "_arguments", "_compat", "_errors", "_progress"},
    {"_C", "_class_patch", "_without_native"},
    {"_extension", "_function_code"},
    {"_forwards"},
    {"_public", "memory"},
    {"place"},
    {"_call_hooks", "assignment", "fates", "show"},
    {"recipes"},
    {"functional"},
    {"nn"},
    {"_offload"},
    {"_checkpoint"},
    {"_head"},
    {"_compile", "_convert"},
    {"applied"},
    {"whatif"},
    {"_snapshot"},
    {"_accumulate", "_anatomy", "_check"},
    {"_plan"},
    {"_fits"},
    {"types"},
    {"compat", "integrations"},
    {"__init__"},
    {"bench", "command", "demo"},
    {"__main__"},
)

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
PYTORCH = re.compile(r"^(torch|ATen|c10|caffe2|pybind11|pyconfig|Python\.h)")
NUMBERS = ("c10/util/BFloat16.h", "c10/util/Half.h")
MOST_LINES = 400


def sources(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in CPP_SUFFIXES)


def includes(file: Path) -> Iterator[tuple[str, str]]:
    """(bracket, path) of every include of the file."""
    for match in INCLUDE.finditer(file.read_text()):
        yield match[1], match[2]


def all_includes(folder: Path) -> Iterator[tuple[Path, str]]:
    for file in sources(folder):
        for _, path in includes(file):
            yield file, path


def test_kernels_include_no_pytorch() -> None:
    """Except its header-only vectors and 16-bit numbers, in the CPU kernels."""
    for file, path in all_includes(CSRC / "kernels"):
        if PYTORCH.match(path):
            assert path.startswith("ATen/cpu/vec/") or path in NUMBERS, (file, path)
            assert file.parent == CSRC / "kernels" / "cpu", (file, path)


def test_includes_point_down_the_layers() -> None:
    for file in sources(CSRC):
        layer = file.relative_to(CSRC).parts[0]
        allowed = CSRC_LAYERS[: CSRC_LAYERS.index(layer) + 1]
        for bracket, path in includes(file):
            if bracket == '"':
                target = (file.parent / path).resolve()
                assert target.is_file(), (
                    f'{file}: "{path}" is no file of this folder; use <> for others'
                )
                assert target.relative_to(CSRC).parts[0] in allowed, (file, path)


@pytest.mark.parametrize("folder", ["offload", "plan"])
def test_what_needs_no_pytorch_includes_but_the_system_and_itself(folder: str) -> None:
    """So it compiles in seconds, and sanitizers run over all of it."""
    for file in sources(CSRC / folder):
        for bracket, path in includes(file):
            if bracket == '"':
                assert (file.parent / path).resolve().parent == CSRC / folder, (file, path)
            else:
                assert re.fullmatch(r"(sys/)?[a-z_]+(\.h)?", path), (file, path)
                assert not PYTORCH.match(path), (file, path)


def test_only_the_kernels_and_their_launch_know_cuda() -> None:
    """And they know the CUDA runtime, not c10/cuda: so that a build links beside any PyTorch."""
    for file, path in all_includes(CSRC):
        assert not path.startswith(("c10/cuda", "ATen/cuda", "torch/csrc/cuda")), (file, path)
        if path.startswith("cuda") and path.endswith(".h"):
            assert file.parent == CSRC / "kernels" / "cuda", (file, path)


def test_only_the_python_folder_includes_pybind11() -> None:
    """Directly, or through the headers that bring all of torch."""
    for file, path in all_includes(CSRC):
        if path.startswith(("pybind11", "Python.h")):
            assert file.parent == CSRC / "python", (file, path)
        assert path not in ("torch/extension.h", "torch/all.h", "ATen/ATen.h"), (
            f"{file}: include what is used"
        )


def test_headers_have_pragma_once() -> None:
    for file in sources(CSRC):
        if file.suffix in (".h", ".cuh"):
            assert "#pragma once" in file.read_text(), file


def test_csrc_imports_nothing_of_memopt() -> None:
    """What the engine needs of memopt's Python is handed to it as callables."""
    for file in sources(CSRC):
        assert not re.search(r'"memopt\.(?!_C\b)\w+(\.\w+)*"', file.read_text()), file


# The layers that know each concept. (The norms are one op below the public ones: norm_*.)
EVERY_LAYER = (
    "csrc/kernels/{}.h",
    "csrc/kernels/cpu/{}.cpp",
    "csrc/kernels/cuda/{}.cu",
    "csrc/ops/{}.cpp",
    "csrc/autograd/{}.cpp",
)
PUBLIC = ("memopt/nn/{}.py", "tests/ops/test_{}.py", "tests/nn/test_{}.py")
CONCEPTS = {
    "activation": EVERY_LAYER + PUBLIC,
    "dropout": EVERY_LAYER + PUBLIC,
    "gated": EVERY_LAYER + PUBLIC,
    "layer_norm": ("csrc/kernels/{}.h", "csrc/autograd/{}.cpp", *PUBLIC[:2]),
    "rms_norm": ("csrc/kernels/{}.h", "csrc/autograd/{}.cpp", *PUBLIC[:2]),
    "norm": ("csrc/kernels/{}.h", "csrc/ops/{}.h", "csrc/autograd/{}.cpp", PUBLIC[2]),
    "norm_forward": ("csrc/kernels/cpu/{}.cpp", "csrc/ops/{}.cpp"),
    "norm_backward": ("csrc/kernels/cpu/{}.cpp", "csrc/ops/{}.cpp"),
}


def test_one_concept_bears_one_name_in_every_layer() -> None:
    for concept, places in CONCEPTS.items():
        for place in places:
            assert (ROOT / place.format(concept)).is_file(), place.format(concept)


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
            assert node.level == 0, f"{file}: relative import in line {node.lineno}"
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


def test_imports_point_down_the_layers() -> None:
    for file in memopt_files():
        own = file.relative_to(ROOT / "memopt").with_suffix("").parts[0]
        for module in imported_modules(file):
            if module != own:
                assert layer_of(module) < layer_of(own), f"{file} imports memopt.{module}"


# The rooms of memopt/memory, each of which may import itself and the ones before it; "" is what
# lies in the folder itself, but for the allocators' figures, which know nothing of memopt's.
MEMORY_ROOMS = ("allocator", "scratch", "", "predicted", "calls")


def test_imports_point_down_the_rooms_of_memory() -> None:
    folder = ROOT / "memopt" / "memory"
    for file in folder.rglob("*.py"):
        own = _room(file)
        for other in imported_files(file):
            if folder in other.parents:
                allowed = MEMORY_ROOMS[: MEMORY_ROOMS.index(own) + 1]
                assert _room(other) in allowed, f"{file} imports {other}"


def _room(file: Path) -> str:
    """Of a file of memopt/memory."""
    inside = file.relative_to(ROOT / "memopt" / "memory").parts
    if file.stem == "allocator":
        return file.stem
    return inside[0] if len(inside) > 1 else ""


def test_plans_and_accumulation_know_no_report() -> None:
    for room in ("_accumulate", "_plan"):
        for file in (ROOT / "memopt" / room).rglob("*.py"):
            assert "_anatomy" not in imported_modules(file), file


def imported_files(file: Path) -> Iterator[Path]:
    """Files of memopt that a file imports, at any level of nesting, for types alone as well."""
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            *module, last = name.split(".")
            if module[:1] == ["memopt"]:
                # The file of a module, or of the module that has the name.
                paths = (Path(*module), Path(*module, last))
                yield from (
                    found
                    for path in paths
                    if (found := ROOT / path.with_suffix(".py")).is_file() and found != file
                )


def test_no_files_import_each_other_in_a_circle() -> None:
    """The files of packages aside, which hand names on."""
    graph = {file: set(imported_files(file)) for file in memopt_files()}
    TopologicalSorter(graph).prepare()  # a CycleError names the files


# A function of convert's rules has the name of the one that it calls, which reports say.
STAND_INS = {"gelu", "relu"}


def named_in(file: Path) -> Iterator[str]:
    """Names of a file's classes and functions, and of its other values but type variables."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            made = node.value.func if isinstance(node.value, ast.Call) else None
            if not (isinstance(made, ast.Name) and made.id in ("TypeVar", "ParamSpec")):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_a_name_means_one_thing() -> None:
    """Those of modules that others import from. A package's __init__ may wrap a function of its own
    under its name, memopt/compat has the names of other libraries, and _without_native those of _C.
    """
    places: dict[str, set[Path]] = {}
    for file in memopt_files():
        if file.name != "__init__.py" and not {"compat", "_without_native"} & {*file.parts}:
            for name in set(named_in(file)) - STAND_INS:
                if not name.startswith("_"):
                    places.setdefault(name, set()).add(file)
    assert not {name: files for name, files in places.items() if len(files) > 1}


def all_sources() -> list[Path]:
    python = [p for d in ("memopt", "tests", "benchmarks") for p in (ROOT / d).rglob("*.py")]
    cpp = [p for d in ("csrc", "tests") for p in sources(ROOT / d)]
    return sorted([*python, *cpp, ROOT / "setup.py"])


def test_no_file_is_too_long_to_read() -> None:
    """A file that passes 300 lines asks to be two; one of 400 has stopped asking."""
    too_long = [f for f in all_sources() if len(f.read_text().splitlines()) > MOST_LINES]
    assert not too_long
