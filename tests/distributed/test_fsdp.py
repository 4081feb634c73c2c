"""Proves: models sharded by FSDP2's fully_shard have with regions the losses, gradients, parameters
and state_dict keys of the models without, to the last bit: regions that are the sharded modules,
wrapped before or after, around them and smaller than them, with and without resharding after
forward, with bfloat16 computation; and that wrapping and sharding undo neither each other nor
themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import memopt
from memopt._checkpoint.assigned import join_regions
from tests.checkpoint.support import plain
from tests.distributed.processes import WORLD_SIZE, Pair
from tests.distributed.support import (
    SIZE,
    Call,
    Results,
    assert_recomputes_and_equals,
    batch,
    block,
    train,
)

pytestmark = pytest.mark.slow  # for whichever test starts the processes


class Body(nn.Sequential):
    call: Call = staticmethod(plain)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = self.call(layer, x)
        return x


Shard = Callable[[nn.Module], nn.Module]


def no_regions(body: Body, shard: Shard) -> None:
    for layer in body:
        shard(layer)


def wrapped_then_sharded(body: Body, shard: Shard) -> None:
    for layer in body:
        shard(memopt.checkpoint_wrapper(layer))


def sharded_then_wrapped(body: Body, shard: Shard) -> None:
    for layer in body:
        memopt.checkpoint_wrapper(shard(layer))


def sharded_then_called(body: Body, shard: Shard) -> None:
    """The hooks that gather and free the parameters run inside the regions, in both passes."""
    no_regions(body, shard)
    body.call = memopt.checkpoint


def wrapped_around_several(body: Body, shard: Shard) -> None:
    no_regions(body, shard)
    memopt.checkpoint_wrapper(body)


def wrapped_around_wrapped(body: Body, shard: Shard) -> None:
    wrapped_then_sharded(body, shard)
    memopt.checkpoint_wrapper(body)


def wrapped_parts(body: Body, shard: Shard) -> None:
    """Two regions in each sharded module."""
    for layer in body:
        memopt.checkpoint_wrapper(layer[0])
        memopt.checkpoint_wrapper(layer[3])
        shard(layer)


def joined_then_sharded(body: Body, shard: Shard) -> None:
    """One region of all, whose parameters are there one module at a time: each is a region."""
    for layer in body:
        memopt.checkpoint_wrapper(layer)
    join_regions(body, tuple(name for name, _ in body.named_children()))
    for layer in body:
        shard(layer)


def wrapped_and_sharded_together(body: Body, shard: Shard) -> None:
    """The whole body is one region and one group of parameters."""
    shard(memopt.checkpoint_wrapper(body))


ARRANGEMENTS = [
    wrapped_then_sharded,
    sharded_then_wrapped,
    sharded_then_called,
    wrapped_around_several,
    wrapped_around_wrapped,
    wrapped_parts,
    joined_then_sharded,
    wrapped_and_sharded_together,
]
Arrange = Callable[[Body, Shard], None]


def shard_with(reshard_after_forward: bool, bfloat16: bool) -> Shard:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else None

    def shard(module: nn.Module) -> nn.Module:
        return fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy or MixedPrecisionPolicy(),
        )

    return shard


def run(arrange: Arrange, reshard_after_forward: bool, bfloat16: bool, passes: int = 1) -> Results:
    shard = shard_with(reshard_after_forward, bfloat16)
    torch.manual_seed(0)
    body = Body(*(block(dropout=0.5) for _ in range(3)))
    arrange(body, shard)
    model = shard(nn.Sequential(body, nn.Linear(SIZE, SIZE)))

    def backward(step: int) -> Tensor:
        loss = torch.zeros(())
        for number in range(passes):
            loss = model(batch(passes * step + number)).float().square().mean()
            loss.backward()
        return loss

    return train(model, backward, steps=2)


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("reshard", [False, True], ids=["keep", "reshard"])
@pytest.mark.parametrize("arrange", ARRANGEMENTS)
def test_two_steps_equal_those_without_regions(
    pair: Pair, arrange: Arrange, reshard: bool, bfloat16: bool
) -> None:
    assert_recomputes_and_equals(
        pair.run(run, arrange, reshard, bfloat16), pair.run(run, no_regions, reshard, bfloat16)
    )


@pytest.mark.parametrize("arrange", [wrapped_then_sharded, sharded_then_called])
def test_accumulated_gradients_equal_those_without_regions(pair: Pair, arrange: Arrange) -> None:
    assert_recomputes_and_equals(
        pair.run(run, arrange, True, False, 2), pair.run(run, no_regions, True, False, 2)
    )


def wrap_and_shard_in_both_orders() -> None:
    shard = shard_with(True, False)
    sharded_last = shard(memopt.checkpoint_wrapper(block()))
    wrapped_last = memopt.checkpoint_wrapper(shard(block()))
    for module in (sharded_last, wrapped_last):
        assert isinstance(module, FSDPModule)
        module(batch(0)).sum().backward()
        assert module[0].calls == 2
        assert memopt.unwrap(module) is module
        assert isinstance(module, FSDPModule)
        module(batch(0)).sum().backward()
        assert module[0].calls == 3


def test_module_is_both_wrapped_and_sharded_in_either_order(pair: Pair) -> None:
    pair.run(wrap_and_shard_in_both_orders)
