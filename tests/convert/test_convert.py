"""Proves: convert recognises torch.nn's modules by class and others by what they compute, and
leaves everything else, also calls of swapped modules that memopt's ops do not take.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import memopt
from memopt._convert.match import NOT_ALWAYS, SAVES_ITS_OUTPUT
from memopt._convert.rules.activation import NO_ACTIVATION
from memopt._convert.rules.norm import NO_NORM
from tests.checkpoint.support import CountCalls
from tests.convert import modules
from tests.convert.support import memopt_ops, one_step, state


class Named(nn.LayerNorm):
    """A subclass that adds to a module without changing its forward."""

    def name(self) -> str:
        return f"{self.normalized_shape}"


class Logged(nn.LayerNorm):
    """Overrides the forward, and computes the same."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.0


class Doubled(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


TORCH: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.LayerNorm(8), "memopt.nn.LayerNorm"),
    (lambda: nn.LayerNorm((4, 8), elementwise_affine=False), "memopt.nn.LayerNorm"),
    (lambda: nn.LayerNorm(8, bias=False), "memopt.nn.LayerNorm"),
    (lambda: nn.RMSNorm(8), "memopt.nn.RMSNorm"),
    (lambda: nn.GELU(), "memopt.nn.GELU"),
    (lambda: nn.GELU("tanh"), "memopt.nn.GELU"),
    (lambda: nn.SiLU(), "memopt.nn.SiLU"),
    (lambda: nn.ReLU(), "memopt.nn.ReLU"),
    (lambda: nn.Sigmoid(), "memopt.nn.Sigmoid"),
    (lambda: nn.Dropout(0.0), "memopt.nn.Dropout"),
]
OTHERS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: modules.PlainRMSNorm(8), "memopt.functional.rms_norm"),
    (
        lambda: modules.CentredRMSNorm(8),
        "memopt.functional.rms_norm(zero_centered_weight=True)",
    ),
    (lambda: modules.NanoLayerNorm(8), "memopt.functional.layer_norm"),
    (lambda: modules.NanoLayerNorm(8, bias=False), "memopt.functional.layer_norm"),
    (lambda: Logged(8), "memopt.functional.layer_norm"),
    (lambda: modules.OwnGELU(), "memopt.functional.gelu"),
    (lambda: modules.OwnSwish(), "memopt.functional.quick_gelu"),
]


@pytest.mark.parametrize(("make", "to"), TORCH + OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swapped_modules_compute_what_they_did(make, to: str, dtype: torch.dtype) -> None:
    # In front is what has a recipe, so that ReLU and Sigmoid may keep their input.
    model = nn.Sequential(memopt.nn.LayerNorm(8), make()).to(dtype)
    with torch.no_grad():
        for parameter in model[1].parameters():
            parameter.uniform_(0.5, 1.5)
    x = torch.randn(3, 4, 8, dtype=dtype, requires_grad=True)
    tensors = (x, *model.parameters())
    expected = one_step(lambda: model(x), *tensors)
    report = memopt.convert(model)
    assert [(e.path, e.to) for e in report.swapped] == [("1", to)]
    assert report.left == ()
    assert len(memopt_ops(lambda: model(x))) == (1 if "Dropout" in to else 2)
    tolerance = {"rtol": 2e-5, "atol": 1e-5}
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 4e-2, "atol": 4e-2}
    for ours, theirs in zip(one_step(lambda: model(x), *tensors), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize(("make", "to"), TORCH)
def test_a_swapped_module_of_torch_is_an_instance_of_both(make, to: str) -> None:
    model = nn.Sequential(make())
    before = type(model[0])
    memopt.convert(model)
    assert isinstance(model[0], before)
    assert isinstance(model[0], getattr(memopt.nn, to.removeprefix("memopt.nn.")))


def test_subclasses_without_a_forward_of_their_own() -> None:
    model = nn.Sequential(Named(8))
    x = torch.randn(2, 8)
    expected = model(x)
    report = memopt.convert(model)
    assert [(e.from_class, e.to) for e in report.swapped] == [("Named", "memopt.nn.LayerNorm")]
    assert isinstance(model[0], Named)
    assert model[0].name() == "(8,)"
    assert memopt_ops(lambda: model(x)) == ["memopt::_norm_forward"]
    torch.testing.assert_close(model(x), expected)


LEFT: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Doubled(8), NO_NORM),
    (
        lambda: nn.Dropout(0.1, inplace=True),
        "inplace=True: memopt's dropout does not write over its input",
    ),
    (lambda: nn.LeakyReLU(-0.5), "memopt's op takes a finite and positive negative_slope"),
    (lambda: nn.ELU(0.0), "memopt's op takes a finite and positive alpha"),
    (lambda: nn.Tanh(), "memopt has no op for it"),
    (lambda: nn.Dropout1d(), "memopt has no op for it"),
    (lambda: modules.LayerScale(8), NO_NORM),
    (lambda: modules.PartialRMSNorm(8), NO_NORM),
    (lambda: modules.NoisyRMSNorm(8), NO_NORM),
    (lambda: modules.ClippedGELU(), NO_ACTIVATION),
    (lambda: modules.WideningGELU(), NOT_ALWAYS),
    (lambda: CountCalls(), NO_ACTIVATION),
]


