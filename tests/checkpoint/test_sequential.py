"""Proves: checkpoint_sequential gives the bits of the plain chain for every kind of container,
result and partition; runs all segments but the last twice and keeps nothing between but their
inputs; and refuses what makes no partition.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from memopt._checkpoint import checkpoint_sequential, checkpoint_wrapper, disable_checkpointing
from memopt.memory.saved import SavedTensors
from tests.checkpoint.support import CountCalls, mlp, step_results
from tests.support.bits import assert_same_bits

PARTITIONS = [1, 2, 3, 6, "sqrt", "optimal", [1, 2, 3], (4, 2), [6]]


def chain(length: int = 6, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(*(mlp(dropout=dropout) for _ in range(length)))


def counted_chain(length: int) -> tuple[list[CountCalls], nn.Sequential]:
    """Stages of a counter and a layer each."""
    counts = [CountCalls() for _ in range(length)]
    return counts, nn.Sequential(
        *(nn.Sequential(count, nn.Linear(4, 4), nn.Tanh()) for count in counts)
    )


@pytest.mark.parametrize("segments", PARTITIONS, ids=str)
@pytest.mark.parametrize("container", [nn.Sequential, list, tuple, nn.ModuleList])
def test_equals_the_plain_chain(device: torch.device, container: Callable, segments: Any) -> None:
    model = chain().to(device)
    functions = model if container is nn.Sequential else container(model.children())
    x = torch.randn(4, 8, device=device, requires_grad=True)
    tensors = [x, *model.parameters()]
    expected = step_results(lambda: model(x), tensors)
    for _ in range(2):  # the second call of "optimal" is another one
        got = step_results(lambda: checkpoint_sequential(functions, segments, x), tensors)
        assert_same_bits(got, expected)


@pytest.mark.parametrize("segments", [2, "sqrt", "optimal"])
@pytest.mark.parametrize("preserve_rng_state", [False, True])
def test_random_numbers_are_those_of_forward(segments: Any, preserve_rng_state: bool) -> None:
    """Unless the caller does not want them: then the gradients are not the plain run's."""
    model, x = chain(dropout=0.5), torch.randn(4, 8)
    expected = step_results(lambda: model(x), model.parameters())
    for _ in range(2):
        got = step_results(
            lambda: checkpoint_sequential(
                model, segments, x, preserve_rng_state=preserve_rng_state
            ),
            model.parameters(),
        )
        same = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert same == preserve_rng_state


def test_batch_norm_statistics_move_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)))
    checkpoint_sequential(model, 2, torch.randn(3, 4)).sum().backward()
    assert [block[1].num_batches_tracked.item() for block in model] == [1] * 4


@pytest.mark.parametrize("segments", [2, [5, 5]])
def test_the_first_of_two_segments_runs_twice_and_the_last_once(segments: Any) -> None:
    counts, model = counted_chain(10)
    loss = checkpoint_sequential(model, segments, torch.randn(2, 4)).sum()
    assert [count.calls for count in counts] == [1] * 10
    loss.backward()
    assert [count.calls for count in counts] == [2] * 5 + [1] * 5


@pytest.mark.parametrize(
    ("segments", "twice"), [(1, 0), (3, 7), (10, 9), ("sqrt", 7), ([2, 7, 1], 9), ([1, 9], 1)]
)
def test_all_segments_but_the_last_run_twice(segments: Any, twice: int) -> None:
    counts, model = counted_chain(10)
    checkpoint_sequential(model, segments, torch.randn(2, 4)).sum().backward()
    assert [count.calls for count in counts] == [2] * twice + [1] * (10 - twice)


def test_forward_keeps_the_inputs_of_regions_and_what_the_last_segment_saves() -> None:
    model, x = chain(), torch.randn(4, 8)
    with SavedTensors(exclude=model.parameters()) as last:
        model[4:](x)
    with SavedTensors(exclude=model.parameters()) as held:
        checkpoint_sequential(model, [1, 3, 2], x)
    assert held.bytes == 2 * x.nbytes + last.bytes


def test_without_gradients_every_stage_runs_once() -> None:
    counts, model = counted_chain(4)
    x = torch.randn(2, 4)
    for segments in (2, "optimal"):
        with torch.no_grad():
            assert not checkpoint_sequential(model, segments, x).requires_grad
    with disable_checkpointing():
        checkpoint_sequential(model, 2, x).sum().backward()
    assert [count.calls for count in counts] == [3] * 4


def test_the_result_is_the_very_object_of_the_last_function() -> None:
    result = {"value": torch.ones(1)}
    assert checkpoint_sequential([torch.sin, lambda x: result], 2, torch.ones(1)) is result


def test_results_of_any_kind_go_to_the_next_stage_as_they_are() -> None:
    stages = [
        lambda x, *, scale: {"x": x * scale, "n": 3},
        lambda d: (d["x"].exp(), d["n"]),
        lambda pair: [pair[0].sin() * pair[1]],
        lambda items: items[0].tanh(),
    ]
    x = torch.randn(3, requires_grad=True)
    for segments in (1, 2, 4, "optimal", "optimal"):
        got = step_results(lambda s=segments: checkpoint_sequential(stages, s, x, scale=2.0), [x])
        assert_same_bits(got, step_results(lambda: ((x * 2.0).exp().sin() * 3).tanh(), [x]))


