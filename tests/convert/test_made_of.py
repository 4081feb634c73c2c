"""Proves: in a converted model sums, products, copies, poolings and interpolations of PyTorch's are
not kept for backward where what they are made of is kept anyway: a norm's output and the residual,
an activation and a gate, a window of attention, what a detector joins. Of many sums in a row every
fourth is kept; gradients have the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._extension import _C
from tests.convert.support import kept_bytes

pytestmark = pytest.mark.usefixtures("collector_off")

WIDTH, EDGE = 4, 6
ONE = 2 * WIDTH * EDGE * EDGE * 4
STATISTICS = 2 * WIDTH * EDGE * 8
X = torch.randn(2, WIDTH, EDGE, EDGE)


class Model(nn.Module):
    """A convolution, a norm, the function of both, a convolution of the result."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], result: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.beside = nn.Conv2d(WIDTH, WIDTH, 1)
        self.norm = nn.LayerNorm(EDGE)
        self.function = (function,)
        self.last = nn.Conv2d(result, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        # `beside` keeps h, and so does the norm.
        result = self.function[0](self.norm(h), h)
        return self.last(result).mean() + self.beside(h)  # type: ignore[no-any-return]


def rotate_half(x: Tensor) -> Tensor:
    """As rotary embedding does, with cosines and sines that `h` stands for here."""
    one, other = x.chunk(2, -1)
    return torch.cat((-other, one), -1)


def rotate_pairs(x: Tensor, h: Tensor) -> Tensor:
    one, other, angle = x[..., ::2], x[..., 1::2], h[..., ::2]
    return torch.stack((one * angle - other * angle, one * angle + other * angle), -1).flatten(-2)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a sum": lambda normed, h: normed + h,
    "the other way": lambda normed, h: h + normed,
    "torch.add": torch.add,
    "a difference": lambda normed, h: normed - h,
    "the other way round": lambda normed, h: h - normed,
    "negated": lambda normed, h: -normed,
    "times a number": lambda normed, h: 0.5 * normed,
    "by a number": lambda normed, h: normed / 3,
    "plus a number": lambda normed, h: normed + 2.0,
    "minus a number": lambda normed, h: normed - 2,
    "from a number": lambda normed, h: 1 - normed,
    "over the norm's output": lambda normed, h: normed.add_(h),
    "+=": lambda normed, h: normed.__iadd__(h),
    "of what it is made of": lambda normed, h: normed.add_(F.relu(normed)),
    "an activation of the sum": lambda normed, h: normed.add_(h).relu_(),
    "another one": lambda normed, h: F.silu(normed + h),
    "of several": lambda normed, h: F.silu(normed) + normed + h,
    "padded": lambda normed, h: F.pad(normed, (1, 1, 0, 2)),
    "padded with a number": lambda normed, h: F.pad(normed, (0, 1), value=2.0),
    "rolled": lambda normed, h: normed.roll((1, -2), (2, 3)),
    "in another layout": lambda normed, h: normed.transpose(2, 3).contiguous(),
    "channels last": lambda normed, h: normed.contiguous(memory_format=torch.channels_last),
    "cloned and written over": lambda normed, h: normed.clone().relu_(),
    "flipped": lambda normed, h: normed.flip(2),
    "repeated": lambda normed, h: normed.repeat(1, 1, 2, 1),
    "reflected": lambda normed, h: F.pad(normed, (1, 1, 2, 1), mode="reflect"),
    "replicated": lambda normed, h: F.pad(normed, (1, 1, 0, 1), mode="replicate"),
    "shuffled": lambda normed, h: F.channel_shuffle(normed, 2),
    "pixels unshuffled and shuffled": lambda normed, h: F.pixel_shuffle(
        F.pixel_unshuffle(normed, 2), 2
    ),
    "joined": lambda normed, h: torch.cat((normed, F.silu(normed)), 2),
    "joined with what is kept": lambda normed, h: torch.cat((h, normed), 3),
    "a slice, joined": lambda normed, h: torch.cat((F.relu(normed)[:, 1:], normed[:, :1]), 1),
    "stacked": lambda normed, h: torch.stack((normed, h), 2).flatten(2, 3),
    "pooled": lambda normed, h: F.avg_pool2d(normed, 2),
    "pooled to a size": lambda normed, h: F.adaptive_avg_pool2d(normed, 3),
    "nearest": lambda normed, h: F.interpolate(normed, scale_factor=2),
    "nearest, exact": lambda normed, h: F.interpolate(normed, 9, mode="nearest-exact"),
    "bilinear": lambda normed, h: F.interpolate(normed, scale_factor=1.5, mode="bilinear"),
    "bicubic": lambda normed, h: F.interpolate(
        F.relu(normed), size=(8, 7), mode="bicubic", align_corners=True
    ),
    "trilinear": lambda normed, h: F.interpolate(
        normed[:, None], size=(WIDTH, 8, 8), mode="trilinear"
    )[:, 0],
    "in one dimension": lambda normed, h: F.interpolate(
        normed.flatten(2), 2 * EDGE * EDGE, mode="linear"
    ).unflatten(2, (-1, EDGE)),
    "as a feature pyramid has it": lambda normed, h: torch.cat(
        (F.interpolate(F.avg_pool2d(normed, 2), scale_factor=2), h), 1
    )[:, 2:6],
    "a window": lambda normed, h: (
        normed.roll(1, 2).reshape(2, WIDTH, 2, 3, EDGE).transpose(2, 3).reshape(X.shape)
    ),
}
# A max pooling keeps its indices, 8 bytes each: of nine values, here.
POOLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the largest": lambda normed, h: F.max_pool2d(normed, 3, 2),
    "the largest of an activation": lambda normed, h: F.max_pool2d(F.relu(normed), 3, 2),
    "the largest, to a size": lambda normed, h: F.adaptive_max_pool2d(normed, 2),
    "the largest in three dimensions": lambda normed, h: F.max_pool3d(normed, (1, 3, 3), (1, 2, 2)),
}
INDICES = 2 * WIDTH * 4 * 8
# What such a product keeps of its factors: `h` is kept, the norm's output has a recipe.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product": lambda normed, h: normed * h,
    "with a gate": lambda normed, h: F.silu(normed) * h,
    "torch.mul": torch.mul,
    "a quotient": lambda normed, h: normed / (h.sigmoid() + 1),
    "rotated": lambda normed, h: normed * h + rotate_half(normed) * h,
    "rotated in pairs": lambda normed, h: rotate_pairs(normed, h),
}
ALL = {**FUNCTIONS, **POOLED, **PRODUCTS}


