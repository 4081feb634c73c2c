"""A language model's head, whose logits are its largest tensor: norm, linear and cross entropy.

Ways: **eager**; **memopt.convert**, whose logits are lazy; the head as a **region**, so
that nothing of it is held while the rest of the model runs; the same in **chunks** of rows, each a
region of its own, so that only a chunk's logits are there at any time, for one more product; and
those that are called in place of it and never have all logits: memopt's and PyTorch's chunked
`linear_cross_entropy`, Liger's algorithm by PyTorch's ops, and on a GPU Liger-Kernel's, where they
are installed. `torch.compile` and `memopt.compile` of the eager one.

Bytes are the allocator's beyond weights, input and target: what is held when forward ends, and the
most at any time, with what operators allocate inside themselves and the gradients of weights and
input included. `error` is of the input's gradient,
against float64: the root of the mean square, over that of the gradient itself. Times are taken in
turns as in harness.py; `over_eager` is of the same round.

`python -m benchmarks.head [--device cuda] [--quick] [--seed N] [--minutes N] [--out FILE.json]`
writes the JSON and prints the table.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from benchmarks import record
from benchmarks.cli import has_device, in_time, parse_ways
from benchmarks.clocks import StepClock, keep_freed_memory
from benchmarks.harness import Effort, compared, effort_of
from benchmarks.memory import step_bytes
from benchmarks.summary import describe, quartiles, table

OP = "head"
FULL = Effort(rounds=15, min_rounds=5, case_seconds=10.0, sample_seconds=0.05)
CUDA_EFFORT = Effort(rounds=15, min_rounds=5, case_seconds=8.0, sample_seconds=0.1)
EAGER = "eager"
CHUNKS = 8


class Size(NamedTuple):
    """The sizes of a head, and how many tokens have a loss."""

    tokens: int
    width: int
    words: int
    dtype: torch.dtype | None = None  # None: float32 on a CPU, bfloat16 on a GPU

    @property
    def name(self) -> str:
        dtype = "" if self.dtype is None else f", {str(self.dtype).removeprefix('torch.')}"
        return f"{self.tokens} tokens, width {self.width}, {self.words} words{dtype}"


# Fewer tokens where there are more words: eager's float32 logits of 256,000 words take 1 MB each.
SIZES = (
    Size(2048, 256, 4096),
    Size(2048, 256, 4096, torch.bfloat16),
    Size(1024, 256, 50257),
    Size(1024, 256, 50257, torch.bfloat16),
    Size(256, 256, 256000),
    Size(256, 256, 256000, torch.bfloat16),
)
CUDA_SIZES = (Size(8192, 2048, 32768), Size(8192, 4096, 128256))
SMALLEST = (Size(16, 8, 32),)


class Head(nn.Module):
    """The loss of a language model's last hidden states."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(self.project(self.norm(x)), target, reduction=reduction)


Loss = Callable[[Tensor, Tensor], Tensor]


def converted(head: Head) -> Loss:
    """It has no embedding: a sample with more rows than features shows that its logits reach a
    loss.
    """
    weight = head.project.weight
    x = weight.detach().new_ones((2 * weight.shape[1], weight.shape[1]))
    target = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    found = memopt.convert(head, (x, target)).heads
    assert [each.path for each in found] == ["project"]
    return head


def region(head: Head) -> Loss:
    return lambda x, target: memopt.checkpoint(head, x, target)


def regions_of_chunks(head: Head) -> Loss:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        pairs = zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
        sums = [memopt.checkpoint(head, rows, words, "sum") for rows, words in pairs]
        return torch.stack(sums).sum() / len(target)

    return loss


def chunked_by_pytorch(head: Head) -> Loss:
    options = nn.LinearCrossEntropyOptions()
    return lambda x, target: F.linear_cross_entropy(
        head.norm(x), head.project.weight, target, options=options
    )


def chunked(head: Head) -> Loss:
    return lambda x, target: memopt.functional.linear_cross_entropy(
        head.norm(x), head.project.weight, target
    )


