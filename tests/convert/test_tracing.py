"""Proves: torch.jit.trace and torch.fx.symbolic_trace take converted models, hand-written norms and
gated units included, as they take the plain ones, and what they make computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt

WIDTH = 8


class HandWrittenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.variance_epsilon = 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden.to(dtype)


class GatedUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 16, bias=False)
        self.up_proj = nn.Linear(WIDTH, 16, bias=False)
        self.down_proj = nn.Linear(16, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PackedUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(self.norm(x)))


PARTS = [HandWrittenNorm, GatedUnit, PackedUnit, Functions, lambda: nn.LayerNorm(WIDTH)]

TRACERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "torch.jit": lambda model, x: torch.jit.trace(model, (x,)),
    "torch.fx": lambda model, x: torch.fx.symbolic_trace(model),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("options", [{}, {"recipes": False}, {"functional": False}], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_converted_models_are_traced(
    part: Callable[[], nn.Module], options: dict[str, bool], tracer: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(part(), nn.Identity())
    x = torch.randn(3, 5, WIDTH)
    expected = model(x)
    memopt.convert(model, **options)
    traced = TRACERS[tracer](model, x)
    torch.testing.assert_close(traced(x), expected)
    other = torch.randn(7, 5, WIDTH)  # its rows are no constants
    torch.testing.assert_close(traced(other), model(other))


class ChannelNorm(nn.LayerNorm):
    """As timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class LinearsAreLeaves(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, path: str) -> bool:
        return isinstance(m, nn.Linear)


@pytest.mark.parametrize("tracer", [torch.fx.Tracer, LinearsAreLeaves])
@pytest.mark.parametrize("part", [*PARTS, lambda: ChannelNorm(WIDTH)])
def test_fx_finds_the_nodes_of_the_plain_model_in_their_order(
    part: Callable[[], nn.Module], tracer: type[torch.fx.Tracer]
) -> None:
    """Extractors of features name them: a norm that asked for its parameters before it called the
    original's forward moved them, and a gated unit had no node for its activation."""

    def nodes(model: nn.Module) -> list[tuple[str, str]]:
        return [(node.op, str(node.target)) for node in tracer().trace(model).nodes]

    model = nn.Sequential(part(), nn.Identity())
    expected = nodes(model)
    memopt.convert(model)
    assert nodes(model) == expected


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm", "layer_norm_gelu"])
def test_a_norm_over_a_traced_size(norm: str) -> None:
    op = getattr(memopt.functional, norm)
    x = torch.randn(3, WIDTH)
    traced = torch.jit.trace(lambda x: op(x, x.shape[-1:]), (x,))
    other = torch.randn(5, WIDTH)
    assert torch.equal(traced(other), op(other, (WIDTH,)))
