"""Builds memopt's native library, memopt._C. Metadata is in pyproject.toml.

Environment:
    MEMOPT_CUDA            auto (default): CUDA kernels if PyTorch is a CUDA build and a CUDA
                           compiler is found. 1: always, an error without a compiler. 0: never.
    TORCH_CUDA_ARCH_LIST   architectures, as PyTorch reads them ("9.0", "8.0;9.0+PTX"). Default:
                           what the compiler supports of 8.0 8.6 8.9 9.0 10.0 12.0, and PTX; an
                           editable install on a machine with a GPU builds for that GPU alone.
    MAX_JOBS               parallel compilations (ninja).
"""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    raise SystemExit(
        "memopt: building needs PyTorch in the same environment: pip install torch, then "
        "pip install --no-build-isolation ."
    ) from None

ROOT = Path(__file__).parent
CPU_KERNELS = sorted(
    path.stem for path in Path(ROOT, "csrc/kernels/cpu").glob("*.cpp") if path.stem != "dispatch"
)
CUDA_KERNELS = sorted(path.stem for path in Path(ROOT, "csrc/kernels/cuda").glob("*.cu"))
HEADER = "include/cuda_runtime.h"
CUDA_ARCHITECTURES = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]

# One source, one copy per instruction set. baseline is what the compiler targets by default.
# Contraction is off so that a formula rounds alike wherever it is inlined (csrc/kernels/common.h).
INSTRUCTION_SETS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}
CXX_FLAGS = ["-O3", "-g0", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden"]
CXX_FLAGS += ["-Wno-unknown-pragmas", "-Wno-psabi"]  # PyTorch's headers
CXX_FLAGS += [
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]  # gcc 12's AVX-512 header, bug 105593
NVCC_FLAGS = ["-O3", "-fmad=false", "-lineinfo", "-Xfatbin=-compress-all"]

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
IS_EDITABLE = any(command in sys.argv for command in ("editable_wheel", "develop", "--inplace"))


def capability_macros(name: str, vectors: str) -> list[str]:
    """Selects at::vec's implementation and the namespace of one copy of the CPU kernels."""
    return [
        f"-DMEMOPT_CPU_NAMESPACE={name}",
        f"-DCPU_CAPABILITY={vectors}",
        f"-DCPU_CAPABILITY_{vectors}",
    ]


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
    """What TORCH_CUDA_ARCH_LIST says, or its default (see the top of this file)."""
    given = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if given:
        return given
    if IS_EDITABLE and torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        capabilities = {torch.cuda.get_device_capability(i) for i in devices}
        return ";".join(f"{major}.{minor}" for major, minor in sorted(capabilities))
    supported = set(re.findall(r"compute_(\d+)", nvcc_output(home, "--list-gpu-arch")))
    chosen = [arch for arch in CUDA_ARCHITECTURES if arch.replace(".", "") in supported]
    if not chosen:
        fail(f"nvcc in {home} supports none of {', '.join(CUDA_ARCHITECTURES)}")
    return ";".join(chosen) + "+PTX"


def use_ccache() -> None:
    """Compilers through ccache where it is installed.

    Its masquerading links serve C++, PyTorch's variable serves nvcc.
    """
    if not shutil.which("ccache"):
        return
    for links in ("/usr/lib/ccache", "/usr/lib64/ccache"):
        if Path(links, "g++").exists() and "CXX" not in os.environ:
            os.environ["PATH"] = links + os.pathsep + os.environ["PATH"]
            break
    nvcc = shutil.which("nvcc")
    if nvcc:
        os.environ.setdefault("PYTORCH_NVCC", f"ccache {nvcc}")


class BuildExtension(cpp_extension.BuildExtension):
    """Adds the CPU kernels' copies for each instruction set, which need flags of their own.

    Their objects come last on the link line: where an inline function of a shared header exists in
    several copies the linker keeps the first, so the baseline's, which every processor runs.
    """

    def build_extension(self, ext: object) -> None:
        for name, flags in INSTRUCTION_SETS.items() if IS_X86 else ():
            flags = [*CXX_FLAGS, *flags, *capability_macros(name, name.upper())]
            ext.extra_objects += self.compiler.compile(
                [source("kernels/cpu", kernel) for kernel in CPU_KERNELS],
                output_dir=os.path.join(self.build_temp, name),
                include_dirs=ext.include_dirs,
                extra_postargs={"cxx": flags, "nvcc": []},
                depends=ext.depends,
            )
        super().build_extension(ext)


def source(folder: str, name: str, suffix: str = ".cpp") -> str:
    return f"csrc/{folder}/{name}{suffix}"


def extension() -> object:
    os.chdir(ROOT)
    cuda_home = choose_cuda()
    folders = ("ops", "autograd", "saved", "python")
    sources = sorted(file for folder in folders for file in glob.glob(f"csrc/{folder}/*.cpp"))
    sources += [source("kernels/cpu", "dispatch")]
    sources += [source("kernels/cpu", kernel) for kernel in CPU_KERNELS]
    cxx = [*CXX_FLAGS, *capability_macros("baseline", "DEFAULT")]
    macros = {
        "MEMOPT_VERSION": re.search(
            r'__version__ = "(.+)"', Path("memopt/_version.py").read_text()
        ).group(1),
        "MEMOPT_TORCH_VERSION": torch.__version__,
        "MEMOPT_TORCH_CUDA": torch.version.cuda or "",
        "MEMOPT_CUDA_VERSION": "",
        "MEMOPT_CUDA_ARCHITECTURES": "",
    }
    options: dict[str, list[str]] = {"include_dirs": [], "library_dirs": [], "libraries": []}
    if IS_X86:
        cxx.append("-DMEMOPT_X86")
    if cuda_home is not None:
        release = re.search(r"release (\d+\.\d+)", nvcc_output(cuda_home, "--version")).group(1)
        # A CPU-only PyTorch leaves this empty and then refuses .cu sources.
        cpp_extension.CUDA_HOME = str(cuda_home)
        os.environ["TORCH_CUDA_ARCH_LIST"] = architectures(cuda_home)
        macros["MEMOPT_CUDA_VERSION"] = release
        macros["MEMOPT_CUDA_ARCHITECTURES"] = os.environ["TORCH_CUDA_ARCH_LIST"]
        cxx.append("-DMEMOPT_WITH_CUDA")
        sources += [source("kernels/cuda", kernel, ".cu") for kernel in CUDA_KERNELS]
        options["include_dirs"].append(str(cuda_home / "include"))
        options["library_dirs"] += [str(cuda_home / lib) for lib in ("lib64", "lib")]
        # Static, so that the library loads beside a PyTorch of any CUDA version or of none.
        options["libraries"] += ["cudart_static", "rt", "dl", "pthread"]

    instruction_sets = ["baseline", *(INSTRUCTION_SETS if IS_X86 else ())]
    cuda = macros["MEMOPT_CUDA_ARCHITECTURES"] or "no"
    print(f"memopt: building CPU kernels for {', '.join(instruction_sets)}; CUDA kernels: {cuda}")
    return cpp_extension.CppExtension(
        "memopt._C",
        sources,
        depends=glob.glob("csrc/**/*.h", recursive=True)
        + glob.glob("csrc/**/*.cuh", recursive=True),
        define_macros=[(name, f'"{value}"') for name, value in macros.items()],
        extra_compile_args={"cxx": cxx, "nvcc": NVCC_FLAGS},
        extra_link_args=["-fopenmp"],
        **options,
    )


use_ccache()
setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
