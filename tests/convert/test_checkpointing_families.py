"""Proves: in every family of transformers that has gradient checkpointing, each layer of a model
that is converted runs as often as a layer of the plain one, and no more bytes are held for
backward, whether convert or gradient checkpointing came first. The gradients have the same bits as
without it, and are as right as the plain model's.

Bits alone would not show that it is on: with and without it they are the same. Families that are
not tried are named with the reason, and the reason is true.

Each family is tried in five steps of one model, and once more on a model of its own, with what a
sample leaves behind, and with regions in its place.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memopt
from tests.convert.checkpointed import (
    Run,
    checkpoint,
    convert,
    convert_with_regions,
    layers,
    no_longer_checkpoint,
    of_family,
    run,
    same_bits,
)
from tests.convert.support import NoNarrowing, errors
from tests.support.families import (
    FAMILIES,
    LARGE,
    LEFT_OUT,
    NEEDS_CACHE,
    NO_FORWARD,
    NO_KEYS,
    NO_LAYERS,
    QUICK,
    TOO_LARGE,
)
from tests.support.fingerprint import Fingerprint
from tests.support.selection import is_one_in
from tests.support.tiny_transformers import (
    Tiny,
    checkpointing_families,
    loss_of,
    tiny,
)
from tests.support.tolerances import RESULT_ERROR_RATIO

pytest.importorskip("transformers", minversion="5.23")


CALLS_FUNCTIONS = {"esmfold2", "nemotron"}
"""Families whose checkpointed layers call a function themselves. Nemotron's norm does: under
autocast it is not what PyTorch's is, so that `convert` puts no other norm in its place.
"""


def calls_functions(name: str, model: nn.Module) -> bool:
    """Whether checkpointed layers call functions that `convert` finds, or PyTorch's norms over
    channels, which call one. transformers makes a region of a layer's forward, not of the call of
    the layer, so that the function is PyTorch's in both runs.
    """
    norms = (nn.GroupNorm, nn.modules.batchnorm._NormBase)  # _NormBase: batch and instance norms
    inside = [m for layer in layers(model).values() for m in layer.modules()]
    return name in CALLS_FUNCTIONS or any(isinstance(m, norms) for m in inside)


def families(one_in: int) -> pytest.MarkDecorator:
    """Parametrizes a test by all families: a few are quick, and but for one in so many the others
    are `thorough`.
    """
    marks = {
        name: [pytest.mark.slow, *[pytest.mark.thorough] * (not is_one_in(one_in, name))]
        for name in FAMILIES
        if name not in QUICK
    }
    return pytest.mark.parametrize(
        "name", [pytest.param(f, marks=marks.get(f, ())) for f in FAMILIES]
    )


@families(one_in=6)
def test_each_layer_runs_as_often_and_holds_no_more(name: str) -> None:
    family = tiny(name)
    model = family.make()
    plain = of_family(family, model, count=False)  # fills what a model keeps from its first call
    checkpoint(model)
    alone = of_family(family, model)
    assert sum(alone.forwards.values()) > sum(plain.forwards.values())  # else it proves nothing
    convert(model)
    before = of_family(family, model)
    no_longer_checkpoint(model)
    converted = of_family(family, model, count=False)
    checkpoint(model)
    after = of_family(family, model)

    assert converted.forwards == plain.forwards
    assert_as_right(family, converted, plain)
    for both in (before, after):
        assert both.forwards == alone.forwards
        assert both.held <= alone.held
    assert same_bits(before, after)
    # Where a tensor goes to several layers its gradients are added in another order, as in plain.
    bits = same_bits(alone, plain) and not calls_functions(name, model)
    assert same_bits(after, converted) or not bits
    assert_as_right(family, after, converted)


@families(one_in=48)
def test_before_its_first_call(name: str) -> None:
    """A sample leaves all as it was: hooks that a first call installs, attributes, buffers.
    Converted before its first call a model has the gradients of one that was called before; with
    regions too.
    """
    family = tiny(name)
    model, inputs = family.make(), family.inputs()
    checkpoint(model)
    fingerprint = Fingerprint(model, inputs)
    memopt.convert(model, inputs)
    memopt.revert(model)
    assert Fingerprint(model, inputs).differences(fingerprint) == []

    other = family.make()
    plain = of_family(family, other, count=False)
    checkpoint(other)
    alone = of_family(family, other)
    no_longer_checkpoint(other)
    convert(other)
    converted = of_family(family, other, count=False)
    bits = same_bits(alone, plain) and not calls_functions(name, other)

    no_longer_checkpoint(model)
    convert(model)
    assert same_bits(of_family(family, model, count=False), converted)
    checkpoint(model)
    first = of_family(family, model)
    assert first.forwards == alone.forwards
    assert first.held <= alone.held
    assert same_bits(first, converted) or not bits

    convert_with_regions(model)
    regions = of_family(family, model)
    assert regions.held <= alone.held
    assert same_bits(regions, converted) or not bits


def assert_as_right(family: Tiny, ours: Run, theirs: Run) -> None:
    """The same gradients but for rounding; where sums are long, as near to float64 as plain."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    names = [n for n, g in theirs.gradients.items() if g.numel()]
    largest = max(float(theirs.gradients[n].abs().max()) for n in names)
    if all(
        float((ours.gradients[n] - theirs.gradients[n]).abs().max()) <= 1e-5 * largest
        for n in names
    ):
        return
    each = (ours.gradients, theirs.gradients, exact_gradients(family))
    our_error, their_error = errors(*({f"gradient of {n}": g[n] for n in names} for g in each))[
        "all"
    ]
    assert our_error <= RESULT_ERROR_RATIO * their_error


