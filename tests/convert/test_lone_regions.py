"""Proves: convert makes no region of what a recipe makes again for less, and the report says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memopt
from memopt._checkpoint.wrapper import settings_of
from tests.convert import modules

SIZE = 16


def model_of(make: Callable[[], nn.Module]) -> nn.Sequential:
    parts = [nn.Sequential(nn.Linear(SIZE, SIZE), make(), nn.Linear(SIZE, SIZE)) for _ in range(3)]
    return nn.Sequential(*parts)


ONE_OP: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(SIZE),
    "a norm of one's own": lambda: modules.PlainRMSNorm(SIZE),
    "GELU": nn.GELU,
    "ReLU": nn.ReLU,
    "an activation of one's own": modules.OwnSwish,
    "Dropout": lambda: nn.Dropout(0.5),
}


@pytest.mark.parametrize("make", ONE_OP.values(), ids=ONE_OP)
def test_what_is_one_op_is_no_region(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(64, SIZE, requires_grad=True)
    without, model = model_of(make), model_of(make)
    fewest = memopt.convert(without, x).bytes_after
    report = memopt.convert(model, x, checkpoint=type(model[0][1]))
    assert report.bytes_after == fewest
    assert report.checkpointed == ()
    assert not any(settings_of(module) is not None for module in model.modules())
    assert "no regions, since recipes keep less: 0.1, ..., 2.1" in report.notes
    memopt.revert(model)
    assert type(model[0][1]) is type(make())


def test_others_among_those_chosen_are() -> None:
    model = nn.Sequential(modules.FeedForward(), nn.LayerNorm(8))
    report = memopt.convert(model, checkpoint=[modules.FeedForward, nn.LayerNorm])
    assert report.checkpointed == ("0",)
    assert "no regions, since recipes keep less: 1" in report.notes


@pytest.mark.parametrize("options", [{"recipes": False}, {"skip": "*"}], ids=str)
def test_without_its_recipe_it_is_one(options: dict[str, object]) -> None:
    model = model_of(lambda: nn.LayerNorm(SIZE))
    report = memopt.convert(model, checkpoint=nn.LayerNorm, **options)
    assert report.checkpointed == ("0.1", "1.1", "2.1")


def test_inputs_leave_the_device_where_that_is_asked_for() -> None:
    model = model_of(lambda: nn.LayerNorm(SIZE))
    assert memopt.convert(model, checkpoint=nn.LayerNorm, offload="cpu").offloaded == (
        "0.1",
        "1.1",
        "2.1",
    )


def test_a_region_from_before_gets_the_new_settings() -> None:
    model = model_of(lambda: nn.LayerNorm(SIZE))
    memopt.checkpoint_wrapper(model[0][1], offload_to_cpu=True)
    report = memopt.convert(model, checkpoint=nn.LayerNorm)
    assert report.checkpointed == ("0.1",)
    memopt.revert(model)
    settings = settings_of(model[0][1])
    assert settings is not None
    assert settings.offload
