"""Proves: "optimal" counts exactly what each stage saves, without running a stage more often; from
the second call on it cuts where the measured peak is least; it measures again for new functions and
new inputs, forgets without keeping functions alive, and cuts alike in forward and recompute.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt._checkpoint import checkpoint, checkpoint_sequential, disable_checkpointing, sequential
from memopt._checkpoint.region import run_region
from memopt._checkpoint.segments import least_peak_segments
from memopt._checkpoint.settings import region_settings
from memopt._checkpoint.stage_bytes import SavedInStage
from memopt.demo.memory import profile_memory
from memopt.memory.saved import SavedTensors
from tests.checkpoint.support import CountCalls, mlp, step_results
from tests.support.bits import assert_same_bits


@pytest.fixture(autouse=True)
def _forget_partitions() -> Iterator[None]:
    sequential._partitions.clear()
    yield
    sequential._partitions.clear()


class Wide(nn.Module):
    """Saves `width` times what it gets, each in a tensor of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.count = CountCalls()

    def forward(self, x: Tensor) -> Tensor:
        x = self.count(x) * 1
        for _ in range(self.width):
            x = x.exp().neg()
        return x


def calls(model: nn.Sequential) -> list[int]:
    """How often each stage ran since the last time."""
    counts = [stage.count.calls for stage in model]
    for stage in model:
        stage.count.calls = 0
    return counts


def step(functions: Any, x: Tensor) -> None:
    checkpoint_sequential(functions, "optimal", x).sum().backward()


def x_of(size: int = 4, **options: Any) -> Tensor:
    return torch.zeros(size, requires_grad=True, **options)


def test_the_first_call_runs_every_stage_as_a_region_and_the_second_is_optimal() -> None:
    widths = [1, 1, 6, 1, 1]
    model = nn.Sequential(*map(Wide, widths))
    x = x_of()
    out = checkpoint_sequential(model, "optimal", x)
    assert calls(model) == [1] * 5
    out.sum().backward()
    assert calls(model) == [1] * 5
    sums = [list(accumulate(w * x.nbytes for w in widths[start:])) for start in range(5)]
    lengths = least_peak_segments(sums, [row[-1] for row in sums], [x.nbytes] * 5)
    twice = 5 - lengths[-1]
    for _ in range(2):
        step(model, x)
        assert calls(model) == [2] * twice + [1] * lengths[-1]


def test_the_second_call_holds_what_the_chosen_partition_holds() -> None:
    model, x = nn.Sequential(*map(Wide, [1, 5, 1, 2, 3, 1])), x_of()
    step(model, x)
    (lengths,) = sequential._partitions.values()
    with SavedTensors() as optimal:
        checkpoint_sequential(model, "optimal", x)
    with SavedTensors() as same:
        checkpoint_sequential(model, lengths, x)
    assert len(lengths) > 1
    assert optimal.bytes == same.bytes


def watched(on_saved: Any, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A region whose saved tensors are shown to `on_saved`."""
    return run_region(fn, args, kwargs, region_settings(on_saved=on_saved))


def test_bytes_of_a_stage_are_what_autograd_saves_in_it(device: torch.device) -> None:
    stages = [mlp(), nn.LayerNorm(8), nn.Tanh(), mlp(dropout=0.5)]
    stages = [stage.to(device) for stage in stages]
    x = torch.randn(4, 8, device=device, requires_grad=True)
    counted = SavedInStage(stages)
    for stage in stages:
        with SavedTensors(exclude=stage.parameters()) as saved:
            stage(x)
        counted.begin_stage((x,), {})
        watched(counted.add_saved, stage, (x,), {})
        assert counted._running_union(len(counted._saved) - 1, ()) == [saved.bytes]


def test_on_saved_is_not_called_in_the_recompute() -> None:
    saved: list[torch.Size] = []
    x = x_of()
    y = watched(lambda t: saved.append(t.shape), lambda x: x.exp().exp(), (x,), {})
    assert saved == [x.shape] * 2
    y.sum().backward()
    assert len(saved) == 2


def test_a_tensor_that_two_stages_save_counts_once() -> None:
    """exp saves its result, which sin saves as its input."""
    x = x_of()
    counted = SavedInStage([])
    y = x
    for function in (torch.exp, torch.sin):
        counted.begin_stage((y,), {})
        y = watched(counted.add_saved, function, (y,), {})
    assert counted._running_union(0, counted._inputs[0]) == [x.nbytes, x.nbytes]
    assert counted._running_union(1, counted._inputs[1]) == [0]


def test_memory_used_again_during_the_count_counts_again() -> None:
    """Each stage's saved tensors are freed before the next stage allocates its own."""
    x = x_of(1000)
    counted = SavedInStage([])
    for _ in range(30):
        counted.begin_stage((x,), {})
        watched(counted.add_saved, torch.exp, (x,), {})
    assert counted._running_union(0, ()) == [n * x.nbytes for n in range(1, 31)]


def test_parameters_and_buffers_do_not_count() -> None:
    linear = nn.Linear(64, 64)
    linear.register_buffer("scale", torch.ones(64))
    x = torch.randn(2, 64, requires_grad=True)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x) * linear.scale + weight.sum()

    counted = SavedInStage([function])
    counted.begin_stage((x, linear.weight), {})
    watched(counted.add_saved, function, (x, linear.weight), {})
    assert counted._running_union(0, ()) == [x.nbytes]
    assert sum(counted._inputs[0].values()) == x.nbytes


