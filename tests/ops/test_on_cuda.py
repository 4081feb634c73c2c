"""Proves on a GPU that ops and regions can be captured into a CUDA graph: each replay of a dropout
draws other numbers, its backward has its mask, and the seed repeats them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.functional import dropout, dropout_add_layer_norm, gelu_dropout


def captured(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[torch.cuda.CUDAGraph, ...]:
    """The graph of a forward and a backward, its output and x's gradient."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            x.grad = None
            function(x).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(x)
        output.sum().backward()
    return graph, output, x.grad


ops: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: dropout(x, 0.5),
    "dropout of a dropout": lambda x: dropout(dropout(x, 0.5), 0.5),
    "gelu_dropout": lambda x: gelu_dropout(x, 0.5),
    "dropout_add_layer_norm": lambda x: dropout_add_layer_norm(x, torch.zeros_like(x), 0.5, (64,))[
        1
    ],
}


@pytest.mark.parametrize("function", ops.values(), ids=ops)
def test_replays_draw_other_numbers(
    function: Callable[[Tensor], Tensor], cuda: torch.device
) -> None:
    x = torch.full((32, 64), 2.0, device=cuda, requires_grad=True)
    graph, output, grad = captured(function, x)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append((output.detach().clone(), grad.clone()))
        assert torch.equal(grad != 0, output != output.min())
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[1][0], seen[2][0])
    again = []
    for _ in range(2):
        torch.manual_seed(3)
        graph.replay()
        again.append((output.detach().clone(), grad.clone()))
    assert torch.equal(again[0][0], again[1][0])
    assert torch.equal(again[0][1], again[1][1])


def test_a_region_is_captured_where_it_draws_no_numbers(cuda: torch.device) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).to(cuda)
    x = torch.randn(32, 64, device=cuda, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    expected = x.grad.clone()
    memopt.checkpoint_wrapper(module, preserve_rng_state=False)
    graph, _, grad = captured(module, x)
    grad.zero_()
    graph.replay()
    torch.testing.assert_close(grad, expected)


def test_a_region_that_would_restore_the_generator_says_what_to_do(cuda: torch.device) -> None:
    module = memopt.checkpoint_wrapper(nn.Linear(8, 8).to(cuda))
    x = torch.randn(4, 8, device=cuda)
    module(x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="pass preserve_rng_state=False"),
        torch.cuda.graph(graph),
    ):
        module(x)
    torch.cuda.synchronize()
    assert torch.equal(module(x), module(x))


def test_convert_under_graphed_callables(cuda: torch.device) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).to(cuda)
    x = torch.randn(16, 64, device=cuda)
    memopt.convert(model)
    with torch.no_grad():  # a graph from the current stream could not be captured on another
        expected = model(x)
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(16, 64, device=cuda),))
    torch.testing.assert_close(graphed(x), expected)
