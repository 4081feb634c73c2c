"""Proves: each mode is the same eager model changed from outside: the same parameters in the
same order, memopt's modules in every place that they should take, and gradients equal to the
reference mode's bit for bit.
"""

from __future__ import annotations

import copy

import pytest
import torch

import memopt
from memopt.demo.model import GPT, LayerNormThenGELU, ModelSize
from memopt.demo.modes import MODES, Mode, apply_mode

SIZE = ModelSize(layers=2, width=24, heads=3, context=12)


@pytest.fixture(scope="module")
def eager() -> GPT:
    return GPT(SIZE, torch.Generator().manual_seed(0))


def test_the_seed_decides_the_weights(eager: GPT) -> None:
    torch.manual_seed(123)  # the global generator does not
    same = GPT(SIZE, torch.Generator().manual_seed(0)).state_dict()
    other = GPT(SIZE, torch.Generator().manual_seed(1)).state_dict()
    assert all(torch.equal(value, same[name]) for name, value in eager.state_dict().items())
    assert not torch.equal(other["token.weight"], same["token.weight"])


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_parameters_stay_the_same_objects_in_the_same_order(eager: GPT, mode: Mode) -> None:
    model = copy.deepcopy(eager)
    before = dict(model.named_parameters())
    after = dict(apply_mode(model, mode).named_parameters())
    assert len(after) == len(before)
    assert all(a is b for a, b in zip(after.values(), before.values(), strict=True))
    if not mode.fused:
        assert list(after) == list(before)
        assert list(model.state_dict()) == list(eager.state_dict())


def test_fused_modes_swap_every_norm_and_activation(eager: GPT) -> None:
    model = apply_mode(copy.deepcopy(eager), MODES["fused"])
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(memopt.nn.LayerNormLinear) == 2 * SIZE.layers
    assert kinds.count(memopt.nn.GELULinear) == SIZE.layers
    assert kinds.count(memopt.nn.LayerNormGELU) == 1
    # Each LayerNormLinear holds the LayerNorm that it was made of.
    assert kinds.count(torch.nn.LayerNorm) == 2 * SIZE.layers
    assert not {torch.nn.GELU, LayerNormThenGELU} & set(kinds)
    assert all(m.approximate == "tanh" for m in model.modules() if hasattr(m, "approximate"))


def gradients(model: GPT) -> list[torch.Tensor | None]:
    tokens = torch.randint(256, (2, 4, SIZE.context), generator=torch.Generator().manual_seed(2))
    model(tokens[0], tokens[1]).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_convert_swaps_what_it_knows_and_adds_no_rounding(eager: GPT) -> None:
    """Its recipes change no bit of what the swapped modules compute; the head's class, whose
    forward is not torch.nn's, is left, and the functions that it calls are memopt's.
    """
    model = apply_mode(copy.deepcopy(eager), MODES["convert"])
    kinds = [type(module) for module in model.modules()]
    assert sum(issubclass(kind, torch.nn.LayerNorm) for kind in kinds) == 2 * SIZE.layers + 1
    assert not {torch.nn.LayerNorm, torch.nn.GELU} & set(kinds)
    assert LayerNormThenGELU in kinds
    model, without_recipes = copy.deepcopy(eager), copy.deepcopy(eager)
    memopt.convert(model, functional=False)
    memopt.convert(without_recipes, recipes=False)
    for ours, theirs in zip(gradients(model), gradients(without_recipes), strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mode", [mode for mode in MODES.values() if mode.reference])
def test_gradients_equal_the_reference_modes(eager: GPT, mode: Mode) -> None:
    ours, theirs = (
        gradients(apply_mode(copy.deepcopy(eager), one))
        for one in (mode, MODES[mode.reference or ""])
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
