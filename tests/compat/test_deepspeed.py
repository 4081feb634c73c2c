"""Proves memopt.compat.deepspeed.checkpointing: what DeepSpeed's own tests of activation
checkpointing assert, on the CPU and to the last bit; each option does what it says; and each defect
that was reported of DeepSpeed's, or found by reading, is absent. Numbers are those of
deepspeedai/DeepSpeed's issues and pull requests, unless another project is named.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt._extension import _C
from memopt.compat.deepspeed import checkpointing
from memopt.live_bytes import LiveBytes
from tests.checkpoint.support import (
    CountCalls,
    Watch,
    assert_same_bits,
    mlp,
    step_results,
    taken_for_an_accelerator,
)

SIZE = 20
CHECKPOINTS = (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"contiguous_checkpointing": True},
    {"checkpoint_in_cpu": True},
    {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 1},
    {"checkpoint_in_cpu": True, "contiguous_checkpointing": True, "profile": True},
    {"synchronize": True, "profile": True},
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpointing, "_state", checkpointing._Checkpointing())
    with taken_for_an_accelerator("cpu"):
        yield


@pytest.fixture(params=OPTIONS, ids=lambda options: "-".join(options) or "none")
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    checkpointing.configure(None, **request.param)
    return dict(request.param)


@pytest.fixture(params=CHECKPOINTS, ids=lambda function: function.__name__)
def checkpoint(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param  # type: ignore[no-any-return]


class Returns(nn.Linear):
    """Gives `make(y, *others)` of what it computes of its first argument."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__(SIZE, SIZE)
        self.make = make

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.make(super().forward(x).tanh(), *others)


MASK = torch.arange(SIZE) % 3 == 0
EXTRAS = [None, 2, True, (None, 2.5), (None, True, torch.ones(SIZE)), [torch.ones(2), "x"]]
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "1 in, 1 out": (lambda y: y, ()),
    "mask in": (lambda y, mask: y * mask, (MASK,)),
    "float mask in": (lambda y, mask: y * mask, (MASK.float(),)),
    "mask out": (lambda y, mask: (y * mask, mask), (MASK,)),
    "more out than in": (lambda y, mask: (y.detach() * 1.4, y * mask, mask), (MASK,)),
    "None in": (lambda y, none: y, (None,)),
    **{f"{extra} in": (lambda y, extra: y, (extra,)) for extra in EXTRAS},
    **{f"{extra} out": (lambda y, extra=extra: (y, extra), ()) for extra in EXTRAS},
}


def structure(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value), [structure(element) for element in value]
    return (Tensor, value.requires_grad) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(
    case: str, checkpoint: Callable[..., Any], options: dict[str, Any]
) -> None:
    """DeepSpeed's TestActivationCheckpoint, TestCheckpointNonTensor and ...OutputOrdering: values,
    types and their order.
    """
    make, others = CASES[case]
    torch.manual_seed(0)
    module = Returns(make)
    x = torch.rand(SIZE, requires_grad=True)
    wanted = [x, *module.parameters()]
    expected = step_results(lambda: module(x * 1, *others), wanted)
    for _ in range(3):
        found = step_results(lambda: checkpoint(module, x * 1, *others), wanted)
        assert_same_bits(found, expected)
    assert structure(checkpoint(module, x * 1, *others)) == structure(module(x * 1, *others))


def test_keyword_arguments(options: dict[str, Any]) -> None:
    """DeepSpeed's TestActivationCheckpointKeywordArguments."""

    def function(value: Tensor, *, scale: Tensor, offset: float) -> Tensor:
        return value * scale + offset

    value, scale = (torch.randn(SIZE, requires_grad=True) for _ in range(2))
    expected = step_results(lambda: function(value * 1, scale=scale * 1, offset=1.5), [value, scale])
    for _ in range(3):
        found = step_results(
            lambda: checkpointing.checkpoint(function, value * 1, scale=scale * 1, offset=1.5),
            [value, scale],
        )
        assert_same_bits(found, expected)


