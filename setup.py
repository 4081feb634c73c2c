"""Builds memopt's native library, memopt._C. Metadata is in pyproject.toml.

One ninja run compiles everything, with a line of progress for each object, into build/ninja; what
has not changed is not compiled again, by whichever command (make, pip, setup.py) it was built.

Environment:
    MEMOPT_NATIVE          1 (default). 0: no native library, no compiler, no PyTorch needed; the
                           wheel is for every Python and PyTorch (memopt/_without_native says what
                           such an installation can do).
    MEMOPT_CUDA            auto (default): CUDA kernels if PyTorch is a CUDA build and a CUDA
                           compiler is found. 1: always, an error without a compiler. 0: never.
    TORCH_CUDA_ARCH_LIST   architectures, as PyTorch reads them ("9.0", "8.0;9.0+PTX"), or all:
                           what the compiler supports of 8.0 8.6 8.9 9.0 10.0 12.0, and PTX.
                           Default: this machine's GPUs; all where it has none.
    MAX_JOBS               parallel compilations. Default: the number of processors.
    CXX, CFLAGS, LDFLAGS   as everywhere. ccache is used where it is installed.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = os.environ.get("MEMOPT_NATIVE", "1")
if NATIVE not in ("0", "1"):
    raise SystemExit(f"memopt: MEMOPT_NATIVE must be 0 or 1, got {NATIVE!r}")
if NATIVE == "1":
    # PyTorch warns where there is no NumPy, which building does without.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        raise SystemExit(
            "memopt: building needs PyTorch in the same environment: pip install torch, then "
            "pip install --no-build-isolation . (or MEMOPT_NATIVE=0 pip install . for regions, "
            "plan and anatomy without kernels)"
        ) from None

ROOT = Path(__file__).resolve().parent
HEADER = "include/cuda_runtime.h"
CUDA_ARCHITECTURES = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]

# What knows PyTorch, offload and plan. PyTorch's headers take longer to compile than the files that
# include them, so files of a folder are compiled together, as many as have this many lines and no
# local name in common.
# What takes longest stands first.
HOST_FOLDERS = ("autograd", "python", "intercept", "saved", "ops", "offload", "plan")
JOINED_LINES = 3500

# One source, one copy per instruction set. baseline is what the compiler targets by default.
# Contraction is off so that a formula rounds alike wherever it is inlined (csrc/kernels/common.h).
INSTRUCTION_SETS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}
CXX_FLAGS = ["-std=c++20", "-g0", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden"]
CXX_FLAGS += ["-Wno-unknown-pragmas", "-Wno-psabi"]  # PyTorch's headers
CXX_FLAGS += [
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]  # gcc 12's AVX-512 header, bug 105593
# The kernels are loops over elements; the rest runs once a call, and takes longest to optimise.
KERNEL_FLAGS = [*CXX_FLAGS, "-O3"]
HOST_FLAGS = [*CXX_FLAGS, "-O2", "-I.", "-DTORCH_API_INCLUDE_EXTENSION_H"]
HOST_FLAGS += ["-DAT_PER_OPERATOR_HEADERS"]  # no header of PyTorch's includes all operators then
NVCC_FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-lineinfo", "-Xfatbin=-compress-all"]
NVCC_FLAGS += ["--compiler-options", "-fPIC"]

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def fail(message: str) -> None:
    raise SystemExit(f"memopt: {message}")


def find_cuda_home() -> Path | None:
    """The CUDA toolkit: CUDA_HOME or CUDA_PATH, the nvcc on PATH, or /usr/local/cuda."""
    nvcc = shutil.which("nvcc")
    candidates = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        cpp_extension.CUDA_HOME,
        str(Path(nvcc).resolve().parents[1]) if nvcc else None,
        "/usr/local/cuda",
    ]
    for candidate in candidates:
        # /usr/local/bin/nvcc may be a wrapper: a toolkit has the headers too.
        if candidate and all(Path(candidate, f).exists() for f in ("bin/nvcc", HEADER)):
            return Path(candidate)
    return None


def choose_cuda() -> Path | None:
    """The toolkit to build CUDA kernels with, or None; what MEMOPT_CUDA asks for decides."""
    wanted = os.environ.get("MEMOPT_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        fail(f"MEMOPT_CUDA must be auto, 0 or 1, got {wanted!r}")
    if wanted == "0" or (wanted == "auto" and torch.version.cuda is None):
        return None
    home = find_cuda_home()
    if home is None and wanted == "1":
        fail("MEMOPT_CUDA=1 needs the CUDA compiler: put nvcc on PATH or set CUDA_HOME")
    return home


def nvcc_output(home: Path, option: str) -> str:
    return subprocess.run(
        [str(home / "bin" / "nvcc"), option], check=True, capture_output=True, text=True
    ).stdout


def architectures(home: Path) -> str:
    """The value of TORCH_CUDA_ARCH_LIST, or its default (see the top of this file)."""
    given = os.environ.get("TORCH_CUDA_ARCH_LIST") or "default"
    if given not in ("default", "all"):
        return given
    if given == "default" and torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        capabilities = {torch.cuda.get_device_capability(i) for i in devices}
        return ";".join(f"{major}.{minor}" for major, minor in sorted(capabilities))
    supported = set(re.findall(r"compute_(\d+)", nvcc_output(home, "--list-gpu-arch")))
    chosen = [arch for arch in CUDA_ARCHITECTURES if arch.replace(".", "") in supported]
    if not chosen:
        fail(f"nvcc in {home} supports none of {', '.join(CUDA_ARCHITECTURES)}")
    return ";".join(chosen) + "+PTX"


def find_ninja() -> str:
    """The ninja of this Python's environment (its wheel's), or the one on PATH."""
    beside = Path(sysconfig.get_path("scripts"), "ninja")
    found = str(beside) if beside.exists() else shutil.which("ninja")
    if found is None:
        fail("building needs ninja in the same environment: pip install ninja")
    return found


def build_folder() -> Path:
    """Relative to the repository: one for each Python and PyTorch that is built for."""
    python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    return Path("build", "ninja", f"{python}-torch-{torch.__version__}")


class Step(NamedTuple):
    """One compilation."""

    rule: str
    source: str
    object: str
    flags: list[str]
    description: str


# struct NAME {, using NAME =, int NAME(..., constexpr int NAME[] = ..., once template arguments are
# gone. A member that is defined outside of its class has :: in front, a macro has no type there.
DECLARED = re.compile(
    r"^(?:\w[\w:]*[\s*&]+)+(?!\w+::)(\w+)(?:\[\w*\])?\s*(?:[({=;]|:(?!:)|$|final\b)"
)


def local_names(text: str) -> dict[str, str]:
    """Names that a source declares in unnamed namespaces, where a line that begins a declaration is
    not indented (.clang-format). An alias has its whole line: equal ones may stand side by side.
    """
    names = {}
    blocks = r"^namespace \{\n(.*?)^\}  // namespace$"
    for block in re.findall(blocks, text, re.DOTALL | re.MULTILINE):
        for line in re.findall(r"^[A-Za-z].*", block, re.MULTILINE):
            declaration = line
            while (less := re.sub(r"<[^<>]*>", "", declaration)) != declaration:
                declaration = less
            found = DECLARED.match(declaration)
            if found:
                is_alias = line.startswith(("using ", "namespace ")) and line.endswith(";")
                names[found[1]] = line if is_alias else ""
    return names


def host_sources() -> dict[str, list[str]]:
    """The sources that are compiled together, under the name of each part."""
    joined: dict[str, list[str]] = {}
    for folder in HOST_FOLDERS:
        room: list[int] = []  # of each part: lines to go, and what its files declare
        taken: list[dict[str, str]] = []
        for file in sorted(Path("csrc", folder).glob("*.cpp")):
            text = file.read_text()
            lines, names = text.count("\n"), local_names(text)
            for part, declared in enumerate(taken):
                same = names.keys() & declared.keys()
                clash = any(not names[n] or names[n] != declared[n] for n in same)
                if lines <= room[part] and not clash:
                    break
            else:
                part = len(room)
                room.append(JOINED_LINES)
                taken.append({})
            room[part] -= lines
            taken[part] |= names
            joined.setdefault(f"{folder}_{part + 1}", []).append(file.as_posix())
    return joined


def kernel_sources(folder: str, pattern: str) -> list[str]:
    """The largest first: it takes longest to compile. dispatch.cpp chooses among the copies."""
    files = [f for f in Path("csrc", "kernels", folder).glob(pattern) if f.name != "dispatch.cpp"]
    files.sort(key=lambda file: (-file.stat().st_size, file.name))
    return [file.as_posix() for file in files]


def capability_macros(name: str, vectors: str) -> list[str]:
    """Selects at::vec's implementation and the namespace of one copy of the CPU kernels."""
    return [
        f"-DMEMOPT_CPU_NAMESPACE={name}",
        f"-DCPU_CAPABILITY={vectors}",
        f"-DCPU_CAPABILITY_{vectors}",
    ]