def made(
    function: Callable[[Tensor, Tensor], Tensor], **options: bool
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Model(function)
    model = copy.deepcopy(plain)
    memopt.convert(model, **options)
    return model, plain


def gradients(model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(model(X).sin().sum(), list(model.parameters())))


@pytest.mark.parametrize("function", ALL.values(), ids=ALL)
def test_what_is_made_of_what_is_kept_is_not_kept(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    live = _C.live_handles()
    model, plain = made(function)
    indices = INDICES if function in POOLED.values() else 0
    assert kept_bytes(model, X) == ONE + STATISTICS + indices
    assert kept_bytes(plain, X) > ONE + STATISTICS + indices
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert _C.live_handles() == live


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients_have_the_bits_of_what_is_kept(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """A write that counts and changes nothing has the result kept."""

    def kept_instead(normed: Tensor, h: Tensor) -> Tensor:
        return function(normed, h).mul_(1.0)

    recomputed, held = made(function)[0], made(kept_instead)[0]
    result = function(X, X).nbytes  # or that of what it is made of
    assert kept_bytes(held, X) >= kept_bytes(recomputed, X) + min(ONE, result)
    for ours, theirs in zip(gradients(recomputed), gradients(held), strict=True):
        assert torch.equal(ours, theirs)


def sine_times(x: Tensor) -> Tensor:
    return x.sin() * x


LEFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an average over windows that overlap": lambda normed, h: F.avg_pool2d(normed, 3, 1, 1),
    "joined with what nothing keeps": lambda normed, h: torch.cat((normed, h.cos()), 2),
    "of a mean": lambda normed, h: normed + normed.mean((2, 3), keepdim=True),
    "of what nothing keeps": lambda normed, h: normed + h.cos(),
    "in parts": lambda normed, h: torch.add(normed, h, alpha=2),
    "written over later": lambda normed, h: (normed + h).mul_(2.0),
    "of itself, read twice": lambda normed, h: sine_times(normed.add_(normed)),
    "of itself elsewhere": lambda normed, h: sine_times(normed.add_(normed.detach())),
    "of a view": lambda normed, h: torch.cat((normed[:1].add_(h[:1]), normed[1:])),
}


@pytest.mark.parametrize("function", LEFT.values(), ids=LEFT)
def test_everything_else_is_kept(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, plain = made(function)
    assert kept_bytes(model, X) >= 2 * ONE
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Residual(nn.Module):
    """A residual block, whose result is a sum over the norm's output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.LayerNorm(EDGE)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        return out.relu_()  # type: ignore[no-any-return]


def test_of_many_sums_in_a_row_every_fourth_is_kept() -> None:
    """Backward holds as many at a time as follow one that is kept."""
    blocks = 9
    torch.manual_seed(0)
    plain = nn.Sequential(*(Residual() for _ in range(blocks)), nn.Conv2d(WIDTH, WIDTH, 1))
    model = copy.deepcopy(plain)
    memopt.convert(model)
    assert kept_bytes(model, X) == blocks * (ONE + STATISTICS) + blocks // 4 * ONE
    assert kept_bytes(plain, X) == blocks * (2 * ONE + STATISTICS)
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_an_operand_written_over_before_backward_raises() -> None:
    """As without recipes: what reads it has saved it."""
    model, _ = made(lambda normed, h: normed + h.mul_(1.0))
    x = X.clone()
    output = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"must not be written in place|inplace operation"):
        output.sum().backward()


def test_a_sum_that_raises_leaves_what_it_was_to_write_over() -> None:
    def refused(normed: Tensor, h: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="must match the size"):
            normed.add_(F.silu(normed)[..., :3])
        return normed

    model, plain = made(refused)
    assert kept_bytes(model, X) == ONE + STATISTICS
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", ALL.values(), ids=ALL)
def test_a_second_backward_and_second_derivatives(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    def both(model: nn.Module) -> list[Tensor]:
        parameters = list(model.parameters())
        loss = model(X).sin().mean()
        once, again = (torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, once, again))
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        return list(torch.autograd.grad(penalty, parameters))

    model, plain = made(function)
    for ours, theirs in zip(both(model), both(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("function", ALL.values(), ids=ALL)
def test_in_a_region_and_under_autocast(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, plain = made(function)
    parameters = list(model.parameters())
    expected = gradients(model)
    within = memopt.checkpoint(model, X).sin().sum()
    for ours, theirs in zip(torch.autograd.grad(within, parameters), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kept_bytes(model, X) < kept_bytes(plain, X)
        ours, theirs = gradients(model), gradients(plain)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= 0.1 * other.norm() + 0.1


def test_hooks_and_gradients_of_a_sum_are_there() -> None:
    seen: list[Tensor] = []

    def hooked(normed: Tensor, h: Tensor) -> Tensor:
        result = normed + h
        result.register_hook(seen.append)
        result.retain_grad()
        return result.relu()

    for model in made(hooked):
        gradients(model)
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)


def test_without_recipes_or_functions_nothing_changes() -> None:
    for options in ({"recipes": False}, {"functional": False}):
        model, _ = made(FUNCTIONS["a sum"], **options)
        assert kept_bytes(model, X) == 2 * ONE + STATISTICS
