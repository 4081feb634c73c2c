"""Proves, of sync_batch_norm in two and three processes: it is batch norm over the batches of all
of them, whatever their sizes, orders in memory and types, with an error of at most PyTorch's or
what the arithmetic costs; all have the same running statistics; input and statistics are all that
is kept, to the byte; recipes, regions and compilers change no bit; convert reaches
torch.nn.SyncBatchNorm; models train in DistributedDataParallel; bad input is refused by name.
(On one rank: tests/nn/test_sync_batch_norm.py.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
from tests.support.cases import Call, Results
from tests.support.cases.channel_norm import ChannelNormCase
from tests.support.oracle import assert_results_accurate
from tests.support.shapes import FLOAT32, FLOAT64, STATISTICS, Dtypes, channels_last, random_normal

pytestmark = pytest.mark.slow  # for whichever test starts the processes

CASE = ChannelNormCase("batch_norm")
# The gradients of the parameters are sums over ranks, each rounded: in a parameter's type.
DTYPES = [FLOAT32, FLOAT64, *(Dtypes(t, torch.float32) for t in (torch.bfloat16, torch.float16))]
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {"contiguous": torch.clone, "last": channels_last}

Rank = dict[str, Any]
"""The results of one of the processes, by name."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    three = World(tmp_path_factory.mktemp("three"), size=3)
    yield three
    three.close()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Callable[[int], World]:
    """The processes, by their number."""
    return lambda size: request.getfixturevalue({2: "pair", 3: "three"}[size])


class Batch(NamedTuple):
    """A batch over all ranks."""

    counts: tuple[int, ...]
    """The samples of each."""
    size: tuple[int, ...] = (6, 5, 7)
    """Channels and spatial dimensions."""
    dtypes: Dtypes = FLOAT32
    order: str = "contiguous"
    statistics: str | None = None
    """A name in STATISTICS."""
    spread: float = 0.0
    """How far apart the means of two samples that follow one another are."""
    weight: bool = True
    bias: bool = True

    def call(self) -> Call:
        size = (sum(self.counts), *self.size)
        values = random_normal(*size, seed=1)
        if self.statistics:
            values = STATISTICS[self.statistics](1, values.numel()).reshape(size)
        values += self.spread * torch.arange(size[0]).reshape(-1, *(1 for _ in self.size))
        return CASE.make_call(
            *(size, self.dtypes, torch.device("cpu")),
            **{"values": values, "weight": self.weight, "bias": self.bias},
        )

    def of_rank(self) -> Call:
        """This process's part of it."""
        first = sum(self.counts[: dist.get_rank()])
        rows = slice(first, first + self.counts[dist.get_rank()])
        order = ORDERS[self.order]

        def part(name: str, t: Tensor) -> Tensor:
            return order(t[rows]) if t.dim() > 1 else t

        call = self.call()
        everything = {**call.given, **call.incoming}
        return call.replace(**{name: part(name, t) for name, t in everything.items()})


def normalised(leaves: Call, group: Any = None) -> Tensor:
    return memopt.functional.sync_batch_norm(
        *(leaves.input, leaves.running_mean, leaves.running_var, leaves.weight, leaves.bias),
        process_group=group,
    )


def one_step(batch: Batch) -> Rank:
    call = batch.of_rank()
    leaves = call.leaves()
    with SavedTensors(exclude=leaves.weights.values()) as saved:
        output = normalised(leaves)
    wanted = leaves.differentiable
    grads = torch.autograd.grad(output, list(wanted.values()), call.grad_output)
    return {
        "output": output.detach(),
        **{f"grad_{name}": grad for name, grad in zip(wanted, grads, strict=True)},
        "running_mean": leaves.running_mean,
        "running_var": leaves.running_var,
        "saved": saved.bytes,
        "strides": [output.stride(), grads[0].stride(), leaves.input.stride()],
    }


def together(batch: Batch, ranks: list[Rank]) -> Results:
    """As one process would have them."""
    results = Results({name: torch.cat([r[name] for r in ranks]) for name in ("output",)})
    for name in CASE.gradients:
        parts = [r.get(f"grad_{name}") for r in ranks]
        if parts[0] is None:
            results[f"grad_{name}"] = None
        elif name == "input":
            results[f"grad_{name}"] = torch.cat(parts)
        else:
            whole = torch.stack(parts).double().sum(0)
            results[f"grad_{name}"] = whole.to(batch.dtypes.parameter)
    return results


