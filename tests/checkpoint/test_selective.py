"""Proves: PyTorch's selective checkpoint contexts work in memopt's regions as in PyTorch's. What a
list or a policy saves is not run again, memopt's own ops can be saved by name, gradients have the
bits of the plain run, what is kept is freed by reference counting, and mistakes raise.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import memopt
from memopt._checkpoint import checkpoint, ops_worth_saving
from tests.checkpoint.support import (
    WAYS,
    collector_disabled,
    every_way,
    live_tensors_and_regions,
    plain,
    step_results,
)
from tests.support.bits import assert_same_bits
from tests.support.record_ops import RecordOps

aten = torch.ops.aten


class Block(nn.Module):
    """A matrix product, attention, memopt's ops, dropout, and something cheap at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = memopt.nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.norm_gelu = memopt.nn.LayerNormGELU(8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = F.dropout(self.norm_gelu(y), 0.3)
        return (self.out(y) + x).exp().sin()


@pytest.fixture
def block() -> Block:
    return Block()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 8, requires_grad=True)


def selective(
    policy: Any, way: Callable[..., Any] = checkpoint, **options: Any
) -> Callable[..., Any]:
    """`way` with the contexts that `policy` (a list of operators, or a function) asks for."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy, **options)
    return functools.partial(way, context_fn=contexts)


def calls_in_a_step(way: Callable[..., Any], block: nn.Module, x: Tensor) -> Counter[str]:
    """How often each operator reaches the kernels, below the modes of a selective checkpoint."""
    with RecordOps() as record:
        step_results(lambda: way(block, x), [x, *block.parameters()])
    return Counter(map(str, record.ops))


memopt_ops = torch.ops.memopt
IN_FORWARD = [
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.bernoulli_.float,
    aten.exp.default,
    memopt_ops._norm_forward.default,
]


def save_memopt(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    mine = str(op).startswith("memopt.")
    return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE


def save_every_second_product(calls: Counter[bool]) -> Callable[..., CheckpointPolicy]:
    """A policy with state, as torchtitan has one."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not aten.addmm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        calls[context.is_recompute] += 1
        odd = calls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.MUST_RECOMPUTE

    return policy


POLICIES: dict[str, Callable[[], Any]] = {
    "nothing": list,
    "ops_worth_saving": ops_worth_saving,
    "everything": lambda: [op for op in IN_FORWARD if op is not aten.bernoulli_.float],
    "memopt's by name": lambda: save_memopt,
    "every second product": lambda: save_every_second_product(Counter()),
    "booleans": lambda: lambda context, op, *args, **kwargs: op is aten.exp.default,
}
every_policy = pytest.mark.parametrize("make_policy", POLICIES.values(), ids=POLICIES.keys())


@every_policy
@pytest.mark.parametrize("nested", [False, True])
def test_gradients_are_those_of_the_plain_run(
    make_policy: Callable[[], Any], nested: bool, block: Block, x: Tensor
) -> None:
    def call(way: Callable[..., Any]) -> Tensor:
        if nested:
            return way(lambda x: checkpoint(block, x.sin()).cos(), x)
        return way(block, x.sin()).cos()

    tensors = [x, *block.parameters()]
    expected = step_results(lambda: call(plain), tensors)
    assert_same_bits(step_results(lambda: call(selective(make_policy())), tensors), expected)


@every_policy
def test_operators_run_as_often_as_in_torch(
    make_policy: Callable[[], Any], block: Block, x: Tensor
) -> None:
    ours, theirs = (calls_in_a_step(selective(make_policy(), way), block, x) for way in WAYS)
    for operator in map(str, IN_FORWARD):
        assert ours[operator] == theirs[operator] >= 1


def test_what_is_worth_saving_is_not_run_again(block: Block, x: Tensor) -> None:
    plainly, fully, selectively = (
        calls_in_a_step(way, block, x) for way in (plain, checkpoint, selective(ops_worth_saving()))
    )
    saved = {
        "aten.addmm.default": 2,
        "aten._scaled_dot_product_flash_attention_for_cpu.default": 1,
    }
    for operator, calls in saved.items():
        assert plainly[operator] == selectively[operator] == calls
        assert fully[operator] == 2 * calls
    assert selectively["memopt._norm_forward.default"] == 4  # of two norms


def test_memopts_operators_are_saved_by_name(block: Block, x: Tensor) -> None:
    calls = calls_in_a_step(selective(save_memopt), block, x)
    assert calls["memopt._norm_forward.default"] == 2
    assert calls["aten.addmm.default"] == 4