@pytest.mark.parametrize("segments", [1, 2, 3, "optimal"])
def test_unpacked_tuples_become_positional_arguments(segments: Any) -> None:
    stages = [
        lambda a, b, *, shift: (a * b + shift, b),
        lambda a, b: (a.exp(), b.sin()),
        lambda a, b: (a / b, b),
    ]
    a, b = (torch.rand(3, requires_grad=True) for _ in range(2))

    def whole() -> Any:
        return checkpoint_sequential(stages, segments, a, b, shift=1.0, unpack_outputs=True)

    def plain() -> Any:
        return stages[2](*stages[1](*stages[0](a, b, shift=1.0)))

    expected = step_results(plain, [a, b])
    for _ in range(2):
        assert isinstance(whole(), tuple)
        assert_same_bits(step_results(whole, [a, b]), expected)


def test_lists_are_not_unpacked() -> None:
    stages = [lambda x: [x, x], lambda pair: pair[0] + pair[1]]
    y = checkpoint_sequential(stages, 2, torch.ones(1), unpack_outputs=True)
    assert y.item() == 2


def test_one_stage_in_several_places() -> None:
    shared, x = mlp(), torch.randn(2, 8, requires_grad=True)
    tensors = [x, *shared.parameters()]
    got = step_results(lambda: checkpoint_sequential([shared] * 4, 2, x), tensors)
    expected = step_results(lambda: nn.Sequential(*[shared] * 4)(x), tensors)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("segments", [2, "optimal"])
def test_stages_that_are_wrapped_themselves(segments: Any) -> None:
    model, x = chain(), torch.randn(2, 8)
    expected = step_results(lambda: model(x), model.parameters())
    for stage in model:
        checkpoint_wrapper(stage)
    for _ in range(2):
        got = step_results(lambda: checkpoint_sequential(model, segments, x), model.parameters())
        assert_same_bits(got, expected)


def test_equals_torch_with_the_partition_of_torch() -> None:
    """Which puts the remainder into the last segment."""
    counts, model = counted_chain(10)
    x = torch.randn(2, 4, requires_grad=True)
    tensors = [x, *model.parameters()]

    def torch_s() -> Tensor:
        return torch_checkpoint.checkpoint_sequential(model, 3, x, use_reentrant=False)

    expected = step_results(torch_s, tensors)
    calls = [count.calls for count in counts]
    assert_same_bits(
        step_results(lambda: checkpoint_sequential(model, [3, 3, 4], x), tensors), expected
    )
    assert [count.calls for count in counts] == [2 * n for n in calls]


@pytest.mark.parametrize("segments", [2, [1, 3], "sqrt", "optimal"])
def test_compiles_without_graph_breaks(segments: Any) -> None:
    torch._dynamo.reset()
    model, x = chain(4), torch.randn(2, 8)
    expected = step_results(lambda: model(x), model.parameters())
    compiled = torch.compile(
        lambda x: checkpoint_sequential(model, segments, x), backend="aot_eager", fullgraph=True
    )
    assert_same_bits(step_results(lambda: compiled(x), model.parameters()), expected)


RANGE = (
    'must be an int from 1 to 3 (the number of functions), "sqrt", "optimal" or the length of each '
    "segment, got "
)
SUM = "must have lengths that sum to the number of functions, 3, got "
LENGTHS = "must have lengths that are ints of at least 1, got "


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        (0, ValueError, RANGE + "0"),
        (-1, ValueError, RANGE + "-1"),
        (4, ValueError, RANGE + "4"),
        ("half", ValueError, RANGE + "'half'"),
        (True, TypeError, RANGE + "True"),
        (2.0, TypeError, RANGE + "2.0"),
        (None, TypeError, RANGE + "None"),
        ([1, 1], ValueError, SUM + "[1, 1]"),
        ([2, 2], ValueError, SUM + "[2, 2]"),
        ([], ValueError, SUM + "[]"),
        ([0, 3], ValueError, LENGTHS + "[0, 3]"),
        ([-1, 4], ValueError, LENGTHS + "[-1, 4]"),
        ((1, 2.0), ValueError, LENGTHS + "(1, 2.0)"),
        ([True, 2], ValueError, LENGTHS + "[True, 2]"),
    ],
)
def test_segments_that_make_no_partition(segments: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(f'checkpoint_sequential: segments {message}')}$"):
        checkpoint_sequential([torch.sin] * 3, segments, torch.ones(1))


@pytest.mark.parametrize("functions", [nn.Sequential(), nn.ModuleList(), [], ()])
def test_no_functions(functions: Any) -> None:
    with pytest.raises(ValueError, match=r"^checkpoint_sequential: functions must not be empty"):
        checkpoint_sequential(functions, 1, torch.ones(1))


@pytest.mark.parametrize("functions", [nn.Linear(2, 2), torch.sin, {torch.sin}, None])
def test_functions_in_no_sequence(functions: Any) -> None:
    message = f"functions must be an nn.Sequential, .* got {type(functions).__name__}$"
    with pytest.raises(TypeError, match=f"^checkpoint_sequential: {message}"):
        checkpoint_sequential(functions, 1, torch.ones(1))


def test_a_function_that_is_not_callable() -> None:
    message = r"functions must be callable, got int as function 1$"
    with pytest.raises(TypeError, match=f"^checkpoint_sequential: {message}"):
        checkpoint_sequential([torch.sin, 3], 1, torch.ones(1))


def test_no_inputs() -> None:
    with pytest.raises(TypeError, match=r"^checkpoint_sequential: the first function must get an"):
        checkpoint_sequential([torch.sin], 1)


def test_reentrant_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^checkpoint_sequential: use_reentrant must be False"):
        checkpoint_sequential([torch.sin], 1, torch.ones(1), use_reentrant=True)
