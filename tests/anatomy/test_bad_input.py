"""Proves that what cannot be traced says why, and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt import DependsOnValues
from tests.anatomy.models import Block, Mlp

X = torch.ones(4, 32)


class Asks(nn.Module):
    """Looks at a value, or makes a shape of one."""

    def __init__(self, shape: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.shape:
            return y[y > 0].sum()
        return y.sum() * (2 if float(y.detach().sum()) > 0 else 1)


class _Loop(nn.Module):
    """Calls its blocks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(32, 0.0) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _Again(nn.Module):
    """Calls one block again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Block(32, 0.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layer[0](x)
        return x


class _Sums(nn.Sequential):
    """Adds to each of its elements what came before it."""

    def forward(self, input: Tensor) -> Tensor:
        for layer in self:
            input = input + layer(input)
        return input.sum()


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "model must be an nn.Module, got str", {"model": "bert"}),
        (TypeError, "must return a loss .*got dict", {"loss": None, "model": nn.Identity()}),
        (ValueError, r"one number that requires a gradient, got shape \[4, 32\]", {"loss": None}),
        (TypeError, "optimizer must be", {"optimizer": "adamw"}),
        (TypeError, "must make a torch.optim.Optimizer, got list", {"optimizer": list}),
        (ValueError, "micro_batches must be an int of at least 1, got 0", {"micro_batches": 0}),
        (ValueError, "from 1 to the batch's 4 rows, got 5", {"micro_batches": 5}),
        (ValueError, 'device must be "cpu", "cuda" or None', {"device": "tpu"}),
        (ValueError, "measure must be True", {"measure": "no"}),
        (ValueError, "checkpoint must be", {"checkpoint": "some"}),
        (ValueError, "nn.Sequential, got Linear without one", {"checkpoint": "sqrt"}),
        (
            ValueError,
            r"got _Loop without one, whose 3 blocks are called one by one \(layers.0 first\): only "
            r'an nn.Sequential calls several as one; checkpoint="all" or a number k fits, and '
            "memopt.plan has one region for several blocks",
            {"checkpoint": "optimal", "model": _Loop()},
        ),
        (
            ValueError,
            r"got _Again without one, whose one block, layer.0, makes a region of each of its ",
            {"checkpoint": "sqrt", "model": _Again()},
        ),
        (
            ValueError,
            r"got _Sums without one, whose 3 blocks are called one by one \(0 first\)",
            {"checkpoint": "sqrt", "model": _Sums(*(Block(32, 0.0) for _ in range(3)))},
        ),
        (
            ValueError,
            "offload: 'disk' needs a directory",
            {"offload": "disk", "measure": True},
        ),
        (
            ValueError,
            "offload, of a step on the CPU, must be 'disk' or a path, got 'cpu'",
            {"offload": "cpu", "measure": True},
        ),
        (TypeError, "offload: must be 'cpu', 'disk' or a path, got bool", {"offload": True}),
        (
            ValueError,
            'measure with offload must have checkpoint=None, .*"sqrt", whose regions keep',
            {
                "offload": "disk",
                "measure": True,
                "checkpoint": "sqrt",
                "model": nn.Sequential(*(Block(32, 0.0) for _ in range(3))),
            },
        ),
        (ValueError, "a tensor with a first dimension, got none", {"inputs": {}}),
        (
            ValueError,
            "got none: SimpleNamespace is no container",
            {"inputs": SimpleNamespace(x=1)},
        ),
        (
            ValueError,
            "must be on the model's device, cpu, got .*'y'.* on meta",
            {"inputs": {"input": X, "y": torch.empty(1, device="meta")}},
        ),
    ],
)
def test_arguments(error: type[Exception], words: str, arguments: dict[str, Any]) -> None:
    model = arguments.pop("model", nn.Linear(32, 32))
    inputs = arguments.pop("inputs", {"y": X} if isinstance(model, nn.Identity) else X)
    if isinstance(model, nn.Identity):
        model = _Dict()
    options = {"loss": torch.sum, **arguments}
    with pytest.raises(error, match=words):
        memopt.anatomy(model, inputs, **options)


class _Dict(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 32)

    def forward(self, y: Tensor) -> Any:
        return {"logits": super().forward(y)}


@pytest.mark.parametrize("shape", [False, True])
def test_values_are_measured_or_an_error(shape: bool) -> None:
    model = Asks(shape)
    with pytest.raises(DependsOnValues, match="a prediction has no values"):
        memopt.anatomy(model, X, measure=False)
    report = memopt.anatomy(model, X)
    assert report.predicted is None
    assert report.measured is not None
    assert "not predicted, but measured" in report.notes[0]
    with pytest.raises(DependsOnValues):
        memopt.anatomy(model.to("meta"), X.to("meta"))


def test_a_model_on_meta_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="with values, got meta tensors"):
        memopt.anatomy(Mlp().to("meta"), X.to("meta"), measure=True)
