"""Proves, of modules and models with batch norm across ranks: they are batch norms over all
batches, in a group of some ranks too; recipes, regions and compilers change no bit; convert reaches
torch.nn.SyncBatchNorm; models train in DistributedDataParallel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt.memory.saved import SavedTensors
from tests.convert.support import memopt_ops
from tests.distributed.processes import World
from tests.support.bits import assert_same_bits
from tests.support.shapes import random_normal

pytestmark = pytest.mark.slow  # for whichever test starts the processes

Rank = dict[str, Any]
"""The results of one of the processes, by name."""


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cumulative average": {"momentum": None},
    "no parameters": {"affine": False},
    "no running statistics": {"track_running_stats": False},
}


def images(step: int) -> Tensor:
    """Of both ranks together."""
    return random_normal(5, 6, 4, 3, seed=step).float() * (step + 1) + step


def parts(whole: Tensor) -> Tensor:
    return whole[:2] if dist.get_rank() == 0 else whole[2:]


def of_module(name: str) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    layer = memopt.nn.SyncBatchNorm(6, **LAYERS[name])
    outputs = [layer(parts(images(step))).detach() for step in range(3)]
    return outputs, layer.state_dict(), layer.eval()(images(3)).detach()


@pytest.mark.parametrize("name", LAYERS)
def test_modules_are_batch_norms_over_all_batches(pair: World, name: str) -> None:
    layer = nn.BatchNorm2d(6, **LAYERS[name])
    ranks = pair.run(of_module, name)
    for step in range(3):
        ours = torch.cat([outputs[step] for outputs, _, _ in ranks])
        torch.testing.assert_close(ours, layer(images(step)), rtol=1e-5, atol=1e-5)
    evaluated = layer.eval()(images(3))
    for _, state, output in ranks:
        assert list(state) == list(layer.state_dict())
        torch.testing.assert_close(state, layer.state_dict())
        torch.testing.assert_close(output, evaluated, rtol=1e-5, atol=1e-5)


# Recipes, regions, compilers.


class Part(nn.Module):
    """A norm, an activation and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.conv = memopt.nn.SyncBatchNorm(6), nn.Conv2d(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(memopt.functional.silu(self.norm(x)))


def of_part(how: str) -> tuple[list[Tensor], int]:
    part: Any = Part()
    x = parts(images(0)).requires_grad_()
    parameters = list(part.parameters())
    with SavedTensors(exclude=parameters) as saved:
        if how == "recipes":
            with memopt.recipes():
                loss = part(x).square().mean()
        elif how == "region":
            loss = memopt.checkpoint(part, x).square().mean()
        elif how == "compiled":
            torch._dynamo.reset()
            loss = torch.compile(part, backend="aot_eager", fullgraph=True)(x).square().mean()
        else:
            loss = part(x).square().mean()
    grads = torch.autograd.grad(loss, [x, *parameters])
    return [loss.detach(), *grads, *part.buffers()], saved.bytes


@pytest.mark.parametrize("how", ["recipes", "region", "compiled"])
def test_bits_are_those_of_a_plain_step(pair: World, how: str) -> None:
    plain = pair.run(of_part, "plain")
    for (ours, kept), (theirs, without) in zip(pair.run(of_part, how), plain, strict=True):
        assert_same_bits(ours, theirs)
        if how == "recipes":  # neither the norm's output nor the activation's
            image = without - kept
            assert image in (2 * images(0)[:2].nbytes, 2 * images(0)[2:].nbytes)


# Converted models.


def network(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(6, 6, 3, padding=1), kind(6), nn.SiLU(), nn.Conv2d(6, 6, 3, padding=1))
    return nn.Sequential(*layers)


def step_of_converted(model: nn.Module, made: nn.Sequential) -> Rank:
    """`model` is around `made`, or it is that."""
    x = parts(images(0))
    ops = memopt_ops(lambda: model(x))
    made[1].reset_running_stats()
    # Gradients are added up over the samples of this rank.
    model(x).square().sum().backward()
    return {
        "ops": set(ops),
        "grads": [p.grad for p in made.parameters()],
        "buffers": [b.clone() for b in made.buffers()],
    }


def of_converted() -> Rank:
    model = network(nn.SyncBatchNorm)
    norm = model[1]
    found = {"text": str(memopt.convert(model)), **step_of_converted(model, model)}
    for grad in found["grads"]:
        dist.all_reduce(grad)
    found["is instance"] = isinstance(model[1], nn.SyncBatchNorm)
    model.eval()
    found["in evaluation"] = memopt_ops(lambda: model(images(0)))
    memopt.revert(model)
    found["reverted"] = model[1] is norm and type(norm) is nn.SyncBatchNorm
    return found


def assert_step_of_all(found: Rank) -> None:
    whole = network(nn.BatchNorm2d)
    whole(images(0)).square().sum().backward()
    assert "memopt::_sync_batch_norm_moments" in found["ops"]
    for ours, parameter in zip(found["grads"], whole.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found["buffers"], list(whole.buffers()))


def test_convert_reaches_pytorch_s(pair: World) -> None:
    for found in pair.run(of_converted):
        assert_step_of_all(found)
        assert "memopt.nn.SyncBatchNorm" in found["text"]
        assert "memopt::_channel_norm_forward" in found["in evaluation"]
        assert "memopt::_sync_batch_norm_moments" not in found["in evaluation"]
        assert found["is instance"]
        assert found["reverted"]


def in_data_parallel(convert: bool) -> Rank:
    """It takes the mean of gradients over ranks."""
    model = memopt.nn.SyncBatchNorm.convert_sync_batchnorm(network(nn.BatchNorm2d))
    if convert:
        memopt.convert(model)
    found = step_of_converted(DistributedDataParallel(model), model)
    found["grads"] = [2 * grad for grad in found["grads"]]
    return found


@pytest.mark.parametrize("convert", [False, True])
def test_data_parallel_training_on_the_cpu(pair: World, convert: bool) -> None:
    for found in pair.run(in_data_parallel, convert):
        assert_step_of_all(found)


# Groups.


def in_a_group() -> tuple[Tensor | None, str]:
    """Of the ranks 0 and 2; and the error where a rank is not in it."""
    group = dist.new_group([0, 2])
    x = images(dist.get_rank())
    try:
        return memopt.functional.sync_batch_norm(x, None, None, process_group=group), ""
    except ValueError as error:
        return None, str(error)


def test_a_group_of_some_ranks(three: World) -> None:
    first, outside, last = three.run(in_a_group)
    assert outside[1] == "sync_batch_norm: process_group must be one that this rank is in"
    whole = F.batch_norm(torch.cat([images(0), images(2)]), None, None, training=True)
    torch.testing.assert_close(torch.cat([first[0], last[0]]), whole, rtol=1e-5, atol=1e-5)
