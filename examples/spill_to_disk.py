"""Spilling to disk: what autograd saves waits in a file, on a machine without an accelerator too.

python examples/spill_to_disk.py [DIRECTORY]
"""

import sys
import tempfile

import torch
from step_cost import compared, step_cost
from torch import nn

import memopt


def main() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)]
    model, x = nn.Sequential(*layers), torch.randn(512, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as scratch:
        folder = sys.argv[1] if len(sys.argv) > 1 else scratch

        def spilled_step() -> None:
            with memopt.offload("disk", directory=folder):
                loss = model(x).square().mean()
            loss.backward()

        plain = step_cost(model, lambda: model(x).square().mean().backward())
        print(compared(plain, step_cost(model, spilled_step)))
        for step in range(5):
            with memopt.offload("disk", directory=folder):
                loss = model(x).square().mean()
            loss.backward()  # prefetches from the file what was saved last
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {loss.item():.4f}")
        print(memopt.offload.stats())


if __name__ == "__main__":
    main()
