"""Proves: `convert(skip=...)` leaves the modules that it names, by path, pattern, class or
predicate, with all that is inside them; and that a name which fits nothing is an error.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt._convert.swap import swap_of
from tests.convert import modules
from tests.convert.support import state


def example() -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(8),
        nn.Sequential(nn.LayerNorm(8), nn.GELU()),
        nn.Sequential(nn.LayerNorm(8), nn.GELU()),
        modules.Decorated(),
    )


def is_gelu(module: nn.Module) -> bool:
    return isinstance(module, nn.GELU)


@pytest.mark.parametrize(
    ("skip", "left", "note"),
    [
        ("1", ["1.0", "1.1"], "skipped: 1"),
        ("2.1", ["2.1"], "skipped: 2.1"),
        ("*.1", ["1.1", "2.1"], "skipped: 1.1, 2.1"),
        ("[12]", ["1.0", "1.1", "2.0", "2.1"], "skipped: 1, 2"),
        (("1", "2.0"), ["1.0", "1.1", "2.0"], "skipped: 1, 2.0"),
        (modules.Decorated, ["3", "3.act", "3.drop1", "3.drop2", "3.norm"], "skipped: 3"),
        (
            lambda m: isinstance(m, nn.GELU),
            ["1.1", "2.1", "3", "3.act"],
            "skipped: 1.1, 2.1, 3.act",
        ),
        ([nn.GELU, "0"], ["0", "1.1", "2.1", "3", "3.act"], "skipped: 0, 1.1, 2.1, 3.act"),
    ],
)
def test_what_is_skipped(skip, left: list[str], note: str) -> None:
    everything = {e.path for e in memopt.convert(example()).swapped}
    model = example()
    before = dict(zip(model.modules(), state(model), strict=True))
    report = memopt.convert(model, skip=skip)
    assert {e.path for e in report.swapped} == everything - set(left)
    assert report.left == ()
    assert sorted(report.notes[0].removeprefix("skipped: ").split(", ")) == sorted(
        note.removeprefix("skipped: ").split(", ")
    )
    named = note.removeprefix("skipped: ").split(", ")
    for path in left:
        module = model.get_submodule(path)
        if any(path == name or path.startswith(f"{name}.") for name in named):
            assert (type(module), dict(module.__dict__)) == before[module]
        else:  # the unit whose activation is skipped
            assert swap_of(module) is None


def test_a_gated_unit_calls_an_activation_that_is_skipped() -> None:
    """The last two cases above: the unit 3 is left, as its activation would not be called."""
    model = nn.Sequential(modules.Decorated())
    memopt.convert(model, skip="0.act")
    calls = []
    model[0].act.register_forward_hook(lambda *_: calls.append(1))
    model(torch.randn(2, 8))
    assert calls == [1]


def test_the_whole_model() -> None:
    model = example()
    for skip in (nn.Module, ""):
        report = memopt.convert(model, skip=skip)
        assert report.swapped == ()
        assert report.notes[0] == "skipped: (the model)"


@pytest.mark.parametrize("bad", [3, [3], int, nn.GELU(), ["1", None]])
def test_what_is_no_choice(bad: object) -> None:
    model = example()
    before = state(model)
    with pytest.raises(TypeError, match=r"^convert: skip must be a path, a subclass .*, got "):
        memopt.convert(model, skip=bad)
    assert state(model) == before


@pytest.mark.parametrize("bad", ["4", "x*", ["1", "1.2"]])
def test_a_path_that_no_module_has(bad) -> None:
    model = example()
    before = state(model)
    with pytest.raises(ValueError, match=r"^convert: skip must name modules .*, which no module"):
        memopt.convert(model, skip=bad)
    assert state(model) == before