def steps(folder: Path, macros: Sequence[str], include: Sequence[str]) -> Iterator[Step]:
    """All but the CUDA kernels, in the order of the link line. There the baseline stands first:
    where an inline function of a shared header exists in several copies the linker keeps the
    first, and that one must run on every processor.
    """
    host = [*HOST_FLAGS, *macros, *capability_macros("baseline", "DEFAULT"), *include]
    for part, sources in host_sources().items():
        source = folder / f"{part}.cpp"
        write_if_changed(source, "".join(f'#include "{file}"\n' for file in sources))
        yield Step("cxx", str(source), f"{folder}/{part}.o", host, f"{part}: {len(sources)} files")
    dispatch = "csrc/kernels/cpu/dispatch.cpp"
    yield Step("cxx", dispatch, f"{folder}/dispatch.o", host, dispatch)
    # On x86 only processors of before 2013 run the baseline, and -O3 takes twice as long there.
    copies = {"baseline": ("DEFAULT", ["-O2"] if IS_X86 else [])}
    for name, flags in INSTRUCTION_SETS.items() if IS_X86 else ():
        copies[name] = (name.upper(), flags)
    for name, (vectors, extra) in copies.items():
        flags = [*KERNEL_FLAGS, *extra, *capability_macros(name, vectors), *macros, *include]
        for source in kernel_sources("cpu", "*.cpp"):
            made = f"{folder}/{name}/{Path(source).stem}.o"
            yield Step("cxx", source, made, flags, f"{source} for {name}")