def test_an_input_may_be_used_again(
    checkpoint: Callable[..., Any], options: dict[str, Any]
) -> None:
    """DeepSpeed's TestActivationCheckpointInputReuse asserts that an input of an earlier region
    raises a clear error, as it was emptied (the `.data` of the caller's tensor is swapped). Here it
    is the tensor that it was: for another region, nested in an argument, twice in a call, with
    attributes of the user's own.
    """
    leaf = torch.randn(4, 4, requires_grad=True)

    def add(hidden: Tensor, shared: Tensor) -> Tensor:
        return (hidden + shared).sin()

    def nested(hidden: Tensor, tree: dict[str, Any]) -> Tensor:
        return hidden * tree["value"][0][0]

    def model(call: Callable[..., Any]) -> Tensor:
        hidden, shared = leaf * 2, leaf * 3
        shared.saved_data = shared.ds_offload_id = object()  # type: ignore[attr-defined]
        hidden = call(add, call(add, hidden, shared), shared)
        hidden = call(nested, hidden, {"value": ([shared],)})
        output: Tensor = call(add, hidden, hidden) + shared.sum()
        assert shared.shape == (4, 4)
        return output

    expected = step_results(lambda: model(lambda f, *args: f(*args)), [leaf])
    for _ in range(3):
        assert_same_bits(step_results(lambda: model(checkpoint), [leaf]), expected)


def test_a_stack_that_is_offloaded(checkpoint: Callable[..., Any]) -> None:
    """DeepSpeed's TestCPUActivationCheckpoint: the plain run's bits, what leaves comes back, a mask
    goes with it, and an evaluation leaves nothing behind.
    """
    checkpointing.configure(None, checkpoint_in_cpu=True)
    torch.manual_seed(1)
    layers = nn.ModuleList(Returns(lambda y, mask: y * mask) for _ in range(4))
    x = torch.randn(8, SIZE, requires_grad=True)

    def model(call: Callable[..., Any]) -> Tensor:
        hidden = x * 1
        for layer in layers:
            hidden = call(layer, hidden, MASK)
        return hidden

    wanted = [x, *layers.parameters()]
    expected = step_results(lambda: model(lambda f, *args: f(*args)), wanted)
    watch = Watch()
    assert_same_bits(step_results(lambda: model(checkpoint), wanted), expected)
    copies, nbytes = watch.to_host
    assert copies >= 4
    assert nbytes >= 4 * x.nbytes
    watch = Watch()
    with torch.no_grad():
        model(checkpoint)
    assert watch.to_host == (0, 0)


def test_contiguous_checkpointing_needs_no_number() -> None:
    """DeepSpeed's test_configure_with_contiguous_checkpointing_requires_num_checkpoints wants an
    error at `configure` in place of the IndexError that a missing or wrong number gave in the first
    forward (Lightning-AI/pytorch-lightning#20329). Here no number is needed, and a wrong one does no
    harm.
    """
    for number in (None, 1, 100):
        checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=number)
        for layers in (3, 5, 2):
            blocks = [mlp(8) for _ in range(layers)]
            x = torch.randn(4, 8, requires_grad=True)
            expected = step_results(lambda: run(blocks, x), [x])
            assert_same_bits(
                step_results(lambda: run(blocks, x, checkpointing.checkpoint), [x]), expected
            )


def run(blocks: list[nn.Sequential], x: Tensor, call: Any = lambda f, *args: f(*args)) -> Tensor:
    x = x * 1
    for block in blocks:
        x = call(block, x)
    return x


# The defects.


def test_3005_evaluations_need_no_reset() -> None:
    """Forwards without backward filled the contiguous buffers; users had to call reset()."""
    checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=3)
    blocks = [mlp(8) for _ in range(3)]
    x = torch.randn(4, 8, requires_grad=True)
    expected = step_results(lambda: run(blocks, x), [x])
    for _ in range(3):
        for _ in range(4):
            run(blocks, x, checkpointing.checkpoint)  # with gradients enabled
            with torch.no_grad():
                run(blocks, x, checkpointing.checkpoint)
        assert_same_bits(
            step_results(lambda: run(blocks, x, checkpointing.checkpoint), [x]), expected
        )
    (row,) = buffers().stats()
    assert row["slab_bytes"] == 3 * 512
    assert row["fallbacks"] == row["in_use"] == 0


