"""Resources of the compiled CUDA kernels: registers, memory of threads (spills), widths of accesses
to memory, and how many warps a multiprocessor can hold. No GPU is needed.

`python -m benchmarks.cuda_resources [--out FILE.json]` reads the objects that the build left (of a
build with MEMOPT_CUDA=1, with the compiler's full optimisation) with the CUDA toolkit's cuobjdump
(on PyPI: nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm), or with the one that Triton brings, and
writes one row for each architecture, kernel and element type: the worst of its variants.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import record
from benchmarks.cli import RESULTS
from benchmarks.summary import table

OP = "cuda_resources"
ROOT = Path(__file__).parent.parent
REGISTERS, MOST_WARPS = 65536, 64
"""A multiprocessor of compute capability 8.0, 9.0 or 10.0 has so many."""

_RESOURCES = re.compile(r"Function (\S+?):?\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_ARCH = re.compile(r"^arch = (\S+)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
_ACCESS = re.compile(r"\b(LDG|STG|LDL|STL)\.?([A-Z0-9._]*)")
_KERNEL = re.compile(r"(\w+)<.*?\b(double|float|__half|__nv_bfloat16)\b")
_LONG = {"__half": "float16", "__nv_bfloat16": "bfloat16", "float": "float32", "double": "float64"}


class Kernel(NamedTuple):
    """A variant of a kernel."""

    name: str
    dtype: str
    registers: int
    stack: int
    """Bytes of a thread that are in memory: arrays that no registers could hold, and spills."""
    accesses: Mapping[str, int]
    """Instructions by kind: `LDG.128`, `STG.16`, ..., `LDL` and `STL` for the stack."""


def find_cuobjdump() -> str | None:
    """The toolkit's, the one on PATH, of the package on PyPI, or Triton's."""
    found = shutil.which("cuobjdump", path="/usr/local/cuda/bin") or shutil.which("cuobjdump")
    if found is not None:
        return found
    places = [*Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/cuobjdump")]
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")
    return next((str(place) for place in places if place.exists()), None)


def newest_objects() -> list[Path]:
    """The object files of the CUDA kernels in the build folder that was written last."""
    folders = [path.parent for path in ROOT.glob("build/ninja/*/cuda/norm_forward.o")]
    if not folders:
        return []
    newest = max(folders, key=lambda folder: (folder / "norm_forward.o").stat().st_mtime)
    return sorted(newest.glob("*.o"))


def kernels_in(resources: str, code: str, names: Mapping[str, str]) -> list[Kernel]:
    """From what cuobjdump prints with -res-usage and -sass; `names` has the readable ones."""
    places = [*_FUNCTION.finditer(code)]
    ends = [place.start() for place in places[1:]] + [len(code)]
    accesses = {
        place[1]: Counter(map(_kind, _ACCESS.findall(code[place.end() : end])))
        for place, end in zip(places, ends, strict=True)
    }
    found = []
    for mangled, registers, stack, _, _ in _RESOURCES.findall(resources):
        match = _KERNEL.search(names.get(mangled, mangled).replace("(anonymous namespace)::", ""))
        if match is not None:
            found.append(
                Kernel(
                    match[1],
                    _LONG[match[2]],
                    int(registers),
                    int(stack),
                    dict(accesses.get(mangled, {})),
                )
            )
    return found


def _kind(access: tuple[str, str]) -> str:
    """`LDG.E.128.CONSTANT` as `LDG.128`; 32 bits have no number."""
    op, suffixes = access
    if op in ("LDL", "STL"):
        return op
    widths = [word.lstrip("US") for word in suffixes.split(".")]
    width = next((word for word in widths if word in ("8", "16", "64", "128")), "32")
    return f"{op}.{width}"


def resident_warps(registers: int) -> int:
    """The warps that a multiprocessor has registers for: a thread gets a multiple of 8."""
    each = -(-registers // 8) * 8 * 32
    return min(MOST_WARPS, REGISTERS // each)


def rows_of(arch: str, kernels: Iterable[Kernel]) -> dict[str, dict[str, Any]]:
    """The record of each kernel and element type, by `arch/kernel/dtype`."""
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[f"{arch}/{kernel.name}/{kernel.dtype}"].append(kernel)
    rows = {}
    for key, variants in sorted(groups.items()):
        accesses = sum((Counter(variant.accesses) for variant in variants), Counter())
        rows[key] = {
            "variants": len(variants),
            "registers": [min(v.registers for v in variants), max(v.registers for v in variants)],
            "with_stack": sum(v.stack > 0 for v in variants),
            "stack_bytes": max(v.stack for v in variants),
            "resident_warps": resident_warps(max(v.registers for v in variants)),
            "accesses": dict(sorted(accesses.items())),
        }
    return rows


def tables(run: Mapping[str, Any]) -> str:
    """A row for each kernel and element type, with three columns for each architecture."""
    rows: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for key, found in run["cases"].items():
        arch, name, dtype = key.split("/")
        rows[name, dtype][arch] = found
    archs = list(dict.fromkeys(key.partition("/")[0] for key in run["cases"]))
    head = ["kernel", "type", "variants"]
    head += [f"{arch}: {of}" for arch in archs for of in ("registers", "warps", "with a stack")]
    cells = []
    for (name, dtype), by_arch in rows.items():
        (variants,) = {found["variants"] for found in by_arch.values()}
        row = [f"`{name}`", dtype, str(variants)]
        for arch in archs:
            found = by_arch[arch]
            low, high = found["registers"]
            stack = f"{found['with_stack']}, up to {found['stack_bytes']} bytes"
            row += [
                str(low) if low == high else f"{low} to {high}",
                str(found["resident_warps"]),
                stack if found["with_stack"] else "none",
            ]
        cells.append(row)
    return table(head, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 if there is nothing to read or nothing to read it with."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{OP}")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{OP}.json", help="JSON file")
    parser.add_argument("objects", nargs="*", type=Path, help="default: those of the last build")
    args = parser.parse_args(argv)
    objects, tool = args.objects or newest_objects(), find_cuobjdump()
    if not objects or tool is None:
        missing = "cuobjdump" if objects else "objects of CUDA kernels (build with MEMOPT_CUDA=1)"
        print(f"{OP}: found no {missing}", file=sys.stderr)
        return 2

    def output(*command: str, given: str | None = None) -> str:
        ran = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
        return ran.stdout

    archs = sorted(
        {arch for path in objects for arch in _ARCH.findall(output(tool, "-res-usage", str(path)))},
        key=lambda arch: int(arch.strip("sm_")),
    )
    settings = {"architectures": archs}
    header = record.header(OP, {}, settings, argv, torch.device("cpu"))
    results = record.Record(args.out, header, resume=False)
    for arch in archs:
        kernels = []
        for path in objects:
            dump = (tool, "-arch", arch, str(path))
            resources = output(*dump, "-res-usage")
            mangled = [match[0] for match in _RESOURCES.findall(resources)]
            readable = output("c++filt", given="\n".join(mangled)).splitlines()
            names = dict(zip(mangled, readable, strict=True))
            kernels += kernels_in(resources, output(*dump, "-sass"), names)
            print(f"{path.name} for {arch}: {len(mangled)} kernels", flush=True)
        for key, row in rows_of(arch, kernels).items():
            results.add(key, row)
    print(f"\n{tables({'cases': results.cases})}\n\n{args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
