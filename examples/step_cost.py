"""The peak and the time of a step, before and after: what the other examples print.

python examples/step_cost.py
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import memopt
from memopt.memory.allocator import most_above


class Cost(NamedTuple):
    peak: int
    """Bytes of forward and backward beyond those before, by PyTorch's allocator."""
    seconds: float


def step_cost(model: nn.Module, step: Callable[[], object]) -> Cost:
    """The cost of `step`, which runs forward and backward: the quickest of several."""
    device = next(model.parameters()).device

    def run() -> None:
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    seconds = []
    for _ in range(6):  # the first one warms up
        model.zero_grad()
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    model.zero_grad()
    peak = most_above(device, run)
    model.zero_grad()
    return Cost(peak, min(seconds[1:]))


def compared(before: Cost, after: Cost) -> str:
    """Says both costs, with their ratios. Those of a small model are not those of a large one."""
    return (
        f"peak of a step: {before.peak / 1e6:.1f} MB before, {after.peak / 1e6:.1f} MB after "
        f"({after.peak / before.peak:.2f}x); time: {1e3 * before.seconds:.1f} ms before, "
        f"{1e3 * after.seconds:.1f} ms after ({after.seconds / before.seconds:.2f}x)"
    )


def main() -> None:
    layers = [m for _ in range(4) for m in (nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(512, 128)

    def step() -> None:
        model(x).square().mean().backward()

    before = step_cost(model, step)
    memopt.convert(model)
    print(compared(before, step_cost(model, step)))


if __name__ == "__main__":
    main()