def buffers() -> _C.Buffers:
    found = checkpointing._state.buffers
    assert found is not None
    return found


def test_1376_arguments_that_are_no_floats(options: dict[str, Any]) -> None:
    """Integer and bool tensors, and others between them, upset the count of buffers."""

    def function(flag: Any, index: Tensor, x: Tensor, mask: Tensor, half: Tensor) -> Tensor:
        return (x[index] * mask + half.float()).sin()

    leaf = torch.randn(6, requires_grad=True)

    def call(through: Callable[..., Any]) -> Tensor:
        others = torch.arange(6).flip(0), leaf * 2, leaf.detach() > 0, (leaf * 3).bfloat16()
        result: Tensor = through(function, "flag", *others)
        return result

    expected = step_results(lambda: call(lambda f, *args: f(*args)), [leaf])
    for _ in range(3):
        assert_same_bits(step_results(lambda: call(checkpointing.checkpoint), [leaf]), expected)


def test_598_and_522_options_have_an_effect_on_one_device() -> None:
    """Without model parallelism `contiguous` and `cpu_checkpointing` did nothing, or failed."""
    rows = 64
    blocks = [mlp(32) for _ in range(4)]
    x = torch.randn(rows, 32)

    def held() -> int:
        with LiveBytes() as live:
            loss = run(blocks, x, checkpointing.checkpoint).sum()
            live.mark()
            loss.backward()
        return live.marks[0].nbytes

    kept = held()
    checkpointing.configure(None, contiguous_checkpointing=True)
    held()
    held()
    assert held() == kept - 4 * x.nbytes
    checkpointing.configure(None, checkpoint_in_cpu=True)
    watch = Watch()
    held()
    assert watch.to_host == watch.to_device == (4, 4 * x.nbytes)


def test_1698_nothing_leaks() -> None:
    """Saved tensors had to be cleared by force, or stayed."""
    for options in OPTIONS:
        checkpointing.configure(None, **options)
        blocks = [mlp(8) for _ in range(3)]
        for _ in range(3):
            loss = run(blocks, torch.randn(4, 8), checkpointing.checkpoint).sum()
            loss.backward(retain_graph=True)
            del loss
        gc.collect()
        assert _C.live_regions() == 0


def test_inputs_that_do_not_divide_and_differ_in_size() -> None:
    """Buffers were made for the sizes of the first region, and sizes had to be divisible."""
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True)
    blocks = [mlp(size) for size in (3, 7, 1, 5)]
    x = [torch.randn(5, size, requires_grad=True) for size in (3, 7, 1, 5)]

    def model(call: Callable[..., Any]) -> list[Tensor]:
        return [call(block, each * 1) for block, each in zip(blocks, x, strict=True)]

    expected = step_results(lambda: model(lambda f, *args: f(*args)), x)
    for _ in range(3):
        assert_same_bits(step_results(lambda: model(checkpointing.checkpoint), x), expected)


@pytest.mark.parametrize("contiguous", [False, True])
def test_writing_to_an_input_raises(contiguous: bool) -> None:
    """It went unnoticed: inputs were kept through `.data`, which counts no writes."""
    checkpointing.configure(None, contiguous_checkpointing=contiguous)
    leaf = torch.randn(4, requires_grad=True)
    for _ in range(3):
        x = leaf * 1
        y = checkpointing.checkpoint(torch.sin, x)
        with torch.no_grad():
            x.zero_()
        with pytest.raises(RuntimeError, match="must not be written in place"):
            y.sum().backward()


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "make",
    [
        lambda y: (y,),
        lambda y: [y, 1],
        lambda y: {"a": y, "b": [y * 2]},
        lambda y: Pair(y, (y * 2, None)),
        lambda y: ((y, [y.sin()]), 3),
    ],
)
def test_results_keep_their_types(make: Callable[[Tensor], Any]) -> None:
    """A tuple of one became its element, a list a tuple; dicts and nested tuples lost gradients."""
    x = torch.randn(3, requires_grad=True)
    found = checkpointing.checkpoint(lambda x: make(x.exp()), x * 1)
    plain = make(x.exp())
    assert type(found) is type(plain)
    assert str(found).replace("SinBackward0", "") == str(plain).replace("SinBackward0", "")
    leaves = [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor)]
    assert all(leaf.requires_grad for leaf in leaves)
    leaves[-1].sum().backward()
    assert x.grad is not None


