"""Proves: memopt.checkpoint_wrapper takes the place of PyTorch's own wrapper in
`apply_activation_checkpointing`, chosen by a function or by a policy, alone and before
DistributedDataParallel and fully_shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import memopt
from tests.distributed.processes import WORLD_SIZE, Pair
from tests.distributed.support import (
    Results,
    assert_recomputes_and_equals,
    batch,
    block,
    train,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block(dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Tanh(), nn.Sequential(Block(), Block()))


def apply(root: nn.Module, **how: Any) -> None:
    apply_activation_checkpointing(root, checkpoint_wrapper_fn=memopt.checkpoint_wrapper, **how)


BY_FUNCTION = {"check_fn": lambda module: isinstance(module, Block)}
BY_POLICY = {"auto_wrap_policy": ModuleWrapPolicy({Block})}


@pytest.mark.parametrize("how", [BY_FUNCTION, BY_POLICY], ids=["function", "policy"])
def test_wraps_in_place_the_modules_that_are_chosen(how: dict[str, Any]) -> None:
    root = model()
    modules, names = list(root.modules()), list(root.state_dict())
    apply(root, **how)
    assert all(a is b for a, b in zip(root.modules(), modules, strict=True))
    assert list(root.state_dict()) == names
    root(torch.randn(2, 8)).sum().backward()
    blocks = [module for module in modules if isinstance(module, Block)]
    assert [module.inner[0].calls for module in blocks] == [2, 2, 2]
    original = {type(memopt.unwrap(module)) for module in blocks}
    assert original == {Block}


def test_settings_are_bound_with_partial() -> None:
    root = model()
    wrapper = functools.partial(memopt.checkpoint_wrapper, maintain_forward_counter=True)
    apply_activation_checkpointing(root, checkpoint_wrapper_fn=wrapper, **BY_FUNCTION)
    root(torch.randn(2, 8))
    assert root[0]._checkpoint_fwd_counter == 1


def in_ddp(root: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(root)


def in_fsdp(root: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for module in (root[0], *root[2], root):
        fully_shard(module, mesh=mesh)
    return root


Parallelize = Callable[[nn.Sequential], nn.Module]


def run(parallelize: Parallelize, checkpointed: bool) -> Results:
    root = model()
    if checkpointed:
        apply(root, **BY_FUNCTION)
    parallel = parallelize(root)

    def backward(step: int) -> Tensor:
        loss = parallel(batch(step)).square().mean()
        loss.backward()
        return loss

    return train(parallel, backward)


@pytest.mark.slow  # for whichever starts the processes
@pytest.mark.parametrize("parallelize", [in_ddp, in_fsdp])
def test_training_equals_that_without_regions(pair: Pair, parallelize: Parallelize) -> None:
    assert_recomputes_and_equals(
        pair.run(run, parallelize, True), pair.run(run, parallelize, False)
    )
