"""A recompute is the forward once more only with the same parameters. Where others stand in their
place in backward, or they were written, a region says so, naming the first, and gives no gradient;
plain code is right there, or PyTorch refuses it. What writes or exchanges parameters inside a
region, or writes what is frozen, is left in peace: counted by gradients equal to plain code's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import memopt
from memopt._extension import _C

pytestmark = pytest.mark.skipif(not memopt.HAS_NATIVE, reason="regions are PyTorch's")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(x)))


def _wrapped(block: nn.Module) -> nn.Module:
    return memopt.checkpoint_wrapper(block)


def _applied(block: nn.Module) -> nn.Module:
    model = nn.Sequential(block)
    memopt.apply_activation_checkpointing(model, check_fn=lambda m: m is block)
    return model


class _Called(nn.Module):
    """A region around a closure."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return memopt.checkpoint(lambda x: self.block(x), x)


class _InARow(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(block, Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return memopt.checkpoint_sequential(self.blocks, 2, x)


REGIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": _wrapped,
    "applied": _applied,
    "closure": _Called,
    "sequential": _InARow,
}


@pytest.fixture(params=list(REGIONS))
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return REGIONS[request.param](Block())


def _bias(model: nn.Module) -> nn.Parameter:
    """No backward saves it, so that PyTorch's own check does not see that it is written."""
    return next(p for name, p in model.named_parameters() if name.endswith("a.bias"))


def test_other_parameters_in_a_functional_call_are_named(model: nn.Module) -> None:
    others = {name: p.detach() + 1 for name, p in model.named_parameters()}
    others = {name: p.requires_grad_() for name, p in others.items()}
    loss = functional_call(model, others, torch.randn(4, 8, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"of Linear is another tensor.*functional_call"):
        loss.backward()
    assert others[next(name for name in others if name.endswith("a.bias"))].grad is None
    assert _bias(model).grad is None


def test_the_models_own_parameters_in_a_functional_call_are_right(model: nn.Module) -> None:
    x = torch.randn(4, 8)
    functional_call(model, dict(model.named_parameters()), x).sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for gradient, p in zip(found, model.parameters(), strict=True):
        assert gradient is not None
        assert p.grad is not None
        assert torch.equal(gradient, p.grad)


def test_a_functional_call_inside_a_region_is_right() -> None:
    block, x = Block(), torch.randn(4, 8)
    others = {name: (p.detach() + 1).requires_grad_() for name, p in block.named_parameters()}
    memopt.checkpoint(lambda x: functional_call(block, others, x), x).sum().backward()
    found = {name: p.grad for name, p in others.items()}
    again = {name: p.detach().clone().requires_grad_() for name, p in others.items()}
    functional_call(block, again, x).sum().backward()
    for name, gradient in found.items():
        assert gradient is not None
        assert torch.equal(gradient, again[name].grad)  # type: ignore[arg-type]


def _written(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.add_(1)


def _loaded(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.copy_(torch.ones_like(p))


@pytest.mark.parametrize("write", [_written, _loaded])
def test_parameters_written_before_backward_are_named(
    model: nn.Module, write: Callable[[nn.Parameter], None]
) -> None:
    loss = model(torch.randn(4, 8, requires_grad=True)).sum()
    write(_bias(model))
    with pytest.raises(RuntimeError, match=r"bias of Linear was written in place"):
        loss.backward()


def test_an_exchanged_parameter_is_named(model: nn.Module) -> None:
    loss = model(torch.randn(4, 8, requires_grad=True)).sum()
    owner = next(m for m in model.modules() if isinstance(m, Block))
    owner.a.bias = nn.Parameter(torch.ones(16))
    with pytest.raises(RuntimeError, match=r"bias of Linear is another tensor"):
        loss.backward()


def test_frozen_parameters_and_buffers_may_be_written(model: nn.Module) -> None:
    """Codebooks and statistics are, by many forwards."""
    _bias(model).requires_grad_(requires_grad=False)
    loss = model(torch.randn(4, 8, requires_grad=True)).sum()
    _written(_bias(model))
    loss.backward()


class Normalized(nn.Module):
    """Writes its own weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=1))
        return x @ self.weight.t()


def test_a_forward_that_writes_its_own_weight_may_run_again() -> None:
    model = Normalized()
    region = memopt.checkpoint_wrapper(model)
    loss = region(torch.randn(4, 8, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    found = model.weight.grad
    model.zero_grad()
    loss.backward()
    assert found is not None
    assert torch.allclose(found, model.weight.grad)  # type: ignore[arg-type]


def test_a_step_between_two_backwards_is_named() -> None:
    model = memopt.checkpoint_wrapper(Block())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(4, 8, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="was written in place"):
        loss.backward()


@pytest.mark.parametrize("place", [0, 4, 7, 11])
def test_each_block_of_regions_that_are_joined_is_looked_at(place: int) -> None:
    """One region runs several blocks, the calls behind its first one included."""
    model = nn.Sequential(*(Block() for _ in range(12)))
    x = torch.randn(512, 8, requires_grad=True)
    memopt.apply_activation_checkpointing(model, batch=x)
    before = _C.live_regions()
    loss = model(x).sum()
    assert 0 < _C.live_regions() - before < 8
    bias = model[place].a.bias
    assert isinstance(bias, nn.Parameter)
    loss.backward(retain_graph=True)
    _written(bias)
    with pytest.raises(RuntimeError, match=r"bias of Linear was written in place"):
        loss.backward()
