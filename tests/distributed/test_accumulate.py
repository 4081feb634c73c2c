"""Proves that memopt.accumulate gives in DistributedDataParallel and FSDP2 the gradients of the
whole batch, and reduces them once: the collectives are counted. That "auto" under FSDP2 takes what
fits in each process, and where memory runs out in one of them all go back, with nothing lost.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt._accumulate import loop
from memopt._accumulate.peers import Peers
from memopt.memory.peak import peak_of_step
from memopt.memory.step import Step
from memopt.memory.unchanged import unchanged
from tests.distributed.processes import WORLD_SIZE, Pair
from tests.distributed.support import SIZE, batch, block

pytestmark = pytest.mark.slow  # for whichever test starts the processes

ROWS = 10


class Collectives(TorchDispatchMode):
    """Counts what goes over the wire."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            self.calls[name.split(".")[1].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for p in model.parameters():
        gradient = p.grad
        assert gradient is not None
        found.append(
            (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        )
    return found


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def models(kind: str) -> tuple[nn.Module, nn.Module]:
    """Two alike."""
    torch.manual_seed(0)
    plain = nn.Sequential(block(), block()).double()
    made = []
    for model in (plain, copy.deepcopy(plain)):
        if kind == "ddp":
            made.append(DistributedDataParallel(model))
        else:
            mesh = init_device_mesh("cpu", (WORLD_SIZE,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            made.append(fully_shard(model, mesh=mesh))
    return made[0], made[1]


def both(kind: str, micro_batch: int) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    model, whole = models(kind)
    x = batch(0, ROWS).double()
    square(whole(x)).backward()
    with Collectives() as collectives:
        memopt.accumulate(model, x, micro_batch=micro_batch, loss=square)
    return gradients(model), gradients(whole), dict(collectives.calls)


def steps_down() -> tuple[list[Tensor], list[Tensor], int, int]:
    """In one process memory runs out, and it takes more micro-batches than the other."""
    model, whole = models("ddp")
    x = batch(0, ROWS).double()
    square(whole(x)).backward()
    rank = dist.get_rank()

    def fail(module: nn.Module, args: Any) -> None:
        if rank == 1 and len(args[0]) > 3:
            raise torch.OutOfMemoryError("for a test")

    model.module[1].register_forward_pre_hook(fail)
    before = loop.largest_micro_batch
    loop.largest_micro_batch = lambda *_: ROWS
    try:
        result = memopt.accumulate(model, x, loss=square, budget=1 << 30)
    finally:
        loop.largest_micro_batch = before
    return gradients(model), gradients(whole), result.micro_batches, result.out_of_memory


class Fails(nn.Module):
    """With more than `most` rows memory runs out, in one process, the first time or always: when
    its forward begins, or when the gradient of its output comes.
    """

    def __init__(self, most: int, where: str, rank: int) -> None:
        super().__init__()
        self.inner = block(0.5)
        self.statistics = nn.BatchNorm1d(SIZE)
        self.most, self.where, self.rank = most, where, rank

    def forward(self, x: Tensor) -> Tensor:
        is_due = len(x) > self.most and dist.get_rank() == self.rank
        if is_due and self.where == "forward":
            raise torch.OutOfMemoryError("for a test")
        y = self.statistics(self.inner(x))
        if is_due and self.where == "backward":
            y.register_hook(self._fail)
        return y

    @staticmethod
    def _fail(_: Tensor) -> None:
        raise torch.OutOfMemoryError("for a test")


def sharded(most: int, where: str, rank: int, reshard: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(block(), Fails(most, where, rank), block(0.5)).double()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not reshard:
        model.set_reshard_after_backward(False)
    return model


class Found(NamedTuple):
    result: tuple[int, int, int]
    gradients: list[Tensor]
    rest: list[Tensor]
    """The loss, buffers, and the next random number."""


def found_in(model: Any, rows: int, **options: Any) -> Found:
    torch.manual_seed(5)
    done = memopt.accumulate(model, batch(0, rows).double(), loss=square, **options)
    for layer in (*model.children(), model):
        layer.reshard()
    return Found(
        (done.micro_batch, done.micro_batches, done.out_of_memory),
        gradients(model),
        [done.loss, *(buffer.clone() for buffer in model.buffers()), torch.rand(1)],
    )


def runs_out(
    where: str, rank: int, reshard: bool, rows: int, before: bool
) -> tuple[Found, Found, Found, dict[str, int]]:
    """Twice with "auto", then a model alike with the number of rows that it came to."""
    model, other = sharded(3, where, rank, reshard), sharded(99, where, rank, reshard)
    original = loop.largest_watched
    loop.largest_watched = lambda *_: 12
    if before:
        for one in (model, other):
            torch.manual_seed(9)
            memopt.accumulate(one, batch(1, rows).double(), micro_batch=3, loss=square)
    try:
        first = found_in(model, rows, budget=1 << 30)
    finally:
        loop.largest_watched = original
    wanted = found_in(other, rows, micro_batch=3)
    with Collectives() as collectives:
        again = found_in(model, rows, budget=1 << 30)
    return first, wanted, again, dict(collectives.calls)


def with_other_budgets(fitting: Sequence[int]) -> tuple[int, int, int, int]:
    """Each process has another number of rows, and a budget for `fitting[rank]` and a half of them.

    Returns the micro-batch, how many there were, and by how many bytes its peak and that of one
    row more are above the budget. A row holds 64 positions, so that half of one is many times the
    parameters: a peak may count a collective's tensors that gloo's thread still holds.
    """
    rank = dist.get_rank()
    model = models("fsdp")[0]
    x = batch(0, 64 - 8 * rank).double()[:, None].repeat(1, 64, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(model, x, optimizer, square, who="a test")
    peers = Peers(model)

    def peak(size: int) -> int:
        run = loop.Run(model, x[: 2 * size], square, len, None, None, x.device)
        with unchanged(*step.roots):
            return peak_of_step(step, lambda rows: run.once(rows, peers), size)

    least, row = peak(1), (peak(21) - peak(1)) / 20
    budget = int(least + (fitting[rank] - 0.5) * row)
    state = torch.get_rng_state()
    result = memopt.accumulate(model, x, loss=square, budget=budget, optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    found = result.micro_batch
    return found, result.micro_batches, peak(found) - budget, peak(found + 1) - budget


def with_another_budget(reshard: bool, before: bool) -> tuple[list[Found], list[Found]]:
    """Two budgets after each other, the second one measured anew; and the same by numbers."""
    model, other = sharded(99, "forward", 0, reshard), sharded(99, "forward", 0, reshard)
    if before:
        for one in (model, other):
            torch.manual_seed(9)
            memopt.accumulate(one, batch(1, 12).double(), micro_batch=3, loss=square)
    found = [found_in(model, 12, budget=budget) for budget in (1 << 30, 1 << 29)]
    wanted = [found_in(other, 12, micro_batch=12) for _ in found]
    return found, wanted


def too_little() -> str:
    model = models("fsdp")[0]
    try:
        memopt.accumulate(
            model, batch(0, ROWS).double(), loss=square, budget=10 + (dist.get_rank() << 30)
        )
    except ValueError as error:
        return str(error)
    return ""


def refused() -> list[str]:
    messages = []
    plain, ours = (
        fully_shard(nn.Sequential(block(), kind(SIZE)).double())
        for kind in (nn.SyncBatchNorm, memopt.nn.SyncBatchNorm)
    )
    mesh = init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("replicate", "shard"))
    twice = fully_shard(block().double(), mesh=mesh)
    for model in (plain, ours, twice):
        try:
            memopt.accumulate(model, batch(0, ROWS).double(), loss=square, budget=1 << 30)
        except ValueError as error:
            messages.append(str(error))
    return messages


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 64 * torch.finfo(a.dtype).eps * b.abs().max()


@pytest.mark.parametrize("micro_batch", [3, 5, ROWS])
def test_data_parallel_reduces_once(pair: Pair, micro_batch: int) -> None:
    for found, wanted, collectives in pair.run(both, "ddp", micro_batch):
        assert_close(found, wanted)
        assert collectives == {"allreduce": 1}


@pytest.mark.parametrize("micro_batch", [3, ROWS])
def test_sharded_models_reduce_once(pair: Pair, micro_batch: int) -> None:
    for found, wanted, collectives in pair.run(both, "fsdp", micro_batch):
        assert_close(found, wanted)
        scatters = sum(n for name, n in collectives.items() if "reduce_scatter" in name)
        assert scatters == 2  # once for each of the sharded modules that have parameters


def test_processes_may_take_different_numbers_of_micro_batches(pair: Pair) -> None:
    results = pair.run(steps_down)
    for found, wanted, _, _ in results:
        assert_close(found, wanted)
    assert [r[2:] for r in results] == [(1, 0), (4, 2)]


@pytest.mark.parametrize(
    ("where", "rank", "reshard", "rows", "before"),
    [
        ("forward", 0, True, 12, False),
        ("forward", 1, True, 12, True),
        ("backward", 0, True, 12, True),
        ("backward", 1, True, 12, False),
        ("forward", 1, False, 12, True),
        ("backward", 0, False, 12, False),
        ("backward", 1, True, 11, True),
    ],
)
def test_memory_runs_out_in_one_process(
    pair: Pair, where: str, rank: int, reshard: bool, rows: int, before: bool
) -> None:
    """All go back to half of the rows, twice, and end with the bits of the run that took so many
    from the beginning: gradients that were there, random numbers and statistics of batches too.
    """
    for first, wanted, again, collectives in pair.run(runs_out, where, rank, reshard, rows, before):
        number = -(-rows // 3)
        assert first.result == (3, number, 2)
        assert wanted.result == (3, number, 0)
        assert again.result == (3, number, 0)  # it has learnt
        for found, expected in zip(first[1:], wanted[1:], strict=True):
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b)
        scatters = sum(n for name, n in collectives.items() if "reduce_scatter" in name)
        assert scatters == 3
        assert sum(n for name, n in collectives.items() if name.startswith("allreduce")) == 3


@pytest.mark.parametrize("fitting", [(7, 13), (21, 18)])
def test_the_least_that_fits_in_any_process(pair: Pair, fitting: tuple[int, int]) -> None:
    """With other budgets and other numbers of rows: as many rows as fit in both, one more does not
    in one of them, and both take as many micro-batches.
    """
    found = pair.run(with_other_budgets, fitting)
    least = min(fitting)
    assert [f[:2] for f in found] == [(least, -(-64 // least))] * 2
    assert all(f[2] <= 0 for f in found)
    assert found[fitting.index(least)][3] > 0


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_another_budget_is_measured_again(pair: Pair, reshard: bool, before: bool) -> None:
    """Also where parameters stay whole after backward. What the measurement does is undone: losses,
    gradients, statistics and random numbers have the bits of the runs that measure nothing.
    """
    for found, wanted in pair.run(with_another_budget, reshard, before):
        for one, expected in zip(found, wanted, strict=True):
            assert one.result == expected.result == (12, 1, 0)
            for mine, its in zip(one[1:], expected[1:], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def test_a_budget_that_is_too_small_for_one_process(pair: Pair) -> None:
    one, other = pair.run(too_little)
    assert "of the model's weights, got 10 B" in one
    assert "above the weights in all processes" in other


def test_auto_is_refused_where_processes_could_not_go_back(pair: Pair) -> None:
    for one, memopt_s, other in pair.run(refused):
        assert "must have no SyncBatchNorm" in one
        assert "must have no SyncBatchNorm" in memopt_s
        assert "must have parameters sharded over one dimension" in other