@pytest.mark.parametrize(("make", "reason"), LEFT)
def test_what_is_left_and_why(make, reason: str) -> None:
    module = make()
    before = state(module)
    report = memopt.convert(nn.Sequential(module))
    assert report.swapped == ()
    assert [(e.path, e.from_class, e.reason) for e in report.left] == [
        ("0", type(module).__qualname__, reason)
    ]
    assert state(module) == before


def test_modules_that_keep_a_state_are_not_called() -> None:
    model = nn.Sequential(modules.CountingGELU(), CountCalls())
    report = memopt.convert(model)
    assert report.swapped == ()
    assert model[0].calls == []
    assert model[1].calls == 0


def test_modules_that_memopt_has_nothing_for_are_not_mentioned() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 1), nn.Identity(), nn.Embedding(3, 8))
    report = memopt.convert(model)
    assert (report.swapped, report.left) == ((), ())


def test_a_forward_on_the_instance_is_honoured() -> None:
    norm = nn.LayerNorm(8)
    norm.forward = lambda x: x + 1
    model = nn.Sequential(norm)
    report = memopt.convert(model)
    assert [e.reason for e in report.left] == ["its forward was replaced on the instance"]
    assert torch.equal(model(torch.zeros(8)), torch.ones(8))


def test_modules_of_memopt_are_left_as_they_are() -> None:
    model = nn.Sequential(memopt.nn.LayerNorm(8), memopt.nn.LayerNormGELU(8), memopt.nn.RMSNorm(8))
    types = [type(m) for m in model]
    report = memopt.convert(model)
    assert (report.swapped, report.left) == ((), ())
    memopt.revert(model)
    assert [type(m) for m in model] == types


@pytest.mark.parametrize("make", [nn.ReLU, nn.Sigmoid])
def test_without_recipes_pytorch_s_stay_where_they_save_less(make) -> None:
    model = nn.Sequential(make(), nn.GELU())
    report = memopt.convert(model, recipes=False)
    assert [e.from_class for e in report.swapped] == ["GELU"]
    assert [e.reason for e in report.left] == [SAVES_ITS_OUTPUT]
    assert not report.recipes
    assert type(model) is nn.Sequential


def example() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.0), modules.PlainRMSNorm(8)
    )


def test_a_swap_is_inside_a_region_that_was_there_before() -> None:
    model = nn.Sequential(memopt.checkpoint_wrapper(nn.Sequential(nn.LayerNorm(8), CountCalls())))
    memopt.checkpoint_wrapper(model[0][0])
    memopt.convert(model)
    x = torch.randn(2, 8, requires_grad=True)
    y = nn.Linear(8, 8)(model(x))
    y.sum().backward()
    assert isinstance(model[0][0], memopt.nn.LayerNorm)
    memopt.unwrap(model)
    assert isinstance(model[0][0], memopt.nn.LayerNorm)
    memopt.revert(model)
    assert type(model[0][0]) is nn.LayerNorm


