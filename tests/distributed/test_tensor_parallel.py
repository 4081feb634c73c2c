"""Proves: models whose weights and activations are DTensors have with regions the losses, gradients
and parameters of the models without, to the last bit: tensor and sequence parallel blocks, and
regions with DTensor arguments; and that a DTensor argument is checked for writes in place.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import memopt
from tests.checkpoint.support import plain
from tests.distributed.processes import WORLD_SIZE, Pair
from tests.distributed.support import (
    REGIONS,
    SIZE,
    Call,
    Region,
    Results,
    assert_recomputes_and_equals,
    batch,
    block,
    call_of,
    train,
    wrap_for,
)

pytestmark = pytest.mark.slow  # for whichever test starts the processes

# For each part of a block: LayerNorm, CountingLinear, Tanh, Dropout, Linear.
STYLES = {
    "tensor parallel": {"1": ColwiseParallel(), "4": RowwiseParallel()},
    "sequence parallel": {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "4": RowwiseParallel(output_layouts=Shard(0)),
    },
    "activations stay DTensors": {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "4": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    },
}


class Model(nn.Module):
    def __init__(self, style: str, region: Region) -> None:
        super().__init__()
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        blocks = [nn.Sequential(nn.LayerNorm(SIZE), *block()) for _ in range(2)]
        for module in blocks:
            parallelize_module(module, mesh, STYLES[style])
        wrap_for(region, blocks)
        self.blocks, self.call = nn.ModuleList(blocks), call_of(region)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.blocks:
            x = self.call(module, x)
        return x


def run(style: str, region: Region) -> Results:
    model = Model(style, region)

    def backward(step: int) -> Tensor:
        x = batch(step)
        if style == "tensor parallel":  # the others have the ranks' rows one after the other
            dist.broadcast(x, src=0)
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return train(model, backward, steps=2)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("style", STYLES)
def test_two_steps_equal_those_without_regions(pair: Pair, style: str, region: Region) -> None:
    assert_recomputes_and_equals(pair.run(run, style, region), pair.run(run, style, "none"))


def tanh_of_sum(pieces: list[Tensor]) -> Tensor:
    return (pieces[0].tanh() + pieces[1]).exp()


def pieces() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    return [
        distribute_tensor(batch(number), mesh, [Shard(dim)]).requires_grad_()
        for number, dim in enumerate([0, 1])
    ]


def gradients(call: Call) -> list[Tensor]:
    x = pieces()
    call(tanh_of_sum, x).sum().backward()
    return [piece.grad.full_tensor() for piece in x]


def compare_gradients() -> None:
    for actual, expected in zip(gradients(memopt.checkpoint), gradients(plain), strict=True):
        assert torch.equal(actual, expected)


def test_dtensors_in_containers_have_the_gradients_of_the_plain_call(pair: Pair) -> None:
    pair.run(compare_gradients)


def write_to_argument() -> None:
    x = [piece * 2 for piece in pieces()]
    loss = memopt.checkpoint(tanh_of_sum, x).sum()
    x[0].add_(1)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        loss.backward()


def test_write_to_a_dtensor_argument_is_noticed(pair: Pair) -> None:
    pair.run(write_to_argument)