def check(world: Callable[[int], World], batch: Batch) -> list[Rank]:
    ranks = world(len(batch.counts)).run(one_step, batch)
    call = batch.call()
    running = [t.double().clone() for t in (call.running_mean, call.running_var)]
    F.batch_norm(call.input.double(), *running, training=True)
    assert_results_accurate(CASE, call, together(batch, ranks))
    for name, expected in zip(("running_mean", "running_var"), running, strict=True):
        torch.testing.assert_close(ranks[0][name].double(), expected, rtol=1e-6, atol=1e-6)
        for other in ranks[1:]:
            assert_same_bits([other[name]], [ranks[0][name]], name)
    sums = 8 if batch.dtypes == FLOAT64 else 4
    for count, rank in zip(batch.counts, ranks, strict=True):
        elements = count * call.input[:1].numel()
        kept = elements * call.input.itemsize
        assert rank["saved"] == kept + 2 * sums * batch.size[0] + 8
        assert count == 0 or len(set(rank["strides"])) == 1
    return ranks


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", [(3, 3), (1, 5), (4, 0), (2, 0, 3), (0, 1, 0)], ids=str)
def test_it_is_batch_norm_over_all_batches(
    world: Callable[[int], World], dtypes: Dtypes, order: str, counts: tuple[int, ...]
) -> None:
    check(world, Batch(counts, dtypes=dtypes, order=order))


@pytest.mark.parametrize("size", [(6,), (6, 20000), (130, 7, 7), (6, 2, 3, 5), (4, 1, 1)], ids=str)
def test_sizes(world: Callable[[int], World], size: tuple[int, ...]) -> None:
    check(world, Batch((2, 3), size))


@pytest.mark.parametrize("counts", [(1, 1), (1, 1, 0), (33, 1)], ids=str)
def test_one_value_to_a_channel_on_a_rank(
    world: Callable[[int], World], counts: tuple[int, ...]
) -> None:
    check(world, Batch(counts, (6,)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["mean 100 std 1", "mean 1e4 std 1", "std 1e-6", "one outlier"])
def test_extreme_statistics(world: Callable[[int], World], order: str, name: str) -> None:
    check(world, Batch((3, 2), (4, 9, 10), statistics=name, order=order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("statistics", [None, "mean 1e4 std 1"])
def test_ranks_whose_means_are_far_apart(
    world: Callable[[int], World], order: str, statistics: str | None
) -> None:
    batch = Batch((1, 2, 1), (4, 9, 10), statistics=statistics, spread=30.0, order=order)
    check(world, batch)


@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_parameters_may_be_missing(world: Callable[[int], World], weight: bool, bias: bool) -> None:
    check(world, Batch((2, 3), weight=weight, bias=bias))


def of_no_values() -> list[Tensor]:
    running = torch.zeros(6), torch.ones(6)
    x = torch.zeros(0, 6, 5, requires_grad=True)
    output = memopt.functional.sync_batch_norm(x, *running)
    output.sum().backward()
    return [*running, output.detach(), x.grad]


def test_no_rank_has_a_value(pair: World) -> None:
    for mean, variance, output, grad in pair.run(of_no_values):
        assert_same_bits([mean, variance], [torch.zeros(6), torch.ones(6)])
        assert output.shape == grad.shape == (0, 6, 5)


# Modules.

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


# Bad input.


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        call()
    return str(caught.value)


def messages() -> list[str]:
    x, f = torch.randn(2, 6, 5), memopt.functional.sync_batch_norm
    mean, var = torch.zeros(6), torch.ones(6)
    wanted = x.clone().requires_grad_()
    found = [
        message_of(lambda: f(x, mean[:5], var)),
        message_of(lambda: f(x, mean, var, torch.ones(5))),
        message_of(lambda: f(x, mean, var.clone().requires_grad_())),
        message_of(lambda: f(x, mean, var, eps=-1.0)),
        message_of(lambda: f(x[:1, :, :1] if dist.get_rank() else x[:0], mean, var)),
        message_of(
            lambda: torch.autograd.grad(f(wanted, mean, var).sum(), wanted, create_graph=True)
        ),
    ]
    return found


def test_bad_input_is_refused_by_name(pair: World) -> None:
    expected = (
        "sync_batch_norm: running_mean must have shape [6] (channels), got [5]",
        "sync_batch_norm: weight must have shape [6] (channels), got [5]",
        "sync_batch_norm: running statistics must not require a gradient",
        "sync_batch_norm: eps must be finite and not negative",
        "sync_batch_norm: input must have more than one value for each channel on all ranks",
        "sync_batch_norm: backward with create_graph=True is not supported across ranks",
    )
    for found in pair.run(messages):
        for message, beginning in zip(found, expected, strict=True):
            assert re.match(re.escape(beginning), message), message