def test_autograd_grad_and_several_backwards(options: dict[str, Any]) -> None:
    """Both paths of DeepSpeed refused the first, and cleared what the second needs."""
    block = mlp(8)
    x = torch.randn(4, 8, requires_grad=True)

    def derivatives(call: Callable[..., Any]) -> list[Tensor]:
        loss = call(block, x * 1).square().sum()
        once = torch.autograd.grad(loss, x, retain_graph=True)
        twice = torch.autograd.grad(loss, x, retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return [*once, *twice, *torch.autograd.grad(slope.square().sum(), x)]

    expected = derivatives(lambda f, *args: f(*args))
    for _ in range(3):
        assert_same_bits(derivatives(checkpointing.checkpoint), expected)


def test_inputs_without_gradients() -> None:
    """The reentrant path gave parameters no gradient then."""
    block = mlp(8)
    checkpointing.checkpoint(block, torch.randn(4, 8)).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_autocast_and_batch_norm() -> None:
    """The recompute was in another dtype than forward, and moved running statistics again."""
    dtypes = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            dtypes.append(y.dtype)
            return self.norm(y.float()).tanh()

    checkpointing.configure(None, profile=True)  # the function is wrapped once more
    block = Block()
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpointing.checkpoint(block, torch.randn(4, 8, requires_grad=True))
    y.sum().backward()
    assert dtypes == [torch.bfloat16] * 2
    assert block.norm.num_batches_tracked.item() == 1


@pytest.mark.parametrize("tracked", [False, True])
def test_an_error_in_the_recompute_leaves_random_numbers_alone(tracked: bool) -> None:
    """States stayed rewound, those of the tracker too."""
    checkpointing.model_parallel_cuda_manual_seed(1)
    if not tracked:
        checkpointing.get_cuda_rng_tracker().reset()
    count = CountCalls()

    def function(x: Tensor) -> Tensor:
        if count(x) is x and count.calls == 2:
            raise ArithmeticError
        if not tracked:
            return nn.functional.dropout(x).sin()
        with checkpointing.get_cuda_rng_tracker().fork():
            return nn.functional.dropout(x).sin()

    y = checkpointing.checkpoint(function, torch.randn(8, requires_grad=True))
    torch.randn(3)
    states = torch.get_rng_state(), dict(checkpointing.get_cuda_rng_tracker().states_)
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), states[0])
    now = checkpointing.get_cuda_rng_tracker().states_
    assert now.keys() == states[1].keys()
    assert all(torch.equal(now[name], state) for name, state in states[1].items())


# Options.