class LigersAlgorithm(torch.autograd.Function):
    """Liger-Kernel's fused linear cross entropy (ops/fused_linear_cross_entropy.py): chunks whose
    logits take about as much as the input, gradients in forward, summed in the weight's dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        rows, width = x.shape
        parts = -(-len(weight) // width)
        chunk = 1 << (-(-rows // parts) - 1).bit_length()
        dx, dweight, loss = torch.empty_like(x), torch.zeros_like(weight), x.new_zeros(())
        for begin in range(0, rows, chunk):
            some, wanted = x[begin : begin + chunk], target[begin : begin + chunk, None]
            log_p = (some @ weight.t()).float().log_softmax(1)
            loss = loss - log_p.gather(1, wanted).sum() / rows
            gradient = log_p.exp_().scatter_add_(1, wanted, -torch.ones_like(log_p[:, :1]))
            gradient = gradient.div_(rows).to(x.dtype)
            dx[begin : begin + chunk] = gradient @ weight
            dweight += gradient.t() @ some
        ctx.save_for_backward(dx, dweight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dweight = ctx.saved_tensors
        return grads[0] * dx, grads[0] * dweight, None


def chunked_as_liger(head: Head) -> Loss:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        made: Tensor = LigersAlgorithm.apply(head.norm(x), head.project.weight, target)
        return made

    return loss


def chunked_by_liger(head: Head) -> Loss:
    liger = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda x, target: liger(head.project.weight, head.norm(x), target)  # type: ignore[no-any-return]


def ways_on(device: torch.device, compiles: bool) -> dict[str, Callable[[Head], Loss]]:
    """Functions that change a head, by name; packages that are not installed have none."""
    ways: dict[str, Callable[[Head], Loss]] = {
        EAGER: lambda head: head,
        "memopt.convert": converted,
        "memopt.checkpoint": region,
        f"memopt.checkpoint, {CHUNKS} chunks": regions_of_chunks,
        "memopt, chunked": chunked,
        "Liger's algorithm": chunked_as_liger,
    }
    if hasattr(nn, "LinearCrossEntropyOptions"):
        ways["PyTorch, chunked"] = chunked_by_pytorch
    if device.type == "cuda" and find_spec("liger_kernel") is not None:
        ways["Liger-Kernel"] = chunked_by_liger
    if compiles:
        ways["torch.compile"] = lambda head: torch.compile(head)
        ways["memopt.compile"] = lambda head: memopt.compile(head)
    return ways


@dataclasses.dataclass(frozen=True)
class Way:
    run: Callable[[], None]
    held: int
    peak: int
    error: float


def made(
    change: Callable[[Head], Loss], head: Head, x: Tensor, target: Tensor, exact: Tensor
) -> Way:
    """One way, on a copy of a head. `exact`: its input's gradient in float64."""
    torch.compiler.reset()
    head = copy.deepcopy(head)
    loss, x = change(head), x.clone().requires_grad_()

    def clear() -> None:
        head.zero_grad(set_to_none=True)
        x.grad = None

    def run() -> None:
        clear()
        loss(x, target).backward()

    run()
    assert x.grad is not None
    difference = x.grad.double() - exact
    error = float(difference.square().mean().sqrt() / exact.square().mean().sqrt())
    clear()
    held, peak = step_bytes(lambda: loss(x, target), x.device, scratch=True)
    return Way(run, held, peak, error)


def exact_gradient(head: Head, x: Tensor, target: Tensor) -> Tensor:
    """The gradient of the input, in float64."""
    x = x.detach().double().requires_grad_()
    return torch.autograd.grad(copy.deepcopy(head).double()(x, target), x)[0]


def case_of(size: Size, device: torch.device, compiles: bool, effort: Effort) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    torch.manual_seed(0)
    dtype = size.dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    head = Head(size.width, size.words).to(device, dtype)
    x = torch.randn(size.tokens, size.width, device=device, dtype=dtype)
    target = torch.randint(size.words, (size.tokens,), device=device)
    exact = exact_gradient(head, x, target)
    ways = {
        name: made(change, head, x, target, exact)
        for name, change in ways_on(device, compiles).items()
    }
    runs = {name: way.run for name, way in ways.items()}
    about = {
        name: {
            "held_bytes": way.held,
            "peak_bytes": way.peak,
            "error": float(f"{way.error:.3g}"),
        }
        for name, way in ways.items()
    }
    return compared(runs, StepClock(device), effort, EAGER, "over_eager", about)


def tables(run: Mapping[str, Any]) -> str:
    """A table for each size."""
    parts = []
    for name, case in run["cases"].items():
        rows = []
        for way, found in case["variants"].items():
            over = found["over_eager"]
            rows.append(
                [
                    way,
                    *(f"{found[key] / 1e6:.1f} MB" for key in ("held_bytes", "peak_bytes")),
                    quartiles(over),
                    f"{found['error']:.1e}",
                ]
            )
        parts.append(table([name, "held", "peak", "time over eager", "error"], rows))
    return "\n\n".join(parts)


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    return "\n\n".join(["# The head", describe(dict(run)), tables(run)])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv, devices=("cpu", "cuda"))
    if not has_device(OP, args.device):
        return 2
    device = torch.device(args.device)
    effort = effort_of(args, FULL, CUDA_EFFORT)
    keeps_memory = device.type == "cpu" and keep_freed_memory()  # as a GPU's allocator does
    sizes = SMALLEST if args.quick else CUDA_SIZES if device.type == "cuda" else SIZES
    settings = {**dataclasses.asdict(effort), "chunks": CHUNKS, "keeps_freed_memory": keeps_memory}
    results = record.begin(args.out, OP, {}, settings, argv, device)
    for name, size in in_time(OP, args, {size.name: size for size in sizes}):
        results.add(name, case_of(size, device, not args.quick, effort))
        print(f"{name} done", flush=True)
    print(f"\n{report({**results.header, 'cases': results.cases})}\n\n{args.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
