"""The inputs that kernels trip over: odd sizes, extreme statistics, every kind of stride.

Values are drawn in float64 from a fixed seed and then rounded to the dtype under test, so that the
float64 oracle sees exactly what the kernel saw, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# A single element, less than any vector, one off a power of two on both sides, no power of two, odd
# and long.
COLS = (1, 3, 127, 129, 769, 1000, 4099)

# None, one, and enough to need several parts in the sum of the weight gradients.
ROWS = (0, 1, 35)


class Dtypes(NamedTuple):
    """Element type of the tensors and of weight and bias."""

    tensor: torch.dtype
    parameter: torch.dtype

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in self]
        return names[0] if names[0] == names[1] else f"{names[0]}+{names[1]}"


FLOAT32 = Dtypes(torch.float32, torch.float32)
FLOAT64 = Dtypes(torch.float64, torch.float64)
BFLOAT16 = Dtypes(torch.bfloat16, torch.bfloat16)
DTYPES = (
    FLOAT32,
    BFLOAT16,
    Dtypes(torch.float16, torch.float16),
    Dtypes(torch.bfloat16, torch.float32),
    Dtypes(torch.float16, torch.float32),
    FLOAT64,
)


def random_normal(*size: int, seed: int = 0) -> Tensor:
    """Standard normal float64 numbers on the CPU, the same for the same size and seed."""
    return _drawn(size, seed).clone()


@lru_cache(maxsize=64)  # to draw them takes fifty times as long as to copy them
def _drawn(size: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def _outlier(rows: int, cols: int) -> Tensor:
    x = torch.zeros(rows, cols, dtype=torch.float64)
    x[:, cols // 2] = 1e3
    return x


# Each gives a [rows, cols] float64 matrix.
STATISTICS: dict[str, Callable[[int, int], Tensor]] = {
    "mean 100 std 1": lambda rows, cols: random_normal(rows, cols) + 1e2,
    "mean 1e4 std 1": lambda rows, cols: random_normal(rows, cols) + 1e4,
    "std 1e-6": lambda rows, cols: random_normal(rows, cols) * 1e-6,
    "std 1e3": lambda rows, cols: random_normal(rows, cols) * 1e3,
    "constant rows": lambda rows, cols: random_normal(rows, 1).mul(100).repeat(1, cols),
    "zeros": lambda rows, cols: torch.zeros(rows, cols, dtype=torch.float64),
    "one outlier": _outlier,
}


def awkward_gamma(cols: int) -> Tensor:
    """Zeros, numbers so small that dividing by them would overflow, and negative ones."""
    return torch.tensor([0.0, 1e-8, -1.0], dtype=torch.float64).repeat(cols // 3 + 1)[:cols]


def _in_wider_rows(t: Tensor) -> Tensor:
    buffer = t.new_full((*t.shape[:-1], t.shape[-1] + 5), float("nan"))
    buffer[..., 2:-3] = t
    return buffer[..., 2:-3]


def _in_every_other_row(t: Tensor) -> Tensor:
    buffer = t.new_full((2 * t.shape[0], *t.shape[1:]), float("nan"))
    buffer[::2] = t
    return buffer[::2]


def _in_every_other_column(t: Tensor) -> Tensor:
    buffer = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))
    buffer[..., ::2] = t
    return buffer[..., ::2]


def misaligned(t: Tensor, elements: int = 1) -> Tensor:
    """A contiguous copy that begins `elements` elements into its storage."""
    buffer = t.new_full((t.numel() + elements,), float("nan"))
    view = buffer[elements:].view(t.shape)
    return view.copy_(t)


# Each gives a tensor of the same values as its argument, laid out otherwise. Memory between the
# elements is NaN.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "wider rows": _in_wider_rows,
    "every other row": _in_every_other_row,
    "every other column": _in_every_other_column,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "transposed and sliced": lambda t: _in_every_other_row(t.transpose(0, -1)).transpose(0, -1),
    "misaligned": misaligned,
}


def lazily_negated(t: Tensor) -> Tensor:
    """The float32 tensor `t` as a view that PyTorch negates when it is read (its negative bit is
    set).
    """
    pairs = torch.stack((torch.zeros_like(t), -t), dim=-1)
    return torch.view_as_complex(pairs).conj().imag


def channels_last(t: Tensor) -> Tensor:
    """A copy of an image, or of a volume, with its channels side by side; others as they are."""
    if t.dim() == 4:
        return t.contiguous(memory_format=torch.channels_last)
    return t.contiguous(memory_format=torch.channels_last_3d) if t.dim() == 5 else t
