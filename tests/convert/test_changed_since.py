"""Proves: a converted model stays converted, and works, when other libraries change it later: hooks
of accelerate that come and go, parametrizations, torch.fx's edits of its graph.
"""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import pkgutil
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import memopt
from tests.convert.support import memopt_ops, one_step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x))))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CONVERTED = 2 * 4 * 4 + 4 * 16 * 4  # the norm's statistics, and what GELU reads


def kept(model: nn.Module) -> int:
    """Bytes saved for backward beside the input."""
    return sum(s.nbytes for s in memopt.saved_bytes(model, X).storages if not s.is_input)


def assert_converted(model: nn.Module) -> None:
    assert kept(model) == CONVERTED
    assert {"memopt::_norm_forward", "memopt::_activation_forward"} <= set(
        memopt_ops(lambda: model(X))
    )


def hooked(model: nn.Module, remove: bool) -> None:
    hooks = pytest.importorskip("accelerate").hooks
    if remove:
        hooks.remove_hook_from_module(model, recurse=True)
    else:
        hooks.add_hook_to_module(model, hooks.ModelHook())


@pytest.mark.slow
@pytest.mark.parametrize("regions", [False, True])
def test_accelerate_s_hooks_removed_after_convert(regions: bool) -> None:
    model = nn.Sequential(Net())
    plain = kept(model)
    target = model[0] if regions else model
    hooked(target, remove=False)
    memopt.convert(model, checkpoint=Net if regions else None)
    with_hooks = kept(model)
    assert with_hooks < plain
    hooked(target, remove=True)
    assert kept(model) == with_hooks
    memopt.revert(model)
    assert (type(target), kept(model)) == (Net if regions else nn.Sequential, plain)


def test_a_forward_that_is_put_back_is_the_converted_one() -> None:
    """What accelerate and others do, who keep `module.forward` and set it again."""
    for first in ("convert", "keep"):
        model = Net()
        if first == "convert":
            memopt.convert(model)
        forward = model.forward
        model.forward = functools.wraps(forward)(lambda x, forward=forward: forward(x))
        if first == "keep":
            memopt.convert(model)
        model.forward = forward
        assert_converted(model)
        memopt.revert(model)
        assert type(model) is Net
        assert not any(k.startswith("_memopt") for k in model.__dict__)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["convert", "prepare"])
def test_accelerate_s_unwrapping(first: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = Net()
    if first == "convert":
        memopt.convert(model)
    prepared = accelerator.prepare(model)
    if first == "prepare":
        memopt.convert(prepared)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped is model
    assert_converted(model)
