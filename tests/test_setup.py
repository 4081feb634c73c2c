"""Proves: the build says in one line what it needs or was asked for and cannot do, before it
compiles anything; and which CUDA architectures it would build for.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Runs setup.py without its last line, which builds.
FUNCTIONS = """
import sys
source = open("setup.py").read().split("setup(ext_modules")[0]
namespace = {"__file__": "setup.py", "__name__": "setup"}
sys.argv = ["setup.py", *sys.argv[1:]]
exec(source, namespace)
"""


def run(
    program: str, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def last_line(child: subprocess.CompletedProcess[str]) -> str:
    return child.stderr.strip().splitlines()[-1]


def test_without_torch_it_says_what_to_run(child_environment: dict[str, str]) -> None:
    child = run("import sys; sys.modules['torch'] = None" + FUNCTIONS, child_environment)
    assert child.returncode != 0
    assert child.stderr.strip() == (
        "memopt: building needs PyTorch in the same environment: pip install torch, then "
        "pip install --no-build-isolation ."
    )


def test_unknown_value_of_memopt_cuda(child_environment: dict[str, str]) -> None:
    child = run(
        FUNCTIONS + "namespace['choose_cuda']()", {**child_environment, "MEMOPT_CUDA": "yes"}
    )
    assert child.returncode != 0
    assert last_line(child) == "memopt: MEMOPT_CUDA must be auto, 0 or 1, got 'yes'"


@pytest.mark.parametrize(
    ("wanted", "torch_cuda", "toolkit", "built"),
    [
        ("auto", "None", "'/toolkit'", False),  # a CPU-only PyTorch could never run the kernels
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("auto", "'13.0'", "'/toolkit'", True),
                ("auto", "'13.0'", "None", False),
                ("1", "None", "'/toolkit'", True),
                ("0", "'13.0'", "'/toolkit'", False),
            )
        ),
    ],
)
def test_when_cuda_kernels_are_built(
    wanted: str, torch_cuda: str, toolkit: str, built: bool, child_environment: dict[str, str]
) -> None:
    program = FUNCTIONS + (
        f"namespace['torch'].version.cuda = {torch_cuda}\n"
        f"namespace['find_cuda_home'] = lambda: {toolkit}\n"
        "print(namespace['choose_cuda']() is not None)"
    )
    child = run(program, {**child_environment, "MEMOPT_CUDA": wanted})
    assert child.stdout.strip() == str(built), child.stderr


def test_one_without_a_compiler_is_an_error(child_environment: dict[str, str]) -> None:
    program = FUNCTIONS + ("namespace['find_cuda_home'] = lambda: None\nnamespace['choose_cuda']()")
    child = run(program, {**child_environment, "MEMOPT_CUDA": "1"})
    assert child.returncode != 0
    assert last_line(child) == (
        "memopt: MEMOPT_CUDA=1 needs the CUDA compiler: put nvcc on PATH or set CUDA_HOME"
    )


@pytest.mark.parametrize(
    ("given", "arguments", "gpu", "chosen"),
    [
        (
            None,
            ("bdist_wheel",),
            False,
            "8.0;9.0;12.0+PTX",
        ),  # what both this nvcc and the list have
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (None, ("editable_wheel",), False, "8.0;9.0;12.0+PTX"),
                ("all", ("bdist_wheel",), True, "8.0;9.0;12.0+PTX"),
                ("9.0", ("bdist_wheel",), True, "9.0"),
                (None, ("bdist_wheel",), True, "8.9"),
                (None, ("editable_wheel",), True, "8.9"),
            )
        ),
    ],
)
def test_architectures(
    given: str | None,
    arguments: tuple[str, ...],
    gpu: bool,
    chosen: str,
    child_environment: dict[str, str],
) -> None:
    program = FUNCTIONS + (
        "cuda = namespace['torch'].cuda\n"
        f"cuda.is_available = lambda: {gpu}\n"
        "cuda.device_count = lambda: 2\n"
        "cuda.get_device_capability = lambda i: (8, 9)\n"
        "supported = 'compute_75\\ncompute_80\\ncompute_90\\ncompute_120'\n"
        "namespace['nvcc_output'] = lambda home, option: supported\n"
        "print(namespace['architectures'](None))"
    )
    environment = {k: v for k, v in child_environment.items() if k != "TORCH_CUDA_ARCH_LIST"}
    if given is not None:
        environment["TORCH_CUDA_ARCH_LIST"] = given
    child = run(program, environment, *arguments)
    assert child.stdout.strip() == chosen, child.stderr


def compiled(folder: Path, environment: dict[str, str]) -> list[tuple[str, str]]:
    """(object, source) of all that setup.py compiles in the current folder, in the link's order."""
    program = FUNCTIONS + (
        "import os\n"
        "from pathlib import Path\n"
        "folder = Path(sys.argv[1])\n"
        "os.chdir(sys.argv[2])\n"
        "for step in namespace['steps'](folder, [], []):\n"
        "    part = folder / Path(step.source).name\n"
        "    files = part.read_text().split('\"')[1::2] if part.exists() else [step.source]\n"
        "    print(*(f'{step.object} {file}' for file in files), sep='\\n')\n"
    )
    child = run(program, environment, str(folder / "made"), str(folder))
    assert child.returncode == 0, child.stderr
    return [tuple(line.split()) for line in child.stdout.splitlines()]


def test_every_source_is_found_and_compiled_once(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    by_copy: dict[str, list[str]] = {}
    for made, source in compiled(tmp_path, child_environment):
        by_copy.setdefault(Path(made).parent.name, []).append(source)
    found = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cpp")}
    kernels = {f for f in found if "kernels" in f and not f.endswith("dispatch.cpp")}
    # The linker keeps the first copy of an inline function: one that every processor runs.
    assert list(by_copy)[:2] == ["made", "baseline"]
    assert sorted(by_copy.pop("made")) == sorted(found - kernels)
    for sources in by_copy.values():
        assert sorted(sources) == sorted(kernels)


SAMPLES = {
    "a": "namespace {\nusing T = int;\nstruct Same {\n  int other;\n};\n}  // namespace\n",
    "b": "namespace {\nusing T = int;\nint other(int x) {\n  return x;\n}\n}  // namespace\n",
    "c": "namespace {\nconst std::pair<int, int>& Same(int);\n}  // namespace\n",
    "d": "namespace {\nusing T = long;\n}  // namespace\nvoid T::member() {}\n",
    "e": "int outside;\n" * 2000,
}


def test_files_with_the_same_local_name_are_compiled_apart(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    """And so are more lines than one compilation should have."""
    folder = tmp_path / "csrc" / "ops"
    folder.mkdir(parents=True)
    for name, text in SAMPLES.items():
        (folder / f"{name}.cpp").write_text(text)
    parts: dict[str, str] = {}
    for made, source in compiled(tmp_path, child_environment):
        if Path(source).parent.name == "ops":
            parts[Path(made).stem] = parts.get(Path(made).stem, "") + Path(source).stem
    assert parts == {"ops_1": "ab", "ops_2": "cd", "ops_3": "e"}


def test_without_ninja_it_says_what_to_run(child_environment: dict[str, str]) -> None:
    program = FUNCTIONS + (
        "namespace['sysconfig'].get_path = lambda name: '/nowhere'\n"
        "namespace['shutil'].which = lambda name: None\n"
        "namespace['find_ninja']()"
    )
    child = run(program, child_environment)
    assert child.returncode != 0
    assert last_line(child) == (
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
