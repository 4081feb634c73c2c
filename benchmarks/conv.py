"""Convolutional networks as they are, after `memopt.convert(model)`, with torch.utils.checkpoint
around each block, and with both: bytes held, peak, and time of a step.

Models of transformers with batch norms (ResNet-50, RegNetY-4GF, EfficientNet-B0, MobileNetV2) and
layer norms (ConvNeXt-T), and a U-Net with group norms (convert_models/conv.py); random weights,
training mode, float32; a step is forward, loss and backward. On the CPU a batch is two images, half
as wide as usual, on one thread; ResNet-50 in both orders in memory.

Bytes are the allocator's: what is held when forward ends, and the most at any time, beyond weights.
Times are taken in turns as in harness.py; `over_eager` is of the same round. PyTorch's checkpoint
moves the statistics of batch norms twice.

`python -m benchmarks.conv [--device cuda] [--quick] [--filter NAME] [--out FILE.json]` writes the
JSON and prints the table.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

import memopt
from benchmarks import record
from benchmarks.cli import has_device, in_time, parse_ways
from benchmarks.clocks import StepClock, keep_freed_memory
from benchmarks.convert_models.conv import UNet
from benchmarks.harness import Effort, compared, effort_of
from benchmarks.memory import step_bytes
from benchmarks.model_ways import EAGER, torch_checkpoint
from benchmarks.summary import describe, quartiles, table

OP = "conv"
FULL = Effort(rounds=11, min_rounds=5, case_seconds=12.0, sample_seconds=0.05)
THREADS = 1
CUDA_EFFORT = Effort(rounds=15, min_rounds=5, case_seconds=8.0, sample_seconds=0.15)
CLASSES = 1000
LAYOUTS = {"": torch.contiguous_format, ", channels last": torch.channels_last}


class Net(NamedTuple):
    """A model, and the class of its blocks."""

    make: Callable[[], nn.Module]
    block: str
    channels: int = 3
    edge: int = 224
    orders: tuple[str, ...] = ("",)


class Loss(nn.Module):
    """The loss of the logits or of the image that a model returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        output = self.model(x)
        output = output if isinstance(output, Tensor) else output.logits
        loss: Tensor = output.float().square().mean()
        return loss


def of_transformers(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, num_labels=CLASSES, **settings)
        made: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
        return made

    return make


NETS = {
    "ResNet-50": Net(of_transformers("resnet"), "ResNetBottleNeckLayer", orders=tuple(LAYOUTS)),
    "RegNet": Net(of_transformers("regnet"), "RegNetYLayer"),
    "EfficientNet-B0": Net(
        of_transformers(
            "efficientnet", width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280
        ),
        "EfficientNetBlock",
    ),
    "MobileNetV2": Net(of_transformers("mobilenet_v2"), "MobileNetV2InvertedResidual"),
    "ConvNeXt-T": Net(of_transformers("convnext"), "ConvNextLayer"),
    "U-Net": Net(lambda: UNet(64), "ResidualBlock", channels=64, edge=128),
}


def as_it_is(model: nn.Module, block: str) -> None:
    """Eager."""


def each_block(model: nn.Module, block: str) -> None:
    found = [module for module in model.modules() if type(module).__name__ == block]
    for module in found:
        torch_checkpoint(module)


def convert(model: nn.Module, block: str) -> None:
    memopt.convert(model)


def convert_and_regions(model: nn.Module, block: str) -> None:
    memopt.convert(model, checkpoint=lambda module: type(module).__name__ == block)


WAYS: dict[str, Callable[[nn.Module, str], None]] = {
    EAGER: as_it_is,
    "memopt.convert": convert,
    "torch.utils.checkpoint": each_block,
    "convert and regions": convert_and_regions,
}


class Measured(NamedTuple):
    run: Callable[[], None]
    held: int
    peak: int


def measured(net: Net, way: str, x: Tensor) -> Measured:
    """A step in that way on `x`, and its bytes."""
    torch.manual_seed(0)
    layout = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else None
    model = Loss(net.make()).train().to(x.device)
    if layout is not None:
        model = model.to(memory_format=layout)
    WAYS[way](model, net.block)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward()

    run()
    model.zero_grad(set_to_none=True)
    held, peak = step_bytes(lambda: model(x), x.device)
    run()
    return Measured(run, held, peak)


def case_of(
    net: Net,
    images: int,
    edge: int,
    layout: torch.memory_format,
    device: torch.device,
    effort: Effort,
) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    x = torch.randn(images, net.channels, edge, edge, device=device)
    x = x.contiguous(memory_format=layout)
    ways = {name: measured(net, name, x) for name in WAYS}
    about = {name: {"held_bytes": way.held, "peak_bytes": way.peak} for name, way in ways.items()}
    runs = {name: way.run for name, way in ways.items()}
    found = compared(runs, StepClock(device), effort, EAGER, "over_eager", about)
    return {**found, "images": images, "edge": edge}


def tables(cases: Mapping[str, Any]) -> str:
    """Shares of eager's bytes and of its time, a row for each model."""
    ways = [name for name in WAYS if name != EAGER]
    head = ["model", "eager: held", "peak"]
    head += [f"{way}: held, peak, time" for way in ways]
    rows = []
    for name, case in cases.items():
        found = case["variants"]
        eager = found[EAGER]
        row = [name, *(f"{eager[key] / 1e6:.1f} MB" for key in ("held_bytes", "peak_bytes"))]
        for way in ways:
            shares = [found[way][key] / eager[key] for key in ("held_bytes", "peak_bytes")]
            time = found[way]["over_eager"]
            row.append(f"{shares[0]:.2f}x, {shares[1]:.2f}x, {quartiles(time)}")
        rows.append(row)
    return table(head, rows)


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    return "\n\n".join(["# Convolutional networks", describe(dict(run)), tables(run["cases"])])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv, devices=("cpu", "cuda"))
    if not has_device(OP, args.device):
        return 2
    device = torch.device(args.device)
    torch.set_num_threads(THREADS)
    on_cuda = device.type == "cuda"
    effort = effort_of(args, FULL, CUDA_EFFORT)
    images, shrink = (64, 1) if on_cuda else (2, 4) if args.quick else (2, 2)
    keeps_memory = not on_cuda and keep_freed_memory()  # as a GPU's allocator does
    settings = {
        **dataclasses.asdict(effort),
        "images": images,
        "threads": THREADS,
        "keeps_freed_memory": keeps_memory,
    }
    results = record.begin(args.out, OP, {}, settings, argv, device)
    if find_spec("transformers") is None:
        print(f"{OP}: transformers is not installed", file=sys.stderr)
        return 2
    cases = {
        f"{name}{order}": (net, layout)
        for name, net in NETS.items()
        for order, layout in LAYOUTS.items()
        if order in net.orders
    }
    for case, (net, layout) in in_time(OP, args, cases):
        edge = net.edge // shrink
        results.add(case, case_of(net, images, edge, layout, device, effort))
        print(f"{tables({case: results.cases[case]})}\n", flush=True)
    print(f"\n{report(results.run)}\n\n{args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
