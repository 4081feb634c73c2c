"""The command line that every benchmark shares."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.peers import PACKAGES

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"
OPS = ("layer_norm", "layer_norm_gelu", "gelu", "rms_norm", "add_norm")
OPS += ("activation", "conv_activation", "gated", "dropout")
OPS += ("layer_norm_linear", "gelu_linear", "mlp")
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "float64": torch.float64,
}
DIRECTIONS = ("forward", "backward", "forward+backward")
FORMS = ("none", "tanh")

# 0.25, 0.75, 16 and 128 MiB in float32: a core's own caches, the shared cache, and memory.
CPU_SHAPES = ((64, 1024), (256, 768), (4096, 1024), (8192, 4096))
# With matrix products, whose time grows with the square of the hidden size: 1024 tokens.
CPU_LINEAR_SHAPES = tuple((1024, hidden) for hidden in (512, 768, 1024, 2048))
# Whole models: 512 tokens.
CPU_MODEL_SHAPES = tuple((512, hidden) for hidden in (256, 512, 768, 1024))
# Hidden sizes and token counts for which other libraries have published figures.
CUDA_SHAPES = tuple(
    (rows, cols) for rows in (16384, 4096, 65536) for cols in (4096, 1024, 8192, 16384, 2048)
)


def has_device(op: str, device: str) -> bool:
    """Whether this PyTorch sees one of the kind; says so on stderr where it does not."""
    if device != "cuda" or torch.cuda.is_available():
        return True
    message = f"benchmarks.{op}: PyTorch {torch.__version__} sees no CUDA device here"
    print(message, file=sys.stderr)
    return False


def command(op: str) -> str:
    """The command that runs a benchmark; options follow it."""
    return f"python -m benchmarks.{f'ops {op}' if op in OPS else op}"


def parse(op: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options: lists as tuples, and the defaults that depend on the device filled in."""
    parser = argparse.ArgumentParser(prog=command(op))

    def add_list(option: str, convert: Callable[[str], Any], help: str) -> None:
        parser.add_argument(option, type=_list(convert), metavar="A,B", help=help)

    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    add_list("--dtype", _one_of(DTYPES), f"of {', '.join(DTYPES)}; default: bfloat16,float32")
    add_list("--threads", int, "numbers of threads; default: 1,2, on CUDA 1")
    add_list("--shapes", _shape, "ROWSxCOLS; default: the device's list in cli.py")
    add_list("--direction", _one_of(DIRECTIONS), f"of {', '.join(DIRECTIONS)}; default: all")
    add_list("--approximate", _one_of(FORMS), "GELU's forms; default: none,tanh")
    add_list(
        "--peers",
        _one_of(tuple(PACKAGES)),
        f"further variants where installed, of {', '.join(PACKAGES)}; default: none, on CUDA all",
    )
    add = parser.add_argument
    add("--filter", metavar="TEXT", default="", help="only cases whose key contains TEXT")
    add("--quick", action="store_true", help="short samples, few rounds: a check, not a result")
    add("--fresh-pages", action="store_true", help="time page faults too: see NOTES.md, allocation")
    add("--seed", type=int, default=0, help="of the order of the variants; default: 0")
    add("--minutes", type=float, default=float("inf"), help="start no case after this time")
    add("--out", type=Path, help="JSON file; default: benchmarks/results/DEVICE_OP.json")
    add("--resume", action="store_true", help="keep the cases that the file has already")
    args = parser.parse_args(argv)

    on_cuda = args.device == "cuda"
    cpu_shapes = CPU_LINEAR_SHAPES if op.endswith(("_linear", "mlp")) else CPU_SHAPES
    if op == "convert":
        cpu_shapes = CPU_MODEL_SHAPES
    defaults = {
        "dtype": (torch.bfloat16, torch.float32),
        "threads": (1,) if on_cuda else (1, 2),
        "shapes": CUDA_SHAPES if on_cuda else cpu_shapes,
        "direction": DIRECTIONS,
        "approximate": FORMS,
        "peers": tuple(PACKAGES) if on_cuda else (),
        "out": RESULTS / f"{args.device}_{op}.json",
    }
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def parse_ways(
    op: str, argv: Sequence[str] | None = None, devices: Sequence[str] = ()
) -> argparse.Namespace:
    """The options of a benchmark whose cases are fixed. With `devices`, of which the CPU is one, it
    has cases to choose from as well, and a limit.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{op}")
    add = parser.add_argument
    add("--quick", action="store_true", help="smallest cases, few rounds: a check, not a result")
    add("--seed", type=int, default=0, help="of the order of the ways; default: 0")
    add("--out", type=Path, help=f"JSON file; default: benchmarks/results/DEVICE_{op}.json")
    if devices:
        add("--device", default="cpu", choices=devices, help="default: cpu")
        add("--minutes", type=float, default=float("inf"), help="start no case after this time")
        add("--filter", metavar="TEXT", default="", help="only cases whose name contains TEXT")
    args = parser.parse_args(argv)
    args.out = args.out or RESULTS / f"{args.device if devices else 'cpu'}_{op}.json"
    return args


def in_time(op: str, args: argparse.Namespace, cases: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    """The cases that parse_ways's options ask for, until the time is over."""
    deadline = time.monotonic() + 60 * args.minutes
    for name, case in cases.items():
        if args.filter not in name:
            continue
        if time.monotonic() > deadline:
            print(f"{op}: out of time before {name}", flush=True)
            return
        yield name, case


def _list(convert: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse_list(text: str) -> tuple[Any, ...]:
        try:
            return tuple(convert(item) for item in text.split(",") if item)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"cannot read {text!r}: {error}") from error

    return parse_list


def _one_of(names: Mapping[str, Any] | Sequence[str]) -> Callable[[str], Any]:
    values = names if isinstance(names, Mapping) else {name: name for name in names}

    def convert(text: str) -> Any:
        if text not in values:
            raise ValueError(f"{text!r} is none of {', '.join(values)}")
        return values[text]

    return convert


def _shape(text: str) -> tuple[int, int]:
    rows, cols = text.split("x")
    return int(rows), int(cols)
