"""Proves: what branches on an input's dimensions, sizes, numbers or dtype, clamps, or replaces NaN
is not taken for the plain formula; what is the plain formula is known in each of its forms, and
computes the same for every such input.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from tests.convert import modules
from tests.convert.support import converted_inside, memopt_ops, one_step

SIZE = 8


def inputs(size: int) -> Iterator[Tensor]:
    torch.manual_seed(1)
    for shape in ((), (5,), (size,), (2, 5), (2, size), (2, 3, 5), (2, size, 3), (2, 3, size)):
        x = torch.randn(*shape, size)
        yield x
        yield x * 1e4
        yield x.double()
        yield x.bfloat16()
        far = x.clone()
        far.view(-1)[0] = math.nan
        yield far


def output(module: nn.Module, x: Tensor) -> Tensor | type[Exception]:
    try:
        return module(x.to(next((p.dtype for p in module.parameters()), x.dtype)))
    except (IndexError, RuntimeError) as error:
        return type(error)


def assert_computes_the_same(converted: nn.Module, plain: nn.Module, of: Iterator[Tensor]) -> None:
    for x in of:
        ours, theirs = output(converted.to(x.dtype), x), output(plain.to(x.dtype), x)
        if isinstance(theirs, Tensor):
            tolerance = 4e-2 if x.dtype == torch.bfloat16 else 2e-5
            largest = theirs.detach().abs().nan_to_num(0.0).max()
            torch.testing.assert_close(
                ours, theirs, rtol=tolerance, atol=tolerance * float(largest), equal_nan=True
            )
        else:
            assert ours is theirs


BRANCHING: dict[str, Callable[[str], nn.Module]] = {
    "norm": lambda where: modules.Branching(SIZE, where),
    "activation": modules.BranchingGELU,
    "gated unit": modules.BranchingGated,
}


@pytest.mark.parametrize("where", modules.BRANCHES)
@pytest.mark.parametrize("make", BRANCHING.values(), ids=BRANCHING)
def test_a_branch_is_seen(make, where: str) -> None:
    plain = make(where)
    converted = converted_inside(copy.deepcopy(plain), recipes=False)
    assert_computes_the_same(converted, plain, inputs(SIZE))


class Norm(nn.Module):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.linspace(-1, 1, size))
        self.bias = nn.Parameter(torch.linspace(0, 1, size))


class OnePlusWeight(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], 1 + self.weight, self.bias, self.eps)


class Unweighted(nn.Module):
    """As OLMo's."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.normalized_shape = (size,)

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.float(), self.normalized_shape, None, None, eps=1e-5)
        return y.to(x.dtype)