def exact_gradients(family: Tiny) -> dict[str, Tensor]:
    """Of the plain model in float64 throughout. Its experts run one after the other: the grouped
    product, transformers' default, has no kernel for float64.
    """
    own = dataclasses.replace(family, config=copy.deepcopy(family.config))
    model: Any = own.make().double()
    model.set_experts_implementation("eager")
    inputs = pytree.tree_map_only(
        Tensor, lambda v: v.double() if v.is_floating_point() else v, family.inputs()
    )
    with NoNarrowing():
        return run(model, lambda: loss_of(model(**inputs)), count=False).gradients


@pytest.mark.slow
def test_every_family_is_tried_or_named() -> None:
    assert len(FAMILIES) + len(LEFT_OUT) > 600
    assert not set(FAMILIES) & set(LEFT_OUT)
    assert {*FAMILIES, *LEFT_OUT} == checkpointing_families()


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_reason_to_leave_a_family_out(name: str) -> None:
    """A family that can be tried, with another transformers or with more packages, fails here."""
    assert why_not(name) == LEFT_OUT[name]


def why_not(name: str) -> str:
    """The reason for which a family cannot be tried, as in LEFT_OUT; "" where it can."""
    try:
        family = tiny(name)
        if family.size() > LARGE:
            return TOO_LARGE
        model = family.make()
    except ImportError as e:
        package = re.search("timm|scipy|torchaudio", str(e))
        return f"needs {package[0]}" if package else str(e)
    except ValueError as e:
        return NO_KEYS if "producing a cache is different" in str(e) else str(e)
    if type(model).forward is nn.Module.forward:
        return NO_FORWARD
    try:
        checkpoint(model)
    except ValueError as e:
        return NO_LAYERS if "not compatible with gradient checkpointing" in str(e) else str(e)
    if not layers(model):
        return NO_LAYERS
    inputs = family.inputs()
    try:
        forwards = run(model, lambda: loss_of(model(**inputs)), count=False).forwards
    except AttributeError as e:
        return NEEDS_CACHE if "get_seq_length" in str(e) else str(e)
    return "" if max(forwards.values(), default=1) > 1 else NO_LAYERS
