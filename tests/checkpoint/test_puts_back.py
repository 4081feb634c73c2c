"""Proves: a recompute that ends as soon as it can lets the forward put back what it had changed, in
`finally` and in a context's exit, be it by computing. No batch is needed for it. Where something
outside changes weights between the two runs, the error of the first step names the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
import memopt.functional as M
from tests.checkpoint.stateful import assert_same_gradients


class Scaled(nn.Module):
    """Its weight is another parameter, computed with gradients, until its forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.full((8, 1), 1.5))
        self.entered = 0

    @contextmanager
    def scaled(self) -> Iterator[None]:
        self.entered += 1
        weight = self.linear.weight
        del self.linear._parameters["weight"]
        self.linear.weight = weight * self.scale
        try:
            yield
        finally:
            # Computes, and saves for backward, before it puts anything back.
            (self.linear.weight / self.scale).sum()
            del self.linear.weight
            self.linear.weight = weight
            self.entered -= 1


class InFinally(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        context = self.scaled()
        context.__enter__()
        try:
            return self.linear(x.tanh())
        finally:
            context.__exit__(None, None, None)


class InContext(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        with self.scaled():
            return self.linear(x.tanh())


class Catches(Scaled):
    """Goes on after an exception."""

    def forward(self, x: Tensor) -> Tensor:
        with self.scaled():
            try:
                return self.linear(x.tanh())
            except BaseException:
                return self.linear(x)


def steps(model: nn.Module, x: Tensor, number: int = 3) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [InFinally, InContext, Catches])
@pytest.mark.parametrize("early_stop", [True, False])
def test_training_goes_on_as_without_regions(kind: type[Scaled], early_stop: bool) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(kind(), kind())

    model, plain = made(), made()
    for block in model:
        memopt.checkpoint_wrapper(block, early_stop=early_stop)
    assert steps(model, x) == steps(plain, x)
    assert_same_gradients(model, plain)
    assert [block.entered for block in model] == [0, 0]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        found: Tensor = x + self.attention(x, x, x)[0]
        return found


def with_lora() -> Any:
    """PEFT's attention merges weights in forward, and unmerges them in `finally`."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["attention"], r=2, init_lora_weights=False)
    return peft.get_peft_model(nn.Sequential(Attends(), Attends()), config)


def is_lora(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "MultiheadAttention" and kind.__module__.startswith("peft.")


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("check", [lambda m: isinstance(m, Attends), is_lora])
def test_lora_of_attention(check: Callable[[nn.Module], bool], batch: bool) -> None:
    """As a block's last layer, and as the region itself."""
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    model, plain = with_lora(), with_lora()
    names = memopt.apply_activation_checkpointing(model, check_fn=check, batch=x if batch else None)
    assert len(names) == 2
    assert steps(model, x) == steps(plain, x)
    assert_same_gradients(model, plain)


def test_weights_that_something_outside_exchanges() -> None:
    """PEFT's merged weights are those of the inner attention's forward alone."""
    model = with_lora()
    memopt.apply_activation_checkpointing(
        model, check_fn=lambda m: type(m) is nn.MultiheadAttention
    )
    loss = model(torch.randn(2, 4, 8)).sum()
    with pytest.raises(RuntimeError, match=r"attention\.base_layer .*, batch=batch\) makes no"):
        loss.backward()


@pytest.mark.parametrize(
    "last",
    [
        lambda x: M.layer_norm(x, (8,)),
        lambda x: x.exp(),
        lambda x: x * 2.0 @ torch.ones(8, 2),
    ],
    ids=["a node of memopt's", "an op that saves its result", "an op that does not run"],
)
def test_what_the_function_computes_behind_the_end_runs_to_its_end(
    last: Callable[[Tensor], Tensor],
) -> None:
    """Whatever ends the recompute does so once."""
    ended = 0

    def function(x: Tensor) -> Tensor:
        nonlocal ended
        try:
            return last(x.sin())
        finally:
            (M.gelu(x) * x).exp().sum()
            ended += 1

    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(last(x.sin()).sum(), x)
    actual = torch.autograd.grad(memopt.checkpoint(function, x).sum(), x)
    assert torch.equal(actual[0], expected[0])
    assert ended == 2
