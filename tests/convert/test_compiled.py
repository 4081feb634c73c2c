"""Proves: for Inductor, which generates code, a converted model is the model that it was; other
backends of torch.compile, and export, get memopt's ops.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import memopt


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Swiglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def converted() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True)
    model = nn.Sequential(nn.LayerNorm(8), Swiglu(), nn.RMSNorm(8), nn.ReLU(), layer)
    memopt.convert(model)
    return model


def ops_of(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def traced(model: nn.Module, x: Tensor, name: str) -> list[str]:
    """The operators of the graph that a backend of this name gets."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    backend.__name__ = name  # which torch.compile takes for the backend's
    torch.compile(model, backend=backend, fullgraph=True)(x)
    return [op for graph in graphs for op in ops_of(graph)]


def test_inductor_sees_the_ops_of_pytorch() -> None:
    model, x = converted(), torch.randn(2, 4, 8)
    assert not [op for op in traced(model, x, "inductor") if "memopt" in op]
    torch.compiler.reset()
    memopt.revert(model)
    plain = sorted(traced(model, x, "inductor"))
    torch.compiler.reset()
    memopt.convert(model)
    assert sorted(traced(model, x, "inductor")) == plain


def test_others_see_those_of_memopt() -> None:
    model, x = converted(), torch.randn(2, 4, 8)
    assert sum("memopt" in op for op in traced(model, x, "other")) >= 3
    exported = torch.export.export(model, (x,))
    assert sum("memopt" in op for op in ops_of(exported.graph_module)) >= 3


def test_one_model_for_several_backends() -> None:
    """What was traced for one backend is not run for another."""
    model, x = converted(), torch.randn(2, 4, 8)
    for _ in range(2):
        assert not [op for op in traced(model, x, "inductor") if "memopt" in op]
        assert [op for op in traced(model, x, "other") if "memopt" in op]


def test_the_module_of_memopt_itself_stays() -> None:
    """Nothing else is asked for where memopt.nn was."""
    x = torch.randn(4, 8)
    assert [op for op in traced(memopt.nn.LayerNormGELU(8), x, "inductor") if "memopt" in op]


@pytest.mark.slow
def test_real_inductor() -> None:
    model, x = converted().eval(), torch.randn(2, 4, 8)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), expected)
