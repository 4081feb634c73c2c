"""GELU and the Linear behind it, against PyTorch's two ops: forward, backward, and both.

The input is `rows x 4 cols`; the Linear is the second one of an MLP, from 4 cols to cols. Forward
runs without gradients, backward is autograd's run of the graph: the matrix products, which are the
same for both variants, take most of the time.
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
from benchmarks import peers, runner
from benchmarks.harness import Variant
from benchmarks.inputs import in_direction, linear_parameters, random_matrix

GOALS = {"forward+backward": 1.0}


def build(
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    approximate: str,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    def aten(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.gelu(x, approximate=approximate), weight, bias)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return memopt.functional.gelu_linear(x, weight, bias, approximate)

    x = random_matrix(rows, 4 * cols, dtype, device, seed=0)
    grad = random_matrix(rows, cols, dtype, device, seed=1)
    parameters = linear_parameters(4 * cols, cols, dtype, device)
    compiled = peers.compiled(peer_names, aten)
    return in_direction(direction, {"aten": aten, "memopt": ours}, compiled, x, parameters, grad)


def ideal_bytes(direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """Activations in and out, and the Linear's weight once in each matrix product: x and W in, y
    out; dy, x and W in, dx and dW out.
    """
    matrices = {"forward": 5, "backward": 9, "forward+backward": 14}[direction]
    weights = {"forward": 4, "backward": 8, "forward+backward": 12}[direction]
    return (matrices * rows * cols + weights * cols * cols) * dtype.itemsize


make_cases = functools.partial(runner.all_cases, "gelu_linear", build, ideal_bytes)


if __name__ == "__main__":
    sys.exit(runner.main("gelu_linear", make_cases, GOALS))