def test_what_cannot_be_configured_changes_nothing(tmp_path: Path) -> None:
    """DeepSpeed's module globals had changed when `configure` raised."""
    (tmp_path / "broken.json").write_text("{")
    checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=4)
    before = checkpointing._state.options, checkpointing._state.buffers
    section = "activation_checkpointing"
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "num_checkpoints must be an int or None, got str", {"num_checkpoints": "4"}),
        (TypeError, "num_checkpoints must be an int or None, got bool", {"num_checkpoints": True}),
        (ValueError, "num_checkpoints must be at least 1, got 0", {"num_checkpoints": 0}),
        (TypeError, "profile must be a bool, got int", {"profile": 1}),
        (TypeError, "must be a dict or the path", {"deepspeed_config": 3}),
        (TypeError, "must be a dict, got bool", {"deepspeed_config": {section: True}}),
        (
            ValueError,
            "must be among partition_activations, .*got 'number_checkpoint'",
            {"deepspeed_config": {section: {"number_checkpoint": 3}}},
        ),
        (
            TypeError,
            "synchronize must be a bool, got str",
            {"deepspeed_config": {section: {"synchronize_checkpoint_boundary": "yes"}}},
        ),
        (ValueError, "must be a file in JSON", {"deepspeed_config": tmp_path / "broken.json"}),
        (FileNotFoundError, "none.json", {"deepspeed_config": str(tmp_path / "none.json")}),
        (
            TypeError,
            "mpu_ must have get_model_parallel_group",
            {"mpu_": object(), "partition_activations": True},
        ),
    ]
    for kind, message, arguments in wrong:
        with pytest.raises(kind, match=message):
            checkpointing.configure(**arguments)
        assert (checkpointing._state.options, checkpointing._state.buffers) == before
    with pytest.raises(TypeError, match="nlayers must be an int or None"):
        checkpointing.set_num_layers(2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="partition_activations must be a bool"):
        checkpointing.partition_activations_in_checkpoint(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="function must be callable, got Tensor"):
        checkpointing.checkpoint(torch.ones(1))  # type: ignore[arg-type]
    assert (checkpointing._state.options, checkpointing._state.buffers) == before


def test_is_configured() -> None:
    assert not checkpointing.is_configured()
    with pytest.raises(TypeError):
        checkpointing.configure(None, profile=2)  # type: ignore[arg-type]
    assert not checkpointing.is_configured()
    checkpointing.configure()
    assert checkpointing.is_configured()


@pytest.mark.parametrize("as_file", [False, True])
def test_a_configuration_and_arguments_that_go_before_it(as_file: bool, tmp_path: Path) -> None:
    config: Any = {
        "train_batch_size": 8,
        "activation_checkpointing": {
            "partition_activations": True,
            "contiguous_memory_optimization": True,
            "number_checkpoints": 7,
            "cpu_checkpointing": False,
            "synchronize_checkpoint_boundary": True,
            "profile": True,
        },
    }
    if as_file:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        config = str(path)
    checkpointing.configure(None, config, profile=False, num_checkpoints=3)
    found = checkpointing._state.options
    assert found == type(found)(
        partition_activations=True,
        contiguous_checkpointing=True,
        num_checkpoints=3,
        synchronize=True,
    )
    checkpointing.set_num_layers(9)
    checkpointing.partition_activations_in_checkpoint(False)
    assert checkpointing._state.options == type(found)(
        contiguous_checkpointing=True, num_checkpoints=9, synchronize=True
    )
    checkpointing.configure(None, {"train_batch_size": 8})
    assert checkpointing._state.options == type(found)()


def test_contiguous_checkpointing_and_reset() -> None:
    checkpointing.configure(None, contiguous_checkpointing=True)
    blocks = [mlp(8) for _ in range(3)]
    for _ in range(2):
        run(blocks, torch.randn(16, 8), checkpointing.checkpoint).sum().backward()
    (row,) = buffers().stats()
    assert (row["slab_bytes"], row["copies"]) == (3 * 512, 3)
    before = buffers()
    loss = run(blocks, torch.randn(16, 8), checkpointing.checkpoint).sum()
    checkpointing.reset()
    loss.backward()
    assert before.stats()[0]["slab_bytes"] == 0
    assert buffers().stats() == []
    checkpointing.configure(None)
    assert checkpointing._state.buffers is None
    checkpointing.reset()


def test_timings_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(None, profile=True)
    blocks = [mlp(8) for _ in range(3)]
    with caplog.at_level(logging.INFO, "memopt.compat.deepspeed"):
        run(blocks, torch.randn(4, 8), checkpointing.checkpoint).sum().backward()
    found = checkpointing.timings(reset=True)
    assert (found.forward_calls, found.recompute_calls) == (3, 3)
    assert found.forward_seconds > 0
    assert found.recompute_seconds > 0
    texts = [record.getMessage().split(":")[0] for record in caplog.records]
    assert texts == ["forward of a region"] * 3 + ["recompute of a region"] * 3
    assert checkpointing.timings() == checkpointing.Timings()