def cuda_steps(folder: Path) -> Iterator[Step]:
    flags = [*NVCC_FLAGS, *cpp_extension.COMMON_NVCC_FLAGS, *cpp_extension._get_cuda_arch_flags()]
    for source in kernel_sources("cuda", "*.cu"):
        yield Step("nvcc", source, f"{folder}/cuda/{Path(source).stem}.o", flags, source)


def write_if_changed(path: Path, text: str) -> None:
    """Leaves an equal file's time alone: ninja goes by it."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def options(command: Sequence[str]) -> str:
    """A command's options, without the compiler's name, which may be two words (ccache gcc)."""
    return shlex.join(itertools.dropwhile(lambda word: not word.startswith("-"), command))


def escaped(text: str) -> str:
    """A path or a flag as a ninja file says it."""
    return re.sub(r"([$ :])", r"$\1", text)


def ninja_file(compilers: dict[str, str], made: list[Step], link: str, library: Path) -> str:
    lines = ["ninja_required_version = 1.5", f"builddir = {library.parent}"]
    for rule, compiler in compilers.items():
        dependencies = "-MMD -MF $out.d"
        lines += [
            f"rule {rule}",
            f"  command = {compiler} {dependencies} $flags -c $in -o $out",
            "  description = $what",
            *("  depfile = $out.d", "  deps = gcc"),
        ]
    lines += ["rule link", f"  command = {link}", "  description = linking memopt._C"]
    # ninja begins with what stands first, and a CUDA kernel takes longer than anything else.
    for step in sorted(made, key=lambda step: step.rule != "nvcc"):
        flags = shlex.join(step.flags).replace("$", "$$")
        lines += [
            f"build {escaped(step.object)}: {step.rule} {escaped(step.source)}",
            *(f"  flags = {flags}", f"  what = {step.description}"),
        ]
    lines.append(f"build {escaped(str(library))}: link {' '.join(escaped(s.object) for s in made)}")
    return "\n".join(lines) + "\n"


class BuildExtension(build_ext):
    """Compiles and links by one ninja file."""

    def build_extension(self, ext: Extension) -> None:
        ninja = find_ninja()
        cuda_home = choose_cuda()
        if cuda_home is not None:
            os.environ["TORCH_CUDA_ARCH_LIST"] = architectures(cuda_home)
        instruction_sets = ["baseline", *(INSTRUCTION_SETS if IS_X86 else ())]
        cuda = os.environ["TORCH_CUDA_ARCH_LIST"] if cuda_home else "no"
        kernels = f"CPU kernels for {', '.join(instruction_sets)}; CUDA kernels: {cuda}"
        print(f"memopt: building {kernels}", flush=True)

        folder = build_folder()
        library = folder / "_C.so"
        write_if_changed(folder / "build.ninja", self.ninja_file(folder, library, cuda_home))
        jobs = os.environ.get("MAX_JOBS")
        command = [ninja, "-f", str(folder / "build.ninja"), *(("-j", jobs) if jobs else ())]
        if subprocess.run(command).returncode != 0:
            fail("the compiler failed; its message is above")
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(str(Path(target).parent))
        self.copy_file(str(library), target)

    def ninja_file(self, folder: Path, library: Path, cuda_home: Path | None) -> str:
        # setuptools' compiler has the flags that Python was built with, and CFLAGS and LDFLAGS.
        cxx = os.environ.get("CXX", "c++")
        if shutil.which(shlex.split(cxx)[0]) is None:
            fail(f"building needs a C++ compiler: {cxx!r} is not found")
        ccache = "ccache " if shutil.which("ccache") and not cxx.startswith("ccache") else ""
        compilers = {"cxx": f"{ccache}{cxx} {options(self.compiler.compiler_so)}"}
        include = [*cpp_extension.include_paths(), *self.compiler.include_dirs, *self.include_dirs]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        libraries += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-fopenmp"]
        macros = build_macros(cuda_home)
        if cuda_home is not None:
            include.append(str(cuda_home / "include"))
            compilers["nvcc"] = f"{ccache}{shlex.quote(str(cuda_home / 'bin' / 'nvcc'))}"
            libraries += [f"-L{cuda_home / lib}" for lib in ("lib64", "lib")]
            # Static, so that the library loads beside a PyTorch of any CUDA version or of none.
            libraries += ["-lcudart_static", "-lrt", "-ldl", "-lpthread"]
        flags = [f"-I{path}" for path in dict.fromkeys(include)]
        made = list(steps(folder, macros, flags))
        if cuda_home is not None:
            made += cuda_steps(folder)
        link = f"{cxx} {options(self.compiler.linker_so)} $in -o $out {shlex.join(libraries)}"
        return ninja_file(compilers, made, link, library)


def build_macros(cuda_home: Path | None) -> list[str]:
    """Macros for what memopt.build_info() says of the build."""
    version = re.search(r'__version__ = "(.+)"', Path("memopt/_version.py").read_text())
    macros = {
        "MEMOPT_VERSION": version.group(1),
        "MEMOPT_TORCH_VERSION": torch.__version__,
        "MEMOPT_TORCH_CUDA": torch.version.cuda or "",
        "MEMOPT_CUDA_VERSION": "",
        "MEMOPT_CUDA_ARCHITECTURES": "",
    }
    flags = ["-DMEMOPT_X86"] if IS_X86 else []
    if cuda_home is not None:
        release = re.search(r"release (\d+\.\d+)", nvcc_output(cuda_home, "--version"))
        macros["MEMOPT_CUDA_VERSION"] = release.group(1)
        macros["MEMOPT_CUDA_ARCHITECTURES"] = os.environ["TORCH_CUDA_ARCH_LIST"]
        flags.append("-DMEMOPT_WITH_CUDA")
    return [*flags, *(f'-D{name}="{value}"' for name, value in macros.items())]


os.chdir(ROOT)
if NATIVE == "1":
    sources = sorted(path.as_posix() for path in Path("csrc").rglob("*.c*"))
    setup(ext_modules=[Extension("memopt._C", sources)], cmdclass={"build_ext": BuildExtension})
else:
    setup()
