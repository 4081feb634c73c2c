"""Proves: steps of models that hold sparse tensors are measured where nothing can be predicted of
their operators, and planned; what has to predict says whose layout it is.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memopt


class Graph(nn.Module):
    """Layers over a graph, whose edges are a sparse tensor in an attribute."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.edges = edges
        layers = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.edges @ layer(x)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_steps_over_a_sparse_attribute_are_measured(layout: torch.layout) -> None:
    """Of whose operators nothing is known without values: where a step may run, it runs."""
    model, x = Graph(torch.eye(6).to_sparse(layout=layout)), torch.randn(6, 8)
    assert memopt.anatomy(model, x).peak == memopt.anatomy(model, x, measure=True).peak
    plan = memopt.plan(model, x, "1GiB").apply()
    assert plan.measured_peak == plan.peak
    plan.undo()
    names = memopt.apply_activation_checkpointing(model, batch=x)
    assert names == ["layers.0", "layers.1", "layers.2"]
    with pytest.raises(RuntimeError, match=rf"^largest_batch: a prediction .* is {layout}"):
        memopt.largest_batch(model, x, "1GiB")
