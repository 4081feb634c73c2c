"""What the tests of calls in chunks of rows share: a module, its gradients, ways to call it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt._checkpoint import checkpoint

H, FEATURES = 8, 32


class GatedMLP(nn.Module):
    """A norm and the MLP of a Llama, which asks for the number of dims."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.gate, self.up = nn.Linear(H, FEATURES), nn.Linear(H, FEATURES, bias=False)
        self.down = nn.Linear(FEATURES, H)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        y = self.norm(x).view(batch * length, size)
        y = F.dropout(F.silu(self.gate(y)) * self.up(y), self.dropout, self.training)
        return x + self.down(y).view(x.shape)


def gradients(
    call: Callable[..., Any], module: nn.Module, x: Tensor, grad: Tensor
) -> list[Tensor | None]:
    """The output, and the gradients of the input and of the parameters."""
    x = x.detach().requires_grad_()
    y = call(module, x)
    y.backward(grad)
    results = [y.detach(), x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return results


def inputs(rows: tuple[int, int] = (2, 12), dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(*rows, H, dtype=dtype) for _ in range(2)]


def in_chunks(chunks: int, **options: Any) -> Callable[..., Any]:
    return functools.partial(checkpoint, chunks=chunks, **options)
