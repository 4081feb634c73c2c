"""Proves: in every causal, masked and seq2seq family of transformers that the tests can
build, the head is found, the family's own loss of its labels runs in chunks of rows, and loss and
gradients are as right as the plain model's; those where that is not so are named with the reason.
A loss written by hand on `.logits` is served alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt._convert.head import find_heads, make_lazy
from memopt._head.call import HeadUse, watched_heads
from tests.convert.support import errors
from tests.support.families import FAMILIES
from tests.support.selection import is_one_in
from tests.support.tiny_transformers import Tiny, tiny
from tests.support.tolerances import RESULT_ERROR_RATIO

transformers: Any = pytest.importorskip("transformers", minversion="5.23")
mappings: Any = pytest.importorskip("transformers.models.auto.modeling_auto")

KINDS = {
    "causal": mappings.MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked": mappings.MODEL_FOR_MASKED_LM_MAPPING,
    "seq2seq": mappings.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
}

PARTS = "its configuration is one of parts, which the class for text does not take"
NOT_A_LINEAR = "it multiplies by a matrix that it joins of two"
OF_PARTS = (
    *("dots3_note", "emu3", "llama4", "musicgen", "musicgen_melody"),
    *("qwen3_5", "qwen3_5_moe", "qwen4_exp"),
)
LEFT_OUT = {
    **{f"{family} causal": PARTS for family in OF_PARTS},
    "mobilebert masked": NOT_A_LINEAR,
}

LARGEST = 20_000_000


def has_class(name: str) -> bool:
    """Whether transformers has one of that kind for the family. Imports the family's file."""
    family, kind = name.split()
    known = family in transformers.CONFIG_MAPPING
    return known and transformers.CONFIG_MAPPING[family] in KINDS[kind]


def model_of(family: str, kind: str) -> Tiny:
    base = tiny(family)
    found = KINDS[kind][type(base.config)]
    return Tiny(base.config, found[0] if isinstance(found, tuple) else found)


def with_labels(model: Tiny) -> dict[str, Any]:
    inputs = model.inputs()
    inputs["labels"] = inputs.get("decoder_input_ids", inputs.get("input_ids")).clone()
    return inputs


def by_hand(output: Any, labels: Tensor) -> Tensor:
    """A loss that a training loop has."""
    logits = output.logits[:, : labels.shape[1]]
    kept = labels[:, 1:] % 3 != 0
    return F.cross_entropy(logits[:, :-1][kept], labels[:, 1:][kept])


def step(
    model: nn.Module, inputs: dict[str, Any], loss_of: Callable[[Any, Tensor], Tensor]
) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    output = model(**copy.deepcopy(inputs))
    loss = loss_of(output, inputs["labels"])
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.clone()
    return found


def compare(
    model: Tiny, inputs: dict[str, Any], loss_of: Callable[[Any, Tensor], Tensor]
) -> list[HeadUse]:
    """Only the head differs between the lazy model and the plain one."""
    plain = model.make()
    lazy, exact = copy.deepcopy(plain), copy.deepcopy(plain)
    heads = find_heads(lazy, ())
    assert heads
    make_lazy(lazy, heads)
    theirs = step(plain, inputs, loss_of)
    with watched_heads() as uses:
        ours = step(lazy, inputs, loss_of)
    reference = step_in_float64(exact, inputs, loss_of)
    if reference is None:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        return uses
    found = errors(ours, theirs, {name: value.double() for name, value in reference.items()})
    for name, (mine, plains) in found.items():
        assert mine <= RESULT_ERROR_RATIO * plains + 1e-6, (name, mine, plains)
    return uses


def step_in_float64(
    model: nn.Module, inputs: dict[str, Any], loss_of: Callable[[Any, Tensor], Tensor]
) -> dict[str, Tensor] | None:
    """None where the model's code has float32 written into it, or where its own float64 is NaN: LED
    and BLT add the lowest number of a type to another, which is below all numbers in float64.
    """
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    try:
        found = step(model.double(), wide, loss_of)
    except RuntimeError:
        return None
    return found if all(value.isfinite().all() for value in found.values()) else None


def cases() -> Iterator[Any]:
    """One in ten; the others are `thorough`."""
    for name in (f"{family} {kind}" for family in FAMILIES for kind in KINDS):
        if not is_one_in(10, name) and name not in LEFT_OUT:
            yield pytest.param(name, marks=[pytest.mark.slow, pytest.mark.thorough])
        elif has_class(name):
            yield name


@pytest.mark.parametrize("name", cases())
def test_families(name: str) -> None:
    if not has_class(name):
        pytest.skip("transformers has no such class")
    family, kind = name.split()
    model = model_of(family, kind)
    if name in LEFT_OUT:
        check_left_out(model, LEFT_OUT[name])
        return
    if model.size() > LARGEST:
        pytest.skip("its sizes are constants in its code, and too large for a test")
    inputs = with_labels(model)
    uses = compare(model, inputs, lambda output, labels: output.loss)
    assert uses
    assert all(use.losses and not use.were_made for use in uses)
    uses = compare(model, inputs, by_hand)
    assert uses
    assert not any(use.were_made for use in uses)


def check_left_out(model: Tiny, reason: str) -> None:
    if reason == NOT_A_LINEAR:
        lazy = model.make()
        make_lazy(lazy, find_heads(lazy, ()))
        with watched_heads() as uses:
            lazy(**with_labels(model))
        assert not uses
    else:
        with pytest.raises((ValueError, AttributeError)):
            model.inputs()