def test_sparse_tensors_are_counted_and_not_refused() -> None:
    x = torch.eye(3).to_sparse().requires_grad_()
    stages = [lambda x: torch.sparse.mm(x, torch.ones(3, 3)), torch.exp]
    for _ in range(2):
        checkpoint_sequential(stages, "optimal", x).sum().backward()
    assert list(sequential._partitions.values()) == [[2]]


def test_the_optimal_partition_has_a_lower_peak_than_sqrt_and_every_stage() -> None:
    """Measured, on a stack whose stages save much more than they get."""
    model, x = nn.Sequential(*(Wide(16) for _ in range(32))), x_of(1024)
    step(model, x)

    def peak(segments: Any) -> int:
        return profile_memory(
            lambda: checkpoint_sequential(model, segments, x).sum(), torch.device("cpu")
        ).peak

    optimal = peak("optimal")
    assert optimal < peak(32)
    assert optimal < 0.6 * peak("sqrt")


@pytest.mark.parametrize(
    "changed",
    [x_of(5), x_of(dtype=torch.float64), torch.zeros(4)],
    ids=["shape", "dtype", "requires_grad"],
)
def test_new_inputs_are_measured_anew(changed: Tensor) -> None:
    model = nn.Sequential(nn.Linear(1, 1), Wide(1), Wide(4), Wide(1))
    stages = nn.Sequential(*model[1:])
    step(stages, x_of())
    assert len(sequential._partitions) == 1
    checkpoint_sequential(stages, "optimal", changed)
    saves = changed.requires_grad
    assert len(sequential._partitions) == 1 + saves
    step(stages, x_of())
    assert len(sequential._partitions) == 1 + saves


def test_changed_functions_are_measured_anew() -> None:
    model = nn.Sequential(Wide(1), Wide(1))
    step(model, x_of())
    model.append(Wide(9))
    step(model, x_of())
    assert sum(sum(lengths) == 3 for lengths in sequential._partitions.values()) == 1


def test_methods_are_recognised_by_their_object() -> None:
    stages = [Wide(1), Wide(2)]
    for _ in range(3):
        step([stage.forward for stage in stages], x_of())
    assert len(sequential._partitions) == 1


class Slots:
    """Neither weak references nor hashing."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        return x.exp()


def test_functions_that_cannot_be_remembered_still_run() -> None:
    x = x_of()
    for _ in range(2):
        got = step_results(lambda: checkpoint_sequential([Slots(), torch.sin], "optimal", x), [x])
        assert_same_bits(got, step_results(lambda: x.exp().sin(), [x]))
    assert not sequential._partitions


def test_remembering_keeps_no_function_alive_and_has_a_bound() -> None:
    model = nn.Sequential(Wide(1), Wide(2))
    dead = weakref.ref(model[0])
    step(model, x_of())
    del model
    gc.collect()
    assert dead() is None
    stages = [Wide(1), Wide(2)]
    for size in range(1, 100):
        step(stages, x_of(size))
    assert len(sequential._partitions) == 64


def test_without_regions_nothing_is_remembered() -> None:
    model, x = nn.Sequential(Wide(1), Wide(2)), x_of()
    with disable_checkpointing():
        step(model, x)
    with torch.no_grad():
        checkpoint_sequential(model, "optimal", x)
    checkpoint_sequential(model, "optimal", x.detach())
    assert not sequential._partitions


def test_a_failing_stage_leaves_nothing_behind() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        checkpoint_sequential([torch.exp, fail], "optimal", x_of())
    assert not sequential._partitions


def test_recompute_of_an_outer_region_cuts_where_its_forward_did() -> None:
    """Although the partition becomes known between the two."""
    model, x = nn.Sequential(*map(Wide, [1, 1, 9, 1, 1])), x_of()
    expected = step_results(lambda: model(x), [x])

    def outer() -> Tensor:
        y = checkpoint(lambda x: checkpoint_sequential(model, "optimal", x), x)
        step(model, x_of())
        return y

    for _ in range(2):
        assert_same_bits(step_results(outer, [x]), expected)


def test_results_are_the_same_bits_in_the_measuring_call_and_after() -> None:
    model = nn.Sequential(*(mlp(dropout=0.3) for _ in range(6)))
    x = torch.randn(4, 8, requires_grad=True)
    tensors = [x, *model.parameters()]
    expected = step_results(lambda: model(x), tensors)
    for _ in range(3):
        got = step_results(lambda: checkpoint_sequential(model, "optimal", x), tensors)
        assert_same_bits(got, expected)
