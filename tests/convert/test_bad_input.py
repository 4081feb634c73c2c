"""Proves: what convert and revert cannot take raises an error that names it, and after any error
the model is as it was.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import memopt
from memopt._convert.swap import ClassSwap
from tests.convert import modules
from tests.convert.support import state


def example() -> nn.Sequential:
    blocks = nn.ModuleList(modules.FeedForward() for _ in range(2))
    return nn.Sequential(nn.LayerNorm(8), *blocks)


@pytest.mark.parametrize("model", [None, "model", nn.LayerNorm, torch.ones(2), [nn.GELU()]])
@pytest.mark.parametrize("function", [memopt.convert, memopt.revert])
def test_no_module(function, model: object) -> None:
    name = function.__name__
    with pytest.raises(TypeError, match=rf"^{name}: model must be an nn.Module, got \w+$"):
        function(model)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(8))])
def test_a_scripted_model(how) -> None:
    scripted = how(nn.Sequential(nn.LayerNorm(8)))
    with pytest.raises(TypeError, match=r"^convert: model must not be a ScriptModule .*, got "):
        memopt.convert(scripted)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_part_is_left() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.GELU())), nn.GELU())
    report = memopt.convert(model)
    assert [e.path for e in report.swapped] == ["1"]
    assert model(torch.zeros(2)).shape == (2,)


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_model(inside: bool) -> None:
    compiled = torch.compile(example(), backend="eager")
    model = nn.Sequential(compiled) if inside else compiled
    before = state(model)
    where = " at '0'" if inside else ""
    with pytest.raises(
        TypeError,
        match=rf"^convert: model must not be compiled, got OptimizedModule{where}; convert it ",
    ):
        memopt.convert(model)
    assert state(model) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantised_model() -> None:
    model = torch.ao.quantization.quantize_dynamic(example(), {nn.Linear}, torch.qint8)
    before = state(model)
    with pytest.raises(
        TypeError,
        match=r"^convert: model must not be quantised .*, got torch\.ao.*Linear at '1.w1'",
    ):
        memopt.convert(model)
    assert state(model) == before


@pytest.mark.parametrize(
    "sample", [(torch.ones(2, 8), torch.ones(2, 8)), {"x": 1}, [], {}], ids=repr
)
def test_a_sample_that_does_not_fit(sample: object) -> None:
    model = example()
    before = state(model)
    with pytest.raises(
        ValueError, match=rf"^convert: batch must .* got {type(sample).__name__} for Seq"
    ):
        memopt.convert(model, sample)
    assert state(model) == before


@pytest.mark.parametrize("sample", [torch.ones(2, 7), "text"], ids=["shape", "string"])
def test_the_model_s_own_error_stays_what_it_is(sample: object) -> None:
    """Its type, its text, its cause and its traceback; a note says who ran the model."""
    model = example()
    before = state(model)
    with pytest.raises((RuntimeError, TypeError)) as plain:
        model(sample)
    with pytest.raises(plain.type) as raised:
        memopt.convert(model, sample)
    assert str(raised.value) == str(plain.value)
    assert raised.value.__cause__ is plain.value.__cause__ is None
    # Behind it may be the mode that sees what a rehearsal writes.
    assert plain.traceback[-1].name in [entry.name for entry in raised.traceback]
    assert raised.value.__notes__ == [
        "convert: Sequential raised this when it ran with batch to count bytes, as it was. "
        "It is as it was before convert."
    ]
    assert state(model) == before


@pytest.mark.parametrize("choice", ["norm", 3, [3], [], int, [nn.Linear, int], [nn.Linear(2, 2)]])
def test_choices_of_another_kind(choice: object) -> None:
    model = example()
    before = state(model)
    with pytest.raises(TypeError, match=r"^convert: checkpoint must be a function .*, got "):
        memopt.convert(model, checkpoint=choice)
    assert state(model) == before


@pytest.mark.parametrize(
    ("place", "kind"), [(True, TypeError), (3, TypeError), ("gpu", ValueError)]
)
def test_places_that_are_none(place: object, kind: type[Exception]) -> None:
    model = example()
    before = state(model)
    with pytest.raises(kind, match=r"^convert: offload: must be 'cpu', 'disk' or a path, got "):
        memopt.convert(model, offload=place)
    assert state(model) == before


def test_no_blocks_to_checkpoint() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.GELU())
    before = state(model)
    with pytest.raises(ValueError, match=r"model must have an nn\.ModuleList"):
        memopt.convert(model, checkpoint=True)
    assert state(model) == before


def test_a_predicate_that_raises() -> None:
    model = example()
    before = state(model)

    def raises(module: nn.Module) -> bool:
        raise KeyError("predicate")

    with pytest.raises(KeyError, match="predicate"):
        memopt.convert(model, checkpoint=raises)
    assert state(model) == before


class Final(type(nn.Module)):
    """A metaclass that allows no subclass."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict):
        if any(isinstance(base, Final) for base in bases):
            raise TypeError(f"{name} is final")
        return super().__new__(mcs, name, bases, namespace)


class FinalNorm(nn.LayerNorm, metaclass=Final):
    pass


def test_a_class_that_allows_no_subclass_in_the_middle() -> None:
    model = nn.Sequential(nn.LayerNorm(8), FinalNorm(8), nn.GELU())
    before = state(model)
    with pytest.raises(
        TypeError, match=r"^convert: module must have a class that can be subclassed"
    ):
        memopt.convert(model)
    assert state(model) == before


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 3])
def test_an_error_in_the_middle(monkeypatch: pytest.MonkeyPatch, kind, at: int) -> None:
    model = example()
    before = state(model)
    calls = 0
    swap = ClassSwap.apply

    def failing(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise kind("in the middle")
        swap(*args)

    monkeypatch.setattr(ClassSwap, "apply", failing)
    with pytest.raises(kind, match="in the middle"):
        memopt.convert(model, checkpoint=[modules.FeedForward])
    assert calls == at
    assert state(model) == before


def test_a_second_measurement_that_fails_undoes_all() -> None:
    class Fails(nn.Module):
        """Its forward raises once the norm is memopt's."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(self.norm, memopt.nn.LayerNorm):
                raise RuntimeError("once only")
            return self.norm(x)

    model = nn.Sequential(Fails())
    before = copy.copy(state(model))
    with pytest.raises(RuntimeError, match=r"^once only\n") as raised:
        memopt.convert(model, torch.ones(2, 8))
    assert ", converted; as it was, it did not." in raised.value.__notes__[0]
    assert state(model) == before


def test_quantisation_aware_training_is_training() -> None:
    """torch.ao.nn.qat's layers have gradients, unlike what they become afterwards."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        torch.ao.quantization.prepare_qat(model, inplace=True)
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    assert [entry.path for entry in memopt.convert(model, x).swapped] == ["0", "2"]
    for one in (model, plain):
        one(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
