"""Proves: under torch.compile a region becomes PyTorch's own checkpoint operator without a graph
break, and compiled functions work inside regions that run eagerly, batch norm statistics included.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs

from memopt.checkpoint import checkpoint, checkpoint_wrapper
from tests.checkpoint.support import mlp


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def gradients(fn, tensors: list[Tensor]) -> list[Tensor]:
    return torch.autograd.grad(fn(tensors[0]).square().sum(), tensors)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_regions_compile_without_graph_breaks(
    device: torch.device, backend: str, wrapped: bool
) -> None:
    module = mlp().to(device)
    tensors = [torch.randn(4, 8, device=device, requires_grad=True), *module.parameters()]
    expected = gradients(module, tensors)
    if wrapped:
        checkpoint_wrapper(module)
        function = torch.compile(lambda x: module(x).sin(), backend=backend, fullgraph=True)
    else:
        function = torch.compile(
            lambda x: checkpoint(module, x).sin(), backend=backend, fullgraph=True
        )
    expected = gradients(lambda x: plain_mlp(module, x).sin(), tensors)
    for actual, e in zip(gradients(function, tensors), expected, strict=True):
        torch.testing.assert_close(actual, e)


def plain_mlp(module: nn.Sequential, x: Tensor) -> Tensor:
    for layer in module:
        x = layer(x)
    return x


def test_regions_become_the_checkpoint_operator() -> None:
    backend = EagerAndRecordGraphs()
    module = checkpoint_wrapper(mlp())
    torch.compile(lambda x: module(x), backend=backend, fullgraph=True)(torch.randn(4, 8))
    (graph,) = backend.graphs
    assert any("checkpoint" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("by_method", [False, True])
def test_compiled_modules_inside_regions(device: torch.device, by_method: bool) -> None:
    module = nn.Sequential(mlp(), nn.BatchNorm1d(8)).to(device)
    tensors = [torch.randn(4, 8, device=device, requires_grad=True), *module.parameters()]
    expected = gradients(module, tensors)
    statistics = [buffer.clone() for buffer in module.buffers()]
    module[1].reset_running_stats()
    if by_method:
        module.compile(backend="aot_eager")
        compiled = module
    else:
        compiled = torch.compile(module, backend="aot_eager")
    for way in (lambda x: checkpoint(compiled, x), checkpoint_wrapper(compiled)):
        module[1].reset_running_stats()
        for actual, e in zip(gradients(way, tensors), expected, strict=True):
            torch.testing.assert_close(actual, e)
        for actual, e in zip(module.buffers(), statistics, strict=True):
            torch.testing.assert_close(actual, e)


def test_traced_by_jit_as_the_plain_module() -> None:
    module = checkpoint_wrapper(mlp())
    x = torch.randn(4, 8)
    traced = torch.jit.trace(module, x)
    assert torch.equal(traced(x), module(x))


def test_exported_as_the_plain_module() -> None:
    x = torch.randn(4, 8)
    module = checkpoint_wrapper(mlp())
    exported = torch.export.export(module, (x,)).module()
    assert torch.equal(exported(x), module(x))