def test_a_policy_sees_each_operator_with_its_arguments_in_both_runs(
    block: Block, x: Tensor
) -> None:
    """PyTorch 2.13 asks in forward only; older versions ask again in the recompute."""
    shapes: list[tuple[int, ...]] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_norm = op is memopt_ops._norm_forward.default and "activation" not in kwargs
        if is_norm and not context.is_recompute:
            shapes.append(tuple(args[0].shape))
        return CheckpointPolicy.PREFER_RECOMPUTE

    selective(policy)(block, x).sum().backward()
    assert shapes == [(2, 5, 8)]


@every_way
def test_what_is_kept_is_freed_when_backward_has_used_it(way: Callable[..., Any]) -> None:
    storages: list[StorageWeakRef] = []

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        storages.append(StorageWeakRef(y.untyped_storage()))
        return y.sin() + 1

    x = torch.randn(4, requires_grad=True)
    # The first use in a process imports torch._dynamo, whose errors hold frames for the collector.
    selective([aten.exp.default], way)(function, x).sum().backward()
    storages.clear()
    with collector_disabled():
        y = selective([aten.exp.default], way)(function, x)
        assert not storages[0].expired()  # kept
        y.sum().backward()
        assert len(storages) == 2
        assert all(storage.expired() for storage in storages)
        y = selective([aten.exp.default], way)(function, x)
        del y  # without backward
        assert storages[2].expired()


def test_selective_regions_die_by_reference_counting(block: Block, x: Tensor) -> None:
    def step() -> None:
        step_results(lambda: selective(ops_worth_saving())(block, x), [x, *block.parameters()])

    step()
    with collector_disabled():
        before = live_tensors_and_regions()
        for _ in range(5):
            step()
        assert live_tensors_and_regions() == before


def test_without_gradients_nothing_is_kept(block: Block, x: Tensor) -> None:
    asked: list[Any] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append(op)
        return True

    with torch.no_grad():
        selective(policy)(block, x)
    assert asked == []


@every_way
def test_a_second_backward_raises(way: Callable[..., Any], block: Block, x: Tensor) -> None:
    """What was kept is given up as the first recompute reads it."""
    y = selective(ops_worth_saving(), way)(block, x).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        y.backward()


@every_way
@pytest.mark.parametrize("allowed", [False, True])
def test_kept_tensors_written_in_place(way: Callable[..., Any], allowed: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin().mul_(torch.ones(4)).exp().cos()

    x = torch.randn(4, requires_grad=True)
    options = {"allow_cache_entry_mutation": allowed}
    y = selective([aten.sin.default], way, **options)(function, x)
    if allowed:
        y.sum().backward()
        assert x.grad is not None
        return
    with pytest.raises(RuntimeError, match="has been mutated"):
        y.sum().backward()


@every_way
def test_operators_with_several_results_and_with_none_that_is_a_tensor(
    way: Callable[..., Any],
) -> None:
    def function(x: Tensor) -> Tensor:
        values, indices = torch.sort(x * 2)
        scale = values.sum().item()
        return values.exp() * scale + indices.double().mean()

    x = torch.randn(6, requires_grad=True)
    saves = [aten.sort.default, aten._local_scalar_dense.default]
    with RecordOps() as record:
        results = step_results(lambda: selective(saves, way)(function, x), [x])
    assert_same_bits(results, step_results(lambda: function(x), [x]))
    assert record.ops.count(aten.sort.default) == 1
    assert record.ops.count(aten._local_scalar_dense.default) == 1


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="seen not to raise in PyTorch 2.11")
@every_way
def test_a_recompute_that_calls_another_operator_raises(way: Callable[..., Any]) -> None:
    calls: list[None] = []

    def function(x: Tensor) -> Tensor:
        calls.append(None)
        return (x.exp() if len(calls) == 1 else x.tanh()).sin()

    x = torch.randn(4, requires_grad=True)
    y = selective([aten.exp.default], way)(function, x)
    with pytest.raises(RuntimeError, match="tanh"):
        y.sum().backward()


def test_the_list_holds_operators_that_this_torch_has() -> None:
    operators = ops_worth_saving()
    assert aten.mm.default in operators
    assert aten.addmm.default in operators
    assert len(set(operators)) == len(operators)
    assert all(isinstance(operator, torch._ops.OpOverload) for operator in operators)
    create_selective_checkpoint_contexts(operators)  # refuses anything else
