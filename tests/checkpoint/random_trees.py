"""Random trees of modules: nested, shared, recurrent, with several outputs, with parts that run
without gradients. Each takes and returns tensors of one shape.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor, nn

WIDTH = 8


class Wide(nn.Module):
    """Keeps more than it returns."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Norm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)


class InTurn(nn.Module):
    """One after another, with a sum around each."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


class Beside(InTurn):
    """All get the same; the sum is taken."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x).sigmoid() for part in self.parts]).sum(0)


class Repeated(nn.Module):
    """One module several times."""

    def __init__(self, part: nn.Module, times: int) -> None:
        super().__init__()
        self.part, self.times = part, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.sin(x) + self.part(x)
        return x


class TwoOutputs(nn.Module):
    """Returns a dict and takes keyword arguments inside."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.inner = _Inner(part)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x=x, scale={"by": x.cos()})
        return found["one"] * found["other"][0]


class _Inner(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, scale: dict[str, Tensor]) -> dict[str, Any]:
        return {"one": self.part(x) * scale["by"], "other": (x.exp().clamp(max=3),)}


class Target(nn.Module):
    """A part without gradients beside one with them."""

    def __init__(self, frozen: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.frozen, self.part = frozen, part

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.frozen(x)
        return self.part(x) - target


class View(nn.Module):
    """Returns a view of its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, WIDTH).view(x.shape)


class Shared(nn.Module):
    """Two modules call the same one."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.one, self.other = InTurn([part]), InTurn([Norm(), part])

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.other(x)


LEAVES = st.one_of(
    st.integers(1, 4).map(lambda n: ("wide", n)), st.sampled_from([("norm",), ("view",)])
)


def _grown(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(children, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.tuples(st.just("in turn"), several),
        st.tuples(st.just("beside"), several),
        st.tuples(st.just("repeated"), children, st.integers(1, 3)),
        st.tuples(st.just("two outputs"), children),
        st.tuples(st.just("target"), children, children),
        st.tuples(st.just("shared"), children),
    )


TREES = st.recursive(LEAVES, _grown, max_leaves=6)


def made(spec: Any) -> nn.Module:
    """A module from what TREES draws."""
    kind, *rest = spec
    if kind == "wide":
        return Wide(rest[0])
    if kind in ("norm", "view"):
        return Norm() if kind == "norm" else View()
    if kind in ("in turn", "beside"):
        return (InTurn if kind == "in turn" else Beside)([made(each) for each in rest[0]])
    if kind == "repeated":
        return Repeated(made(rest[0]), rest[1])
    if kind == "target":
        return Target(made(rest[0]), made(rest[1]))
    return (TwoOutputs if kind == "two outputs" else Shared)(made(rest[0]))
