"""Proves: revert gives every module the class and attributes that it had, whatever was put around
it before or since; and where it raises, nothing is reverted.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import memopt
from memopt._checkpoint.wrapper import settings_of
from tests.convert import modules
from tests.convert.support import state


def example() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        modules.FeedForward(),
        nn.Sequential(modules.PlainRMSNorm(8), nn.Dropout(0.0)),
        modules.FeedForward(),
    )


@pytest.mark.parametrize("recipes", [False, True])
@pytest.mark.parametrize("checkpoint", [None, [modules.FeedForward]])
def test_everything_is_as_it_was(recipes: bool, checkpoint) -> None:
    model = example()
    x = torch.randn(2, 8)
    before, expected = state(model), model(x)
    memopt.convert(model, x, recipes=recipes, checkpoint=checkpoint)
    model(x).sum().backward()
    model.zero_grad()
    assert memopt.revert(model) is model
    assert state(model) == before
    assert torch.equal(model(x), expected)


def test_a_part_may_be_reverted() -> None:
    model = example()
    memopt.convert(model)
    memopt.revert(model[3])
    assert type(model[3][0]) is modules.PlainRMSNorm
    assert isinstance(model[1], memopt.nn.LayerNorm)


def test_a_model_that_nobody_converted() -> None:
    model = example()
    memopt.checkpoint_wrapper(model[0])
    before = state(model)
    memopt.revert(model)
    assert state(model) == before


def test_regions_have_their_settings_again() -> None:
    model = example()
    memopt.checkpoint_wrapper(model[0])
    memopt.checkpoint_wrapper(model[2], offload_to_cpu=True)
    before = state(model)
    memopt.convert(model, checkpoint=[modules.FeedForward, nn.LayerNorm])
    settings = settings_of(model[2])
    assert settings is not None
    assert settings.offload is None
    memopt.convert(model, checkpoint=[modules.FeedForward], offload="cpu")
    memopt.revert(model)
    assert state(model) == before


def test_a_region_that_was_unwrapped_since() -> None:
    model = example()
    before = state(model)
    memopt.convert(model, checkpoint=[modules.FeedForward])
    memopt.unwrap(model)
    memopt.revert(model)
    assert state(model) == before


def test_around_and_inside_regions() -> None:
    """What was wrapped before and what was wrapped since stays wrapped."""
    model = memopt.checkpoint_wrapper(example())
    memopt.convert(model)
    memopt.checkpoint_wrapper(model[1])
    memopt.revert(model)
    assert settings_of(model) is not None
    assert settings_of(model[1]) is not None
    memopt.unwrap(model)
    assert type(model) is nn.Sequential
    assert type(model[1]) is nn.LayerNorm


def test_unwrapping_a_converted_model_leaves_it_converted() -> None:
    model = example()
    memopt.convert(model)
    converted = state(model)
    memopt.checkpoint_wrapper(model)
    memopt.unwrap(model)
    assert state(model) == converted


def test_a_forward_set_on_the_instance_before_and_since() -> None:
    """As accelerate sets one, which calls the method that it found."""
    model = example()
    calls: list[str] = []
    found = model.forward
    model.forward = lambda x: (calls.append("before"), found(x))[1]
    before = model.forward
    memopt.convert(model)
    inner = model.forward
    model.forward = lambda x: (calls.append("since"), inner(x))[1]
    since = model.forward
    x = torch.randn(2, 8)
    model(x)
    assert calls == ["since", "before"]
    memopt.revert(model)
    assert model.forward is since
    calls.clear()
    expected = nn.Sequential.forward(model, x)
    assert torch.equal(model(x), expected)
    assert calls == ["since", "before"]
    del model.forward
    model.forward = before
    assert torch.equal(model(x), expected)


def test_instance_forwards_stay_in_order_under_two_changes() -> None:
    model = example()
    calls: list[str] = []
    found = model.forward
    model.forward = lambda x: (calls.append("own"), found(x))[1]
    own = model.forward
    memopt.checkpoint_wrapper(model)
    memopt.convert(model)
    memopt.unwrap(model)
    model(torch.randn(2, 8))
    assert calls == ["own"]
    assert model.forward is own
    memopt.revert(model)
    assert model.forward is own


def test_a_class_that_a_container_got_since_stays() -> None:
    """convert does not touch it."""
    model = example()
    memopt.convert(model)
    model.__class__ = type("Sharded", (type(model),), {})
    memopt.revert(model)
    assert type(model).__name__ == "Sharded"
    assert not model._forward_pre_hooks


def test_a_region_whose_class_was_changed_since_is_one_no_more() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    memopt.convert(model, checkpoint=lambda module: module is model[0])
    model[0].__class__ = type("Sharded", (type(model[0]),), {})
    memopt.revert(model)
    assert type(model[0]).__name__ == "Sharded"
    assert settings_of(model[0]) is None


def test_a_class_of_a_swapped_module_that_was_changed_since_is_refused() -> None:
    model = example()
    memopt.convert(model, checkpoint=[modules.FeedForward])
    parametrizations.weight_norm(model[1])
    before = state(model)
    with pytest.raises(RuntimeError, match=r"^revert: mod\w+ must have the class.*, got "):
        memopt.revert(model)
    assert state(model) == before
