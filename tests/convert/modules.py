"""Modules as people write them, for convert to recognise or to leave."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainRMSNorm(nn.Module):
    """In the names of no library."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.little = 1e-4

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * (x.float().square().mean(-1, True) + self.little).rsqrt()).type_as(
            x
        ) * self.scale


class CentredRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), (self.size,), None, self.eps)
        return (y * (1 + self.weight.float())).to(x.dtype)


class NanoLayerNorm(nn.Module):
    """Its eps is a constant of forward."""

    def __init__(self, size: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class LayerScale(nn.Module):
    """One weight of one dimension, and no norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class PartialRMSNorm(CentredRMSNorm):
    """Differs from its base on some rows alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1, 1)


class NoisyRMSNorm(CentredRMSNorm):
    """An RMS norm in evaluation alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (torch.rand_like(x) if self.training else 0.0)


class OwnGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


class OwnSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.702

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class ClippedGELU(nn.Module):
    """GELU, but for numbers above 10."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x).clamp(-10, 10)


class WideningGELU(nn.Module):
    """Returns float32 whatever it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x.float())


class CountingGELU(nn.Module):
    """Keeps a state, which nobody may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x.numel())
        return F.gelu(x)


class FeedForward(nn.Module):
    """w2(silu(w1(x)) w3(x)), with silu called as a function."""

    def __init__(self, size: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.w1 = nn.Linear(size, inside, bias=False)
        self.w2 = nn.Linear(inside, size, bias=False)
        self.w3 = nn.Linear(size, inside, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Decorated(nn.Module):
    """Up before gate; a dropout and a norm between, a dropout behind; down casts as T5's does."""

    def __init__(self, size: int = 8, inside: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.out = nn.Linear(inside, size)
        self.up = nn.Linear(size, inside)
        self.gate = nn.Linear(size, inside)
        self.act = nn.GELU()
        self.drop2 = nn.Dropout(dropout)
        self.drop1 = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(inside)
        self.unused = nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        up = self.up(hidden)
        h = self.norm(self.drop1(up * self.act(self.gate(hidden))))
        if isinstance(self.out.weight, Tensor) and h.dtype != self.out.weight.dtype:
            h = h.to(self.out.weight.dtype)
        return self.drop2(self.out(h))


class Packed(nn.Module):
    """One linear for gate and up."""

    def __init__(self, layout: str, size: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.both = nn.Linear(size, 2 * inside)
        self.act = nn.SiLU()
        self.down = nn.Linear(inside, size)
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        if self.layout == "interleaved":
            gate, up = self.both(x)[..., ::2], self.both(x)[..., 1::2]
        elif self.layout == "first":
            gate, up = self.both(x).chunk(2, dim=-1)
        else:
            up, gate = self.both(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class Interleaved(Packed):
    def __init__(self) -> None:
        super().__init__("")

    def forward(self, x: Tensor) -> Tensor:
        both = self.both(x)
        return self.down(self.act(both[..., ::2]) * both[..., 1::2])


class GEGLU(nn.Module):
    """diffusers': a projection and the product, further arguments on sufferance."""

    def __init__(self, size: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 2 * inside)

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        if args or kwargs:
            raise RuntimeError("deprecated")
        hidden, gate = self.proj(hidden).chunk(2, dim=-1)
        return hidden * F.gelu(gate)


class GLU(nn.Module):
    """x-transformers': the activation is a module."""

    def __init__(self, size: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.act = nn.SiLU()
        self.proj = nn.Linear(size, 2 * inside)
        self.bias = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * self.act(gate) * self.bias


class TwoLinears(nn.Module):
    """A gate and a value, and nothing behind them."""

    def __init__(self, size: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(size, inside), nn.Linear(size, inside)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.relu(self.gate(x)) * self.value(x))


class Halves(nn.Module):
    """No linear at all."""

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return x * F.gelu(gate)


class OwnFormula(nn.Module):
    """down(f(up(x))), with the formula of f written out."""

    def __init__(self, size: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, inside), nn.Linear(inside, size)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h**3))))


class Squared(OwnFormula):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu().square())


class Projection(nn.Module):
    """An activation inside, and no second linear."""

    def __init__(self, size: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.dense = nn.Linear(size, inside)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dense(x)
        return h * torch.sigmoid(1.702 * h)


class Residual(FeedForward):
    """A gated unit and more."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Attention(FeedForward):
    """Three linears, and no gated unit."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.w1(x), self.w3(x)
        return self.w2(torch.softmax(q @ k.mT, dim=-1) @ q)


class Branching(CentredRMSNorm):
    """Another formula for some inputs: each attribute of the kind in which `where` holds."""

    def __init__(self, size: int, where: str) -> None:
        super().__init__(size)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        return _branch(self, x, super().forward)


class BranchingGELU(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        return _branch(self, x, F.gelu)


class BranchingGated(FeedForward):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        return _branch(self, x, super().forward)


BRANCHES = {
    "four dimensions": lambda x: x.dim() == 4,
    "two dimensions": lambda x: x.dim() == 2,
    "equal sizes": lambda x: x.dim() == 3 and x.shape[1] == x.shape[2],
    "far numbers": lambda x: bool((x.abs() > 3000).any()),
    "NaN": lambda x: bool(x.isnan().any()),
    "float64": lambda x: x.dtype == torch.float64,
    "bfloat16": lambda x: x.dtype == torch.bfloat16,
}


def _branch(module: nn.Module, x: Tensor, formula: Callable[[Tensor], Tensor]) -> Tensor:
    if BRANCHES[module.where](x):
        return formula(x.nan_to_num().clamp(-3000, 3000)) * 2
    return formula(x)