def test_checkpoint_function() -> None:
    """Code that calls DeepSpeed's autograd function itself, as Megatron's forks do."""
    x = torch.randn(4, requires_grad=True)
    outputs: list[Any] = []
    first, second = checkpointing.CheckpointFunction.apply(
        lambda x, n: (x.sin(), n, x.cos()), outputs, x * 1, 3
    )
    assert [type(output) for output in outputs] == [Tensor, int, Tensor]
    assert outputs[0] is first
    assert outputs[2] is second
    (first + second).sum().backward()
    assert torch.equal(x.grad, x.detach().cos() - x.detach().sin())
    alone: list[Any] = []
    assert checkpointing.CheckpointFunction.apply(torch.sin, alone, x * 1) is alone[0]


# Random numbers.


class Mpu:
    """As Megatron's, of one of two ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_model_parallel_rank(self) -> int:
        return self.rank


def test_seeds_differ_between_ranks_where_they_should() -> None:
    drawn = []
    for rank in range(2):
        checkpointing.configure(Mpu(rank))
        checkpointing.model_parallel_cuda_manual_seed(17)
        with checkpointing.get_cuda_rng_tracker().fork():
            own = torch.rand(4)
        drawn.append((torch.rand(4), own))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][1], drawn[1][1])
    for rank in range(2):
        torch.manual_seed(17 + 2718 + rank)
        assert torch.equal(torch.rand(4), drawn[rank][1])
    checkpointing.model_parallel_reconfigure_tp_seed(17)
    with checkpointing.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), drawn[1][1])


def test_fork_goes_on_where_it_ended() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("a", 5)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    parts = []
    for _ in range(2):
        with pytest.raises(ArithmeticError), tracker.fork("a"):
            parts.append(torch.rand(3))
            raise ArithmeticError
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(5)
    assert torch.equal(torch.cat(parts), torch.cat([torch.rand(3), torch.rand(3)]))


def test_tracker_errors() -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    with pytest.raises(ValueError, match=r"name must be one that was added \(none\), got 'a'"):
        with tracker.fork("a"):
            pass
    tracker.add("a", 5)
    with pytest.raises(ValueError, match="seed must be a new one, got 5"):
        tracker.add("b", 5)
    with pytest.raises(ValueError, match="name must be a new one, got 'a'"):
        tracker.add("a", 6)
    with pytest.raises(ValueError, match=r"\('a'\), got 'b'"):
        with tracker.fork("b"):
            pass


@pytest.mark.parametrize("nested", [False, True])
def test_fork_inside_regions(nested: bool, options: dict[str, Any]) -> None:
    """Dropout by both states: the plain run's bits, and afterwards both states are where the plain
    run leaves them.
    """
    tracker = checkpointing.get_cuda_rng_tracker()

    def dropouts(x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.sin())
        with tracker.fork():
            return nn.functional.dropout(x.exp(), 0.3)

    def outer(call: Callable[..., Any], x: Tensor) -> Tensor:
        return call(dropouts, call(dropouts, x)).cos()

    x = torch.randn(64, requires_grad=True)

    def results(call: Callable[..., Any]) -> list[Tensor | None]:
        checkpointing.model_parallel_cuda_manual_seed(3)

        def model() -> Tensor:
            y = x * 1
            for _ in range(3):
                y = call(outer, call, y) if nested else outer(call, y)
            return y

        found = step_results(model, [x])
        return [*found, torch.get_rng_state(), *tracker.get_states().values()]

    expected = results(lambda f, *args: f(*args))
    for _ in range(3):
        assert_same_bits(results(checkpointing.checkpoint), expected)


def test_models_are_copied_as_ever() -> None:
    """The face holds no module."""
    block = mlp(8)
    checkpointing.configure(None, contiguous_checkpointing=True)
    run([block], torch.randn(4, 8), checkpointing.checkpoint).sum().backward()
    assert copy.deepcopy(block).state_dict().keys() == block.state_dict().keys()
