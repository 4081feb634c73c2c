"""Proves: a converted model stays converted, and works, when other libraries change it later: hooks
of accelerate that come and go, parametrizations, torch.fx's edits of its graph.
"""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils import parametrize

import memopt
from tests.convert import modules
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


def traced(regions: bool) -> tuple[nn.Module, torch.fx.GraphModule]:
    """A converted model, and the GraphModule that is or is in it, traced down to torch.nn."""
    net = Net()
    graph = torch.fx.symbolic_trace(nn.Sequential(net.norm, net.up, net.act, net.down))
    model = nn.Sequential(graph) if regions else graph
    memopt.convert(model, checkpoint=torch.fx.GraphModule if regions else None)
    return model, graph


@pytest.mark.parametrize("regions", [False, True])
def test_graph_modules_are_copied(regions: bool) -> None:
    """PyTorch leaves the hooks and attributes of a GraphModule out of its copies. So they have
    recipes where what is around them has, or once they are converted themselves, and are no regions
    until they are made one.
    """
    model, graph = traced(regions)
    expected = one_step(lambda: model(X), *model.parameters())
    before = kept(model)
    for copied in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied is not model
        assert isinstance(copied[0] if regions else copied, torch.fx.GraphModule)
        for ours, theirs in zip(
            one_step(lambda c=copied: c(X), *copied.parameters()), expected, strict=True
        ):
            assert torch.equal(ours, theirs)
        memopt.convert(copied, checkpoint=torch.fx.GraphModule if regions else None)
        assert kept(copied) == before
    assert kept(model) == before
    memopt.revert(model)
    assert kept(model) > before
    assert type(graph).__mro__[1] is torch.fx.GraphModule


@pytest.mark.parametrize("regions", [False, True])
def test_a_graph_that_is_edited_later_is_what_runs(regions: bool) -> None:
    model, graph = traced(regions)
    norm, up, act_module, down = graph.children()
    before = kept(model)
    (act,) = (node for node in graph.graph.nodes if node.target == "2")
    with graph.graph.inserting_after(act):
        twice = graph.graph.call_function(torch.add, (act, act))
    act.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    expected = down(2 * act_module(up(norm(X))))
    graph.recompile()
    torch.testing.assert_close(model(X), expected)
    assert kept(model) == before  # the sum of two GELUs has a recipe, as each has
    memopt.revert(model)
    torch.testing.assert_close(model(X), expected)


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_parametrizations_that_were_there_before_and_go() -> None:
    """The parametrized module keeps its class, and the report says why; the others are swapped."""
    model = Net()
    plain = copy.deepcopy(model)  # before: copies of parametrized modules share a class
    for one in (model, plain):
        parametrize.register_parametrization(one.norm, "weight", Scaled())
    report = memopt.convert(model)
    reasons = {e.path: e.reason for e in report.left}
    assert reasons["norm"].startswith("it is parametrized (torch.nn.utils.parametrize)")
    x = torch.randn(3, 8, requires_grad=True)
    torch.testing.assert_close(model(x), plain(x))
    for one in (model, plain):
        parametrize.remove_parametrizations(one.norm, "weight")
    assert type(model.norm) is nn.LayerNorm
    torch.testing.assert_close(model(x), plain(x))


def test_parametrizations_that_come_and_go_after_convert() -> None:
    model = Net()
    memopt.convert(model)
    plain = copy.deepcopy(memopt.revert(copy.deepcopy(model)))
    before = type(model.norm)
    x = torch.randn(3, 8, requires_grad=True)
    for one in (model, plain):
        parametrize.register_parametrization(one.norm, "weight", Scaled())
    torch.testing.assert_close(model(x), plain(x))
    for one in (model, plain):
        parametrize.remove_parametrizations(one.norm, "weight")
    assert type(model.norm) is before
    torch.testing.assert_close(model(x), plain(x))
    assert memopt_ops(lambda: model(x))


def test_hooks_of_all_modules_see_no_stand_in() -> None:
    """Hooks that a profiler or a debugger registers for every module."""
    seen: list[nn.Module] = []
    hooks = (
        register_module_forward_hook(lambda module, *_: seen.append(module)),
        register_module_forward_pre_hook(lambda module, _: seen.append(module)),
    )
    try:
        model = nn.Sequential(Net(), modules.Decorated())
        memopt.convert(model)
        assert seen == []
        model(torch.randn(3, 8))
    finally:
        for hook in hooks:
            hook.remove()
    assert set(seen) <= set(model.modules())
