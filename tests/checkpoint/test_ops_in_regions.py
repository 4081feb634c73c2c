"""Proves: memopt's ops work inside checkpointed regions, memopt's and PyTorch's of both kinds, with
autocast on and off: outputs and gradients have the bits of the plain run, also where the op is the
last in its region, whose recompute stops inside it; regions and ops together leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import memopt
from memopt._checkpoint import checkpoint, checkpoint_wrapper
from tests.checkpoint.support import REGIONS, collector_disabled, live_objects, plain
from tests.support.bits import assert_same_bits
from tests.support.cases import EACH_OP, OP_CASES, Call, OpCase, as_tuple
from tests.support.shapes import FLOAT32

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_region = pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)

# The op where a region's recompute stops in it, where it goes on after it, where it feeds a GEMM.
SURROUNDINGS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "alone": lambda op, x: op(x),
    "last": lambda op, x: op(x.sin()),
    "first": lambda op, x: op(x).sin(),
    "before a product": lambda op, x: op(x) @ op(x).T,
}


def in_region(case: OpCase, region, surroundings) -> Callable[[Call], Tensor]:
    def function(call: Call) -> Tensor:
        def body(*tensors: Tensor | None) -> Tensor:
            inside = call.replace(**dict(zip(call.tensors, tensors, strict=True)))

            def op(t: Tensor) -> Tensor:
                outputs = as_tuple(case.memopt(inside.replace(**{next(iter(call.tensors)): t})))
                return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

            return surroundings(op, inside.first)

        return region(body, *call.tensors.values())

    return function


@every_op
@every_region
@pytest.mark.parametrize("surroundings", SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_gradients_are_those_of_the_plain_run(
    case: OpCase, region, surroundings, dtype: torch.dtype | None, device: torch.device
) -> None:
    call = case.make_call((5, 130), FLOAT32, device)
    results = []
    for way in (plain, region):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            leaves = call.leaves()
            output = in_region(case, way, surroundings)(leaves)
        # By backward, since reentrant regions know no other way.
        output.backward(torch.ones_like(output))
        results.append([output.detach(), *(t.grad for t in leaves.differentiable.values())])
    assert_same_bits(results[1], results[0])
    # Autocast lowers the product, and neither the op nor sin.
    lowered = dtype is not None and surroundings is SURROUNDINGS["before a product"]
    assert results[1][0].dtype == (dtype if lowered else torch.float32)


@every_op
def test_second_backward_and_single_gradients(case: OpCase, device: torch.device) -> None:
    leaves = case.make_call((5, 130), FLOAT32, device).leaves()
    output = in_region(case, checkpoint, SURROUNDINGS["last"])(leaves)
    (first,) = torch.autograd.grad(output.sum(), leaves.first, retain_graph=True)
    (second,) = torch.autograd.grad(output.sum(), leaves.first)
    assert torch.equal(first, second)


@every_op
def test_nested_regions(case: OpCase, device: torch.device) -> None:
    def nested(fn, *args) -> Tensor:
        return checkpoint(lambda *args: checkpoint(fn, *args).cos(), *args)

    def plainly(fn, *args) -> Tensor:
        return fn(*args).cos()

    call = case.make_call((5, 130), FLOAT32, device)
    leaves, results = call.leaves(), []
    for way in (nested, plainly):
        output = in_region(case, way, SURROUNDINGS["last"])(leaves)
        wanted = list(leaves.differentiable.values())
        results.append([output, *torch.autograd.grad(output.sum(), wanted)])
    assert_same_bits(*results)


@pytest.mark.parametrize(
    ("case", "region"),
    [(case, region) for case in OP_CASES for region in REGIONS if case in EACH_OP]
    + [(case, checkpoint) for case in OP_CASES if case not in EACH_OP],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_op_that_ends_its_region_leaves_nothing(case: OpCase, region, device: torch.device) -> None:
    """The recompute stops inside the op, which must not keep its output, and so its graph, alive.

    Such a graph holds what the op saved, its input among it, whether or not Python sees the graph.
    """
    call = case.make_call((5, 130), FLOAT32, device).leaves()
    inputs: list[StorageWeakRef] = []

    def surroundings(op, x: Tensor) -> Tensor:
        y = x.sin()
        inputs.append(StorageWeakRef(y.untyped_storage()))
        return op(y)

    def step() -> None:
        in_region(case, region, surroundings)(call).sum().backward()
        call.first.grad = None

    step()
    with collector_disabled():
        before = live_objects(Tensor)
        for _ in range(5):
            step()
        assert live_objects(Tensor) == before
    assert len(inputs) == 2 * 6
    assert all(storage.expired() for storage in inputs)


def test_wrapped_modules_of_memopt(device: torch.device) -> None:
    modules = [memopt.nn.LayerNorm(16), memopt.nn.GELU(), memopt.nn.LayerNormGELU(16)]
    x = torch.randn(4, 16, device=device, requires_grad=True)
    for module in modules:
        module.to(device)
        tensors = [x, *module.parameters()]
        expected = torch.autograd.grad(module(x).sin().sum(), tensors)
        checkpoint_wrapper(module)
        assert_same_bits(torch.autograd.grad(module(x).sin().sum(), tensors), expected)