class UnweightedRMS(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


class Length(nn.Module):
    """x-transformers' RMSNorm."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.scale = size**0.5
        self.g = nn.Parameter(torch.linspace(-1, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * self.g


class Channels(nn.Module):
    """vit-pytorch's LayerNorm over channels."""

    def __init__(self, size: int = SIZE, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.linspace(-1, 1, size).view(1, size, 1, 1))
        self.b = nn.Parameter(torch.linspace(0, 1, size).view(1, size, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        var = torch.var(x, dim=1, unbiased=False, keepdim=True)
        mean = torch.mean(x, dim=1, keepdim=True)
        return (x - mean) / (var + self.eps).sqrt() * self.g + self.b


class LayerNorm2d(nn.LayerNorm):
    """timm's and ConvNeXt's: channels first, and last in memory afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ChannelsOfThree(nn.LayerNorm):
    """SqueezeBERT's, for three dimensions only."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.LayerNorm.forward(self, x.permute(0, 2, 1)).permute(0, 2, 1)


class Upcasting(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(
            input.dtype
        )


class EitherLayout(Norm):
    """Channels first if dimension 1 has the size of the weight; memopt computes the rest."""

    def forward(self, x: Tensor) -> Tensor:
        first = x.dim() > 2 and x.shape[1] == self.weight.numel()
        y = x.movedim(1, -1) if first else x
        y = F.layer_norm(y, y.shape[-1:], self.weight, self.bias, self.eps)
        return y.movedim(-1, 1) if first else y


class ErfGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class TanhGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class ReLUSquared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


class Softcap(nn.Module):
    """As Gemma 2 caps its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.cap = 30.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / self.cap) * self.cap


FORMS: dict[type[nn.Module], str] = {
    OnePlusWeight: "layer_norm(1 + weight)",
    Unweighted: "layer_norm",
    UnweightedRMS: "rms_norm",
    Length: "rms_norm",
    Channels: "layer_norm(channels first)",
    LayerNorm2d: "layer_norm(channels first)",
    ChannelsOfThree: "layer_norm(channels first)",
    Upcasting: "layer_norm",
    EitherLayout: "layer_norm",
    ErfGELU: "gelu",
    TanhGELU: "gelu(approximate='tanh')",
    ReLUSquared: "relu_squared",
    Softcap: "softcap(cap=30)",
}


class Clamp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-30.0, 30.0)


class Algebraic(nn.Module):
    """Bounded by 30 as well, and about x near 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + (x / 30.0).square()).sqrt()


@pytest.mark.parametrize("form", [nn.Identity, Clamp, Algebraic, nn.Tanhshrink, nn.Softsign])
def test_what_only_looks_like_softcap_stays(form: type[nn.Module]) -> None:
    assert memopt.convert(nn.Sequential(form())).swapped == ()


def test_softcap_with_another_cap_since_is_the_module_s_own() -> None:
    model = nn.Sequential(Softcap())
    memopt.convert(model)
    model[0].cap = 5.0
    x = torch.full((3,), 100.0)
    assert torch.equal(model(x), torch.tanh(x / 5.0) * 5.0)


def make(form: type[nn.Module], size: int) -> nn.Module:
    sized = form is not Softcap and form.__init__ is not nn.Module.__init__
    return form(size) if sized else form()


@pytest.mark.parametrize("size", [SIZE, 100])
@pytest.mark.parametrize(("form", "to"), FORMS.items())
def test_forms_are_known_and_compute_the_same(form: type[nn.Module], to: str, size: int) -> None:
    plain = make(form, size)
    converted = copy.deepcopy(plain)
    parent = nn.Sequential(converted)
    report = memopt.convert(parent)
    converted = parent[0]  # a module without submodules is swapped there
    assert [e.to for e in report.swapped] == [f"memopt.functional.{to}"]
    assert_computes_the_same(copy.deepcopy(converted), copy.deepcopy(plain), inputs(size))
    shapes = {LayerNorm2d: (2, size, 3, 5), Channels: (2, size, 3, 5)}
    shape = (2, size, 5) if form is ChannelsOfThree else shapes.get(form, (6, size))
    x = torch.randn(shape, requires_grad=True)
    assert memopt_ops(lambda: converted(x))
    tensors = (x, *converted.parameters())
    expected = one_step(lambda: plain(x), x, *plain.parameters())
    for ours, theirs in zip(one_step(lambda: converted(x), *tensors), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class BoundedRMS(nn.Module):
    """lucidrains', with an attribute or a constant as the bound."""

    def __init__(self, eps: float | None) -> None:
        super().__init__()
        self.scale = SIZE**-0.5
        if eps is not None:
            self.eps = eps
        self.g = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        bound = getattr(self, "eps", 1e-10)
        return x / (torch.norm(x, dim=-1, keepdim=True) * self.scale).clamp(min=bound) * self.g


class BoundedLength(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.eps) * SIZE**0.5 * self.g


@pytest.mark.parametrize(
    ("plain", "is_known"),
    [
        (BoundedRMS(1e-8), True),
        (BoundedRMS(1e-12), True),
        (BoundedRMS(None), True),
        (BoundedRMS(1e-6), False),
        (BoundedLength(1e-8), True),
        (BoundedLength(1e-5), False),
    ],
)
def test_norms_whose_size_is_bounded(plain: nn.Module, is_known: bool) -> None:
    """Bounds far below activations are known, as the numbers that they are: they say how large the
    gradient of a row of zeros is, and of what is below them.
    """
    model = nn.Sequential(copy.deepcopy(plain))
    assert bool(memopt.convert(model).swapped) == is_known
    x = torch.randn(3, SIZE)
    x[1], x[2] = 0, 1e-16 * x[2]
    weights = torch.randn(3, SIZE)
    results = []
    for module in (plain, model):
        given = x.clone().requires_grad_()
        y = module(given)
        results.append((y.detach(), *torch.autograd.grad((y * weights).sum(), given)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)


class ClampedLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-6, 6)


class ClampedRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-6, 6)


@pytest.mark.parametrize("make", [ClampedLayerNorm, ClampedRMSNorm])
def test_a_clamp_behind_a_norm_that_only_outliers_reach_is_seen(make) -> None:
    """The largest that a norm of 64 columns gives is about 8."""
    model = nn.Sequential(make(64))
    memopt.convert(model)
    x = 0.1 * torch.randn(3, 64)
    x[:, 5] = 50.0
    assert model(x).max() == 6.0


@pytest.mark.parametrize("form", [Channels, LayerNorm2d])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_norms_over_channels_keep_strides_and_save_no_more(form, memory) -> None:
    plain = make(form, SIZE)
    converted = converted_inside(copy.deepcopy(plain), recipes=False)
    x = torch.randn(2, SIZE, 4, 6).to(memory_format=memory).requires_grad_()
    assert converted(x).stride() == plain(x).stride()
    assert memopt.saved_bytes(converted, x) <= memopt.saved_bytes(plain, x)


def test_float64_input_of_a_float32_rms_norm_is_pytorch_s() -> None:
    plain, x = nn.RMSNorm(SIZE), torch.randn(3, SIZE, dtype=torch.float64)
    converted = converted_inside(copy.deepcopy(plain))
    expected = plain(x)
    assert expected.dtype == torch.float64
    assert torch.equal(converted(x), expected)


class SizedNorm(nn.Module):
    """As diffusers writes it: the size is an attribute also where there is no weight."""

    def __init__(self, *dim: int) -> None:
        super().__init__()
        self.dim, self.eps = dim, 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class NormOverAxes(SizedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(self.dim, keepdim=True) + self.eps)


@pytest.mark.parametrize(
    "plain",
    [
        SizedNorm(0),
        SizedNorm(1),
        SizedNorm(-1),
        NormOverAxes(-1),
        NormOverAxes(0),
        nn.LayerNorm(0),
        nn.RMSNorm(0),
        modules.PlainRMSNorm(0),
        modules.PlainRMSNorm(1),
    ],
    ids=repr,
)
def test_sizes_of_0_or_1_and_axes_where_a_size_would_be(plain: nn.Module) -> None:
    """diffusers' Mochi has norms of size 0 without a weight, whose forward does not ask for it."""
    model = nn.Sequential(copy.deepcopy(plain))
    memopt.convert(model)
    weight = next(plain.parameters(), torch.ones(8))
    x = torch.randn(4, 3, weight.numel())
    torch.testing.assert_close(model(x), plain(x))


def test_a_norm_without_a_size_of_its_own_called_on_no_columns() -> None:
    plain = UnweightedRMS()
    model = nn.Sequential(copy.deepcopy(plain))
    assert memopt.convert(model).swapped
    x = torch.randn(4, 0, requires_grad=True)
    assert torch.equal(model(x), plain(x))
