"""Proves: with a region around any part of a model, losses and gradients have the bits of the plain
run and of torch.utils.checkpoint, in float32 and under autocast, with dropout, frozen parts and
inputs that need no gradient; each output requires grad exactly where the plain one does; functions
run twice where backward needs them and once elsewhere.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt._checkpoint import checkpoint, checkpoint_wrapper
from tests.checkpoint.support import CountCalls, mlp, plain, step_results, torch_non_reentrant
from tests.support.bits import assert_same_bits


class Attention(nn.Module):
    """Causal self-attention that takes its mask by keyword."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = Attention(size, heads)
        self.mlp = mlp(size, dropout=0.3)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Blocks called through `region`, so that the ways of calling them can be compared."""

    def __init__(self, depth: int = 3, size: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(depth))

    def forward(self, tokens: Tensor, region=plain) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], device=x.device).tril().bool()
        for block in self.blocks:
            x = region(block, x, mask=mask)
        return x


@pytest.fixture
def transformer(device: torch.device) -> Transformer:
    torch.manual_seed(1)
    return Transformer().to(device)


@pytest.fixture
def tokens(device: torch.device) -> Tensor:
    return torch.randint(11, (2, 5), device=device)


def test_transformer_with_dropout(transformer: Transformer, tokens: Tensor) -> None:
    parameters = list(transformer.parameters())
    ways = (plain, checkpoint, torch_non_reentrant)
    expected, ours, theirs = (
        step_results(functools.partial(transformer, tokens, way), parameters) for way in ways
    )
    assert_same_bits(ours, expected)
    assert_same_bits(theirs, expected)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_wrapped_transformer(
    transformer: Transformer, tokens: Tensor, dtype: torch.dtype | None, offload: bool
) -> None:
    """Backward runs outside of autocast, as it should: the recompute has to bring its own."""

    def call() -> Tensor:
        with torch.autocast(tokens.device.type, dtype, enabled=dtype is not None):
            return transformer(tokens)

    parameters = list(transformer.parameters())
    expected = step_results(call, parameters)
    for block in transformer.blocks:
        checkpoint_wrapper(block, offload)
    assert_same_bits(step_results(call, parameters), expected)


@pytest.mark.parametrize("enabled_in_backward", [False, True])
def test_autocast_state_of_backward_does_not_matter(
    device: torch.device, enabled_in_backward: bool
) -> None:
    model = mlp().to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    gradients = []
    for way in (plain, checkpoint):
        with torch.autocast(device.type, torch.bfloat16, enabled=not enabled_in_backward):
            loss = way(model, x).float().sum()
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled_in_backward):
            gradients.append(torch.autograd.grad(loss, [x, *model.parameters()]))
    assert_same_bits(gradients[1], gradients[0])


def test_several_inputs_and_outputs(device: torch.device) -> None:
    class TwoInTwoOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
            y = self.conv1(a).relu()
            return y * scale, y + self.conv2(b).sigmoid()

    model = TwoInTwoOut().to(device)
    a, b = (torch.randn(2, 3, 7, 7, device=device, requires_grad=True) for _ in range(2))
    tensors = [a, b, *model.parameters()]
    expected = step_results(lambda: model(a, b=b, scale=0.5), tensors)
    ours = step_results(lambda: checkpoint(model, a, b=b, scale=0.5), tensors)
    assert_same_bits(ours, expected)


@pytest.mark.parametrize("input_requires_grad", [False, True])
@pytest.mark.parametrize("frozen", [(), (0,), (3,), (0, 3)], ids=str)
def test_frozen_parts(
    device: torch.device, input_requires_grad: bool, frozen: tuple[int, ...]
) -> None:
    model = mlp().to(device)
    for index in frozen:
        model[index].requires_grad_(False)
    x = torch.randn(4, 8, device=device, requires_grad=input_requires_grad)
    tensors = [x, *model.parameters()]
    assert checkpoint(model, x).requires_grad == model(x).requires_grad
    assert_same_bits(
        step_results(lambda: checkpoint(model, x), tensors), step_results(lambda: model(x), tensors)
    )


def test_requires_grad_of_each_output() -> None:
    weight = torch.randn(3, requires_grad=True)
    x = torch.randn(3)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x * weight, x * 2, (x * weight).detach(), weight.argmax(), x

    expected = [out.requires_grad for out in function(x)]
    assert [out.requires_grad for out in checkpoint(function, x)] == expected
    assert expected == [True, False, False, False, False]


def test_chain_runs_only_what_backward_needs_twice(device: torch.device) -> None:
    """A frozen prefix runs once, everything from the first trainable layer on twice."""
    layers = [nn.Sequential(CountCalls(), nn.Linear(4, 4), nn.Tanh()).to(device) for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    x = torch.randn(3, 4, device=device)
    for layer in layers:
        x = checkpoint(layer, x)
    x.sum().backward()
    assert [layer[0].calls for layer in layers] == [1, 1, 2, 2]


def test_function_that_saves_nothing_is_not_run_again() -> None:
    count = CountCalls()
    x = torch.randn(3, requires_grad=True)
    checkpoint(lambda x: count(x) + 1, x).sum().backward()
    assert count.calls == 1
    assert torch.equal(x.grad, torch.ones(3))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_function_is_just_called(context) -> None:
    x = torch.randn(3, requires_grad=True)
    with context():
        y = checkpoint(lambda x: x.exp(), x)
    assert not y.requires_grad


def test_closure_over_other_tensors(device: torch.device) -> None:
    outer = torch.randn(4, device=device, requires_grad=True)
    x = torch.randn(4, device=device, requires_grad=True)

    def step(way) -> list[Tensor | None]:
        scale = outer.exp()
        return step_results(lambda: way(lambda x: (x * scale).tanh() * scale, x), [outer, x])

    assert_same_bits(step(checkpoint), step(plain))


def test_views_in_and_out(device: torch.device) -> None:
    """A view of a result comes out, is written in place by the caller, and gets its gradient."""
    x = torch.randn(6, device=device, requires_grad=True)

    def step(way) -> list[Tensor | None]:
        def call() -> Tensor:
            y = way(lambda a: ((a * 2)[:3], a.tanh()), x[::1])
            y[0].mul_(3)
            return y[0] * y[1].sum()

        return step_results(call, [x])

    assert_same_bits(step(checkpoint), step(plain))


def test_two_thousand_regions_in_one_graph(device: torch.device) -> None:
    """Deep graphs recurse in nobody's stack."""
    x = torch.randn(4, device=device, requires_grad=True)

    def deep(way) -> Tensor:
        y = x
        for _ in range(2000):
            y = way(torch.sin, y)
        return y

    assert_same_bits(
        step_results(lambda: deep(checkpoint), [x]), step_results(lambda: deep(plain), [x])
    )


def test_data_parallel_replicas_run_on_their_own_parameters() -> None:
    """DataParallel copies modules shallowly and gives each copy other parameters."""
    module = checkpoint_wrapper(nn.Linear(3, 3))
    replica = module._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(3, 3), torch.ones(3).requires_grad_()
    assert torch.equal(replica(torch.randn(2, 3)), torch.ones(2, 3))
