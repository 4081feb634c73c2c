"""Proves, of sync_batch_norm in two and three processes: it is batch norm over the batches of all
of them, whatever their sizes, orders in memory and types, with an error of at most PyTorch's or
what the arithmetic costs; all have the same running statistics; input and statistics are all that
is kept, to the byte; bad input is refused by name. (On one rank: tests/nn/test_sync_batch_norm.py;
modules and models: test_sync_batch_norm_models.py.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import memopt
from memopt.memory.saved import SavedTensors
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


def normalised(leaves: Call) -> Tensor:
    return memopt.functional.sync_batch_norm(
        *(leaves.input, leaves.running_mean, leaves.running_var, leaves.weight, leaves.bias)
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
