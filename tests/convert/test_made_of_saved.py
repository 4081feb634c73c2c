"""Proves: in a converted model products, quotients, powers and maxima of PyTorch's whose own nodes
save what they are made of are not kept for backward themselves, whoever saves them: StarReLU keeps
what it squares, EvoNorm and FRN keep their input. Sums with a parameter have a recipe too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._extension import _C
from tests.convert.support import kept_bytes

pytestmark = pytest.mark.usefixtures("collector_off")

WIDTH, EDGE, BATCH, GROUPS = 8, 6, 2, 2
ONE = BATCH * WIDTH * EDGE * EDGE * 4
A_CHANNEL = BATCH * WIDTH * 4
X = torch.randn(BATCH, WIDTH, EDGE, EDGE)
SHAPE = (1, WIDTH, 1, 1)


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.rand(WIDTH))
        self.extra = nn.Parameter(torch.rand(WIDTH))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.weight.view(SHAPE) + self.bias.view(SHAPE)


class StarReLU(nn.Module):
    """As MetaFormer has it (Yu et al., arXiv:2210.13452)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = (
            nn.Parameter(torch.tensor([0.9])),
            nn.Parameter(torch.tensor([-0.4])),
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.relu(x) ** 2 + self.bias  # type: ignore[no-any-return]


class EvoNorm(Affine):
    """S0 (Liu et al., arXiv:2004.02967), as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.reshape(BATCH, GROUPS, WIDTH // GROUPS, EDGE, EDGE)
        std = grouped.var((2, 3, 4), unbiased=False, keepdim=True).add(1e-5).sqrt()
        std = std.expand(grouped.shape).reshape(x.shape)
        return self.scaled(x * (x * self.extra.view(SHAPE)).sigmoid() / std)


class FilterResponseNorm(Affine):
    """With its threshold (Singh & Krishnan, arXiv:1911.09737)."""

    def forward(self, x: Tensor) -> Tensor:
        inverse = x.square().mean((2, 3), keepdim=True).add(1e-6).rsqrt()
        return torch.maximum(self.scaled(x * inverse), self.extra.view(SHAPE))


class Function(Affine):
    def __init__(self, function: Callable[[Function, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = (function,)

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](self, x)


def of(function: Callable[[Function, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Function(function)


# What each keeps: its own input, or a result of it.
WAYS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "StarReLU": (StarReLU, ONE),
    "EvoNorm": (EvoNorm, ONE + BATCH * GROUPS * 4),
    "FRN": (FilterResponseNorm, ONE + A_CHANNEL),
    "scaled": (of(lambda m, x: x * m.weight.view(SHAPE)), ONE),
    "scaled and shifted": (of(lambda m, x: m.scaled(x)), ONE),
    "from a parameter": (of(lambda m, x: m.bias.view(SHAPE) - x / m.weight.view(SHAPE)), ONE),
    "a quotient": (of(lambda m, x: x / m.weight.view(SHAPE)), ONE),
    "the smaller": (of(lambda m, x: torch.minimum(x, m.bias.view(SHAPE))), ONE),
    "squared": (of(lambda m, x: x**2), ONE),
    "squared by itself": (of(lambda m, x: x * x), ONE),
    "cubed, of a square": (of(lambda m, x: (x.square() + 1) ** 3), ONE),
    "written over by an activation": (of(lambda m, x: m.scaled(x).relu_()), ONE),
    "written over by a sum": (of(lambda m, x: (x * m.weight.view(SHAPE)).add_(x)), ONE),
    "a gate": (of(lambda m, x: (x[:, ::2] * x[:, 1::2]).repeat(1, 2, 1, 1)), ONE),
}
EXACT = [name for name in WAYS if name != "EvoNorm"]  # whose sigmoid is memopt's


def made(name: str, **options: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), WAYS[name][0](), nn.Conv2d(WIDTH, 4, 1))
    model = copy.deepcopy(plain)
    memopt.convert(model, **options)
    return model, plain


def gradients(model: nn.Module) -> list[Tensor]:
    wanted = list(model.parameters())
    return list(
        torch.autograd.grad(model(X).sin().sum(), wanted, allow_unused=True, materialize_grads=True)
    )


@pytest.mark.parametrize("name", WAYS)
def test_only_what_they_are_made_of_is_kept(name: str) -> None:
    live = _C.live_handles()
    model, plain = made(name)
    assert kept_bytes(model, X) == WAYS[name][1]
    assert kept_bytes(plain, X) >= ONE + WAYS[name][1]
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        if name in EXACT:
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert _C.live_handles() == live


@pytest.mark.parametrize("name", WAYS)
def test_a_second_backward_second_derivatives_and_a_region(name: str) -> None:
    def all_of(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        wanted = list(model.parameters())
        loss = run(X).sin().mean()
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        once, again = (torch.autograd.grad(loss, wanted, **options) for _ in range(2))
        assert all(map(torch.equal, once, again))
        first = torch.autograd.grad(
            loss, wanted, create_graph=True, allow_unused=True, materialize_grads=True
        )
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        return [
            *once,
            *torch.autograd.grad(penalty, wanted, allow_unused=True, materialize_grads=True),
        ]

    model, plain = made(name)
    expected = all_of(plain, plain)
    for run in (model, lambda x: memopt.checkpoint(model, x)):
        for ours, theirs in zip(all_of(model, run), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_under_autocast_types_are_as_in_forward(name: str) -> None:
    model, plain = made(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kept_bytes(model, X) <= kept_bytes(plain, X)
        losses = [m(X).float().sin().sum() for m in (model, plain)]
    pairs = (list(m.parameters()) for m in (model, plain))
    ours, theirs = (
        torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        for loss, wanted in zip(losses, pairs, strict=True)
    )
    for mine, other in zip(ours, theirs, strict=True):
        if name in EXACT:
            assert torch.equal(mine, other)
        assert (mine - other).norm() <= 0.1 * other.norm() + 0.1


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.abs() ** 2.7,  # ATen takes ten times an activation's time
        lambda m, x: x * m.weight.detach().view(SHAPE),  # the product saves the weight alone
        lambda m, x: x.cos() * m.weight.detach().view(SHAPE) + m.bias.view(SHAPE),
        lambda m, x: (x * m.weight.view(SHAPE)).mul_(2.0),  # written over
        lambda m, x: m.scaled(x) + torch.ones(SHAPE),  # which nothing keeps
    ],
    ids=["a dear power", "a frozen weight", "of what nothing keeps", "written over", "a constant"],
)
def test_everything_else_is_kept(function: Callable[[Function, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), Function(function), nn.Conv2d(WIDTH, 4, 1))
    model = copy.deepcopy(plain)
    memopt.convert(model)
    assert kept_bytes(model, X) == kept_bytes(plain, X)
    assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_a_parameter_written_over_before_backward_raises() -> None:
    model, _ = made("scaled and shifted")
    output = model(X)
    with torch.no_grad():
        model[1].bias.add_(1)
    with pytest.raises(RuntimeError, match=r"must not be written in place|inplace operation"):
        output.sum().backward()


def test_a_parameter_whose_memory_was_freed_is_not_read() -> None:
    """As sharding frees a block's parameters when its forward has ended."""
    model, plain = made("scaled and shifted")
    bias = model[1].bias
    whole = bias.detach().clone()

    def free(*_: object) -> None:
        bias.untyped_storage().resize_(0)

    model[1].register_forward_hook(free)
    output = model(X)
    bias.untyped_storage().resize_(whole.nbytes)
    with torch.no_grad():
        bias.fill_(-7.0)  # not what forward added
    ours = torch.autograd.grad(output.sin().sum(), [model[0].weight, model[1].weight])
    theirs = torch.autograd.grad(plain(X).sin().sum(), [plain[0].weight, plain[1].weight])
    assert all(map(torch.equal, ours, theirs))


def test_without_recipes_or_functions_nothing_changes() -> None:
    for options in ({"recipes": False}, {"functional": False}):
        model, plain = made("scaled and shifted", **options)
        assert kept_bytes(model, X) == kept_bytes(plain, X)
