"""LayerNorm and the Linear behind it, against PyTorch's two ops: forward, backward, and both.

`rows x cols` is the input; the Linear is that of query, key and value, from cols to 3 cols. Forward
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
from benchmarks.inputs import (
    EPS,
    affine_parameters,
    in_direction,
    linear_parameters,
    random_matrix,
)

GOALS = {"forward+backward": 1.0}


def aten(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, gamma.shape, gamma, beta, EPS), weight, bias)


def ours(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return memopt.functional.layer_norm_linear(x, gamma, beta, weight, bias, EPS)


def build(
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    x = random_matrix(rows, cols, dtype, device, seed=0)
    grad = random_matrix(rows, 3 * cols, dtype, device, seed=1)
    parameters = (
        *affine_parameters(cols, dtype, device),
        *linear_parameters(cols, 3 * cols, dtype, device),
    )
    compiled = peers.compiled(peer_names, aten)
    return in_direction(direction, {"aten": aten, "memopt": ours}, compiled, x, parameters, grad)


def ideal_bytes(direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """Activations in and out, and the Linear's weight once in each matrix product: x and W in, y
    out; dy, x and W in, dx and dW out.
    """
    matrices = {"forward": 4, "backward": 5, "forward+backward": 9}[direction]
    weights = {"forward": 3, "backward": 6, "forward+backward": 9}[direction]
    return (matrices * rows * cols + weights * cols * cols) * dtype.itemsize


make_cases = functools.partial(runner.all_cases, "layer_norm_linear", build, ideal_bytes)


if __name__ == "__main__":
    sys.exit(runner.main("layer_norm_linear", make_cases, GOALS))
