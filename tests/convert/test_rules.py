"""Proves: a rule of your own is asked before memopt's, about the modules it was registered for, and
until it is removed; a module that it swaps is swapped in every respect; and a rule that raises or
returns something else is named.
"""

from __future__ import annotations

import copy
import doctest
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt._convert import Context, ForwardSwap, Reason, Swap, register, register_rule, rule
from memopt._convert.match import match
from memopt._convert.register import registered_rules
from memopt._convert.rules import RULES
from memopt._convert.swap import swap_of
from tests.convert import modules
from tests.convert.support import memopt_ops, one_step, state


class LogNorm(nn.Module):
    """An RMS norm that probes do not see: its weight is stored as its logarithm."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.linspace(-1, 1, size))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * F.rms_norm(x, x.shape[-1:], self.log_weight.exp(), 1e-6)


class Sized(LogNorm):
    """Keeps the forward."""


class Shifted(LogNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def log_norm(module: LogNorm, x: Tensor, scale: float = 1.0) -> Tensor:
    y = memopt.functional.rms_norm(x, x.shape[-1:], module.log_weight.exp(), 1e-6)
    return y if scale == 1.0 else scale * y


SWAP = ForwardSwap(log_norm, to="memopt.functional.rms_norm")


def swap_log_norm(module: nn.Module, context: Context) -> Swap:
    return SWAP


@pytest.fixture(autouse=True)
def no_rule_stays():
    assert registered_rules() == ()
    yield
    for handle in list(handles):
        handle.remove()
    handles.clear()
    assert registered_rules() == ()


handles: list = []


def registered(*args):
    handles.append(register_rule(*args))
    return handles[-1]


def example() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), LogNorm(), nn.Sequential(Sized(), nn.LayerNorm(8)))


def test_the_example_of_the_documentation() -> None:
    found = doctest.DocTestFinder().find(rule, "rule", globs={})
    (test,) = [t for t in found if t.examples]
    result = doctest.DocTestRunner().run(test)
    assert result.attempted == 8
    assert result.failed == 0
    assert len(registered_rules()) == 1
    register._registered.clear()


def test_a_rule_of_your_own_swaps() -> None:
    registered(swap_log_norm, LogNorm)
    model = example()
    x = torch.randn(3, 8, requires_grad=True)
    tensors = (x, *model.parameters())
    before = state(model)
    expected = one_step(lambda: model(x), *tensors)
    report = memopt.convert(model, x.detach())
    assert [(e.path, e.from_class, e.to) for e in report.swapped] == [
        ("1", "LogNorm", "memopt.functional.rms_norm"),
        ("2.0", "Sized", "memopt.functional.rms_norm"),
        ("2.1", "LayerNorm", "memopt.nn.LayerNorm"),
    ]
    assert report.bytes_after < report.bytes_before
    assert memopt_ops(lambda: model(x)).count("memopt::_norm_forward") == 3
    for ours, theirs in zip(one_step(lambda: model(x), *tensors), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert swap_of(twin[1]) == SWAP
        assert torch.equal(twin(x), model(x))
    memopt.revert(model)
    assert state(model) == before


def test_further_arguments_and_unsupported_calls() -> None:
    registered(swap_log_norm, LogNorm)
    plain, model = LogNorm(), nn.Sequential(LogNorm())
    memopt.convert(model)
    module, x = model[0], torch.randn(3, 8)
    for call in (lambda m: m(x, 2.0), lambda m: m(x=x, scale=2.0), lambda m: m(x, scale=2.0)):
        torch.testing.assert_close(call(module), call(plain))
        assert memopt_ops(lambda call=call: call(module))
    ours, theirs = (torch.func.jvp(m, (x,), (x,)) for m in (module, plain))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(TypeError):
        module()
    memopt.revert(module)
    assert memopt_ops(lambda: module(x)) == []


def test_a_swap_of_your_own_compiles() -> None:
    registered(swap_log_norm, LogNorm)
    model, x = nn.Sequential(LogNorm()), torch.randn(3, 8)
    memopt.convert(model)
    expected = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_subclasses_with_another_forward_are_not_asked_about() -> None:
    registered(swap_log_norm, LogNorm)
    report = memopt.convert(nn.Sequential(Shifted()))
    assert report.swapped == ()


def test_the_newest_rule_is_asked_first_and_before_memopt_s() -> None:
    asked: list[str] = []

    def plain_norms(module: nn.Module, context: Context) -> Reason | None:
        asked.append("plain_norms")
        return Reason("we want it plain") if isinstance(module, nn.LayerNorm) else None

    def nothing_to_say(module: nn.Module, context: Context) -> None:
        asked.append("nothing_to_say")

    registered(plain_norms)
    registered(nothing_to_say, nn.LayerNorm)
    report = memopt.convert(nn.Sequential(nn.LayerNorm(8), nn.GELU()))
    assert [(e.path, e.reason) for e in report.left] == [("0", "we want it plain")]
    assert [e.path for e in report.swapped] == ["1"]
    # The GELU first, which is the last; then the norm; then the model.
    assert asked == ["plain_norms", "nothing_to_say", "plain_norms", "plain_norms"]


def test_a_reason_without_text_is_not_mentioned() -> None:
    registered(lambda module, context: Reason(""), nn.LayerNorm)
    report = memopt.convert(nn.Sequential(nn.LayerNorm(8)))
    assert (report.swapped, report.left) == ((), ())


def test_rules_can_be_removed_and_scoped() -> None:
    handle = registered(swap_log_norm, LogNorm)
    with register_rule(lambda module, context: Reason("not now"), LogNorm):
        assert [e.reason for e in memopt.convert(nn.Sequential(LogNorm())).left] == ["not now"]
    model = nn.Sequential(LogNorm())
    assert len(memopt.convert(model).swapped) == 1
    handle.remove()
    assert isinstance(model[0], LogNorm)
    assert memopt_ops(lambda: model(torch.randn(2, 8)))
    assert memopt.convert(nn.Sequential(LogNorm())).swapped == ()


def test_the_context() -> None:
    seen: dict[str, tuple] = {}
    probed: list[nn.Module] = []

    def look(module: nn.Module, context: Context) -> None:
        context.once(probed.append, module)
        answers = [context.answer(child) for child in module.children()]
        seen[context.path(module)] = (context.recipes, answers)

    registered(look)
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(8), nn.ReLU()), nn.LayerNorm(8))
    modules = [model[1], model[0][1], model[0], model]
    memopt.convert(model, recipes=False)
    norm, relu = seen["0"][1]
    assert isinstance(norm, Swap)
    assert isinstance(relu, Reason)
    assert list(seen) == ["1", "0.1", "0.0", "0", ""]
    assert {recipes for recipes, _ in seen.values()} == {False}
    # The second norm is like the first; the two Sequentials are not alike.
    assert probed == modules


def test_a_swap_that_wants_recipes_is_left_without() -> None:
    swap = ForwardSwap(log_norm, to="memopt.functional.rms_norm", with_recipes_only=True)
    registered(lambda module, context: swap, LogNorm)
    assert len(memopt.convert(nn.Sequential(LogNorm()), recipes=False).left) == 1
    assert len(memopt.convert(nn.Sequential(LogNorm())).swapped) == 1


def raises(module: nn.Module, context: Context) -> None:
    raise KeyError("oh")


def returns_text(module: nn.Module, context: Context) -> str:
    return "no swap"


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (raises, RuntimeError, "raises must not raise, got KeyError: 'oh', for"),
        (returns_text, TypeError, "returns_text must return a Swap, a .*, got 'no swap' for"),
    ],
)
def test_a_bad_rule_is_named(bad, kind, message: str) -> None:
    registered(bad, LogNorm)
    model = example()
    before = state(model)
    name = rf"{__name__}\.{message}"
    with pytest.raises(kind, match=rf"^convert: rule {name} Sized at '2\.0'$"):
        memopt.convert(model)
    assert state(model) == before


class FailingSwap(Swap):
    def becomes(self) -> str:
        return "nothing"

    def apply(self, module: nn.Module) -> None:
        module.training = False
        raise ValueError("in apply")


def test_a_swap_that_raises_undoes_all() -> None:
    registered(lambda module, context: FailingSwap(), LogNorm)
    model = example()
    before = state(model)
    with pytest.raises(ValueError, match="in apply"):
        memopt.convert(model)
    assert state(model) == before


@pytest.mark.parametrize("bad", [None, "rule", LogNorm])
def test_what_is_no_rule(bad: object) -> None:
    with pytest.raises(TypeError, match=r"^register_rule: rule must be a function .*, got "):
        register_rule(bad)


@pytest.mark.parametrize("bad", [None, int, LogNorm(), swap_log_norm])
def test_what_is_no_class(bad: object) -> None:
    with pytest.raises(TypeError, match=r"^register_rule: classes must be subclasses .*, got "):
        register_rule(swap_log_norm, bad)
    with pytest.raises(TypeError, match=r"^rule: classes must be subclasses .*, got "):
        rule(bad)


def test_a_decorator_without_classes() -> None:
    with pytest.raises(TypeError, match=r"^rule: takes the classes that the rule is for, got none"):
        rule()


@pytest.mark.parametrize(("forward", "to"), [(None, "x"), (log_norm, None)])
def test_a_swap_of_other_things(forward: object, to: object) -> None:
    with pytest.raises(TypeError, match=r"^ForwardSwap: \w+ must be .*, got None"):
        ForwardSwap(forward, to)


def test_memopt_s_rules_answer_alone_as_in_the_list() -> None:
    """One model with something for each; no two rules contend for a module."""
    model = nn.Sequential(
        memopt.nn.RMSNorm(8),
        nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"),
        nn.GELU(),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        modules.PlainRMSNorm(8),
        modules.OwnGELU(),
        modules.FeedForward(),
        modules.ClippedGELU(),
    )
    answers = {m.path: m.answer for m in match(Context(model, True), RULES)}
    for own_rule, path in zip(RULES, map(str, range(len(RULES))), strict=True):
        (alone,) = [m for m in match(Context(model, True), [own_rule]) if m.path == path]
        assert alone.answer == answers[path]
        others = match(Context(model, True), [r for r in RULES if r is not own_rule])
        assert path not in [m.path for m in others if m.answer == alone.answer]


def test_the_names_are_on_the_function_too() -> None:
    assert memopt.convert.rule is rule
    assert memopt.convert.register_rule is register_rule
    assert memopt.convert.ForwardSwap is ForwardSwap
    assert memopt.convert.Reason is Reason
