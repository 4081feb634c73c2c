"""Proves memopt.compat.deepspeed.checkpointing: what DeepSpeed's own tests of activation
checkpointing assert, on the CPU and to the last bit; and each defect that was reported of
DeepSpeed's, or found by reading, is absent. Numbers are those of deepspeedai/DeepSpeed's issues and
pull requests, unless another project is named.
"""

from __future__ import annotations

import gc
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt._extension import _C
from memopt.compat.deepspeed import checkpointing
from memopt.memory.allocator import LiveBytes
from tests.checkpoint.support import CountCalls, Watch, mlp, step_results
from tests.compat.conftest import OPTIONS
from tests.compat.support import buffers, run
from tests.support.bits import assert_same_bits

SIZE = 20


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
    expected = step_results(
        lambda: function(value * 1, scale=scale * 1, offset=1.5), [value, scale]
    )
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
    forward (Lightning-AI/pytorch-lightning#20329). Here none is needed, and a wrong one is no harm.
    """
    for number in (None, 1, 100):
        checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=number)
        for layers in (3, 5, 2):
            assert_a_stack_is_the_plain_one(layers)


def assert_a_stack_is_the_plain_one(layers: int) -> None:
    blocks = [mlp(8) for _ in range(layers)]
    x = torch.randn(4, 8, requires_grad=True)
    expected = step_results(lambda: run(blocks, x), [x])
    assert_same_bits(step_results(lambda: run(blocks, x, checkpointing.checkpoint), [x]), expected)


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
    gc.collect()
    before = _C.live_regions()  # what others hold
    for options in OPTIONS:
        checkpointing.configure(None, **options)
        blocks = [mlp(8) for _ in range(3)]
        for _ in range(3):
            loss = run(blocks, torch.randn(4, 8), checkpointing.checkpoint).sum()
            loss.backward(retain_graph=True)
            del loss
        gc.collect()
        assert _C.live_regions() == before


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


def test_a_recompute_that_differs_raises() -> None:
    """Gradients were wrong without a word."""
    count = CountCalls()

    def function(x: Tensor) -> Tensor:
        return count(x)[: 4 // count.calls].sin()

    y = checkpointing.checkpoint(function, torch.randn(4, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"recompute of region .*function must save"):
        y.sum().backward()


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