def test_classes_and_predicates_choose_regions() -> None:
    model = nn.Sequential(modules.FeedForward(), nn.Linear(8, 8), modules.FeedForward())
    report = memopt.convert(model, checkpoint=[modules.FeedForward])
    assert report.checkpointed == ("0", "2")
    report = memopt.convert(model, checkpoint=lambda m: m is model[2], offload="cpu")
    assert (report.checkpointed, report.offloaded) == ((), ("2",))
    x = torch.randn(2, 8, requires_grad=True)
    ours = one_step(lambda: model(x), x)
    for mine, theirs in zip(ours, one_step(lambda: memopt.revert(model)(x), x), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert [type(m) for m in model] == [modules.FeedForward, nn.Linear, modules.FeedForward]


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: modules.CentredRMSNorm(8)])
def test_calls_that_the_ops_do_not_take_are_pytorch_s(make) -> None:
    model, plain = nn.Sequential(make()), nn.Sequential(make())
    memopt.convert(model)
    x = torch.randn(3, 8)

    def loss(of: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: of(x).square().sum()

    for transform in (torch.func.grad, torch.func.hessian):
        ours, theirs = transform(loss(model))(x), transform(loss(plain))(x)
        torch.testing.assert_close(ours, theirs)
    ours, theirs = (torch.func.jvp(loss(m), (x,), (x,)) for m in (model, plain))
    torch.testing.assert_close(ours, theirs)
    for module in (model, plain):
        with pytest.raises(RuntimeError, match="7"):
            module(torch.randn(3, 7))
    with pytest.raises(TypeError):
        model[0](x, x)
    for by_name in (model[0], plain[0]):
        name = "x" if isinstance(by_name, modules.CentredRMSNorm) else "input"
        torch.testing.assert_close(by_name(**{name: x}), plain(x))


def test_nested_tensors_are_pytorch_s() -> None:
    model = nn.Sequential(nn.GELU())
    memopt.convert(model)
    rows = [torch.randn(2, 8), torch.randn(3, 8)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for ours, row in zip(model(nested).unbind(), rows, strict=True):
        torch.testing.assert_close(ours, nn.functional.gelu(row))


def test_under_autocast_a_norm_keeps_the_dtype_or_lowers_it() -> None:
    """Lowered, it computes in 16 bits: what it returns is the norm of the rounded input."""
    x = torch.randn(2, 8)
    for choice, dtype in (("keep", torch.float32), ("lower", torch.bfloat16)):
        model = nn.Sequential(nn.LayerNorm(8), modules.PlainRMSNorm(8))
        memopt.convert(model, autocast_norms=choice)
        rounded = model(x.to(dtype))
        with torch.autocast("cpu", torch.bfloat16):
            assert model[0](x).dtype == dtype
            assert model(x).dtype == dtype
            assert torch.equal(model(x), rounded)
        assert model(x).dtype == torch.float32


def test_autocast_norms_is_one_of_two() -> None:
    with pytest.raises(
        ValueError, match="autocast_norms must be 'keep' or 'lower', got 'bfloat16'"
    ):
        memopt.convert(nn.LayerNorm(8), autocast_norms="bfloat16")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(backend: str) -> None:
    model = nn.Sequential(example(), modules.FeedForward(), modules.Decorated())
    memopt.convert(model)
    x = torch.randn(2, 8, requires_grad=True)
    tensors = (x, *model.parameters())
    expected = one_step(lambda: model(x), *tensors)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for ours, theirs in zip(one_step(lambda: compiled(x), *tensors), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("whole", [False, True])
def test_a_converted_model_refuses_to_be_scripted(whole: bool) -> None:
    model = example()
    memopt.convert(model, recipes=whole)
    with pytest.raises(TypeError, match=r"^convert: a converted module must not be scripted"):
        torch.jit.script(nn.Sequential(model))


def test_transforms_of_torch_func_differentiate_a_converted_model() -> None:
    """They refuse saved-tensor hooks, so that recipes step aside as well."""
    model = example()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(2, 8)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    expected = torch.func.grad(loss)(parameters)
    memopt.convert(model)
    for name, gradient in torch.func.grad(loss)(parameters).items():
        torch.testing.assert_close(gradient, expected[name])


def test_a_packed_sequence_is_one_argument() -> None:
    """Though it is a tuple."""
    batch = pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    report = memopt.convert(nn.LSTM(4, 4), batch)
    assert report.bytes_before == memopt.saved_bytes(nn.LSTM(4, 4), batch)
    assert report.bytes_after < report.bytes_before  # products of gates and states
