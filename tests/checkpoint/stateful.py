"""Blocks that hold a state besides parameters, each by its name."""

from __future__ import annotations

import itertools
import random
import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

# What moves in forward, and would move once more in a second run.
MOVES = {
    "spectral norm": "a.weight_u",
    "spectral norm by parametrization": "a.parametrizations.weight.0._u",
    "counter": "count",
    "average in place": "average",
    "average assigned anew": "mean",
    "list": "log",
    "deep": "table",
    "generator": "generator",
    "Python's generator": "chance",
    "NumPy's generator": "numbers",
    "Python's random": "the state of Python's random",
    "NumPy's random": "the state of numpy.random",
    "iterator": "turns",
    "parameter": "b.weight",
    "frozen codebook": "codes",
    "features of the last call": "features",
}
# What regions deal with, or what is the same however often it is set.
STAYS = (
    "nothing",
    "batch norm",
    "dropout",
    "weight norm",
    "weight norm by parametrization",
    "last output",
    "table made once",
    "spectral norm in evaluation",
)


class Stateful(nn.Module):
    def __init__(self, kind: str, features: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(features, features), nn.Linear(features, features)
        self.norm = {"batch norm": nn.BatchNorm1d(features), "dropout": nn.Dropout(0.5)}.get(
            kind, nn.Identity()
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the older ones have successors
            if kind in ("spectral norm", "spectral norm in evaluation"):
                spectral_norm(self.a)
            if kind == "weight norm":
                weight_norm(self.a)
        if kind == "spectral norm in evaluation":
            self.a.eval()
        if kind == "spectral norm by parametrization":
            parametrizations.spectral_norm(self.a)
        if kind == "weight norm by parametrization":
            parametrizations.weight_norm(self.a)
        self.count, self.log, self.table = 0, [0], {"seen": [0, {"deep": 1}]}
        self.register_buffer("average", torch.zeros(features))
        self.mean = torch.zeros(features)
        self.codes = nn.Parameter(torch.zeros(features), requires_grad=False)
        self.generator, self.chance = torch.Generator().manual_seed(0), random.Random(0)
        self.numbers, self.turns = np.random.default_rng(0), itertools.count()
        self.features: Tensor | None = None
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self._moved(x)
        return x + self.b(self.norm(self.a(x).tanh()))

    def _moved(self, x: Tensor) -> Tensor:
        center = x.detach().mean(0)
        if self.kind == "counter":
            self.count += 1
        elif self.kind == "average in place":
            self.average.lerp_(center, 0.1)
        elif self.kind == "average assigned anew":
            self.mean = self.mean.lerp(center, 0.1)
        elif self.kind == "list":
            self.log.append(len(x))
        elif self.kind == "deep":
            deep = self.table["seen"][1]
            assert isinstance(deep, dict)
            deep["deep"] += 1
        elif self.kind == "generator":
            return x + torch.randn(x.shape, generator=self.generator)
        elif self.kind == "Python's generator":
            return x * self.chance.random()
        elif self.kind == "NumPy's generator":
            return x * self.numbers.random()
        elif self.kind == "Python's random":
            return x * random.random()
        elif self.kind == "NumPy's random":
            return x * np.random.rand()
        elif self.kind == "iterator":
            return x * (1 + next(self.turns))
        elif self.kind == "parameter":
            with torch.no_grad():
                self.b.weight.mul_(0.99)
        elif self.kind == "frozen codebook":
            self.codes.lerp_(center, 0.1)
        elif self.kind == "features of the last call":
            before, self.features = self.features, x.detach()
            return x if before is None else x + before
        elif self.kind == "last output":
            self.last = x.detach()
        elif self.kind == "table made once":
            if self.last is None:
                self.last = torch.arange(8.0)
            return x + self.last
        return x


class Row(nn.Module):
    """Plain blocks around one that holds a state."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stateful(kind) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
