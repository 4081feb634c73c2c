"""Proves: in random programs, with regions of every kind and scopes of memopt.recipes() at random
places and depths (memopt's and PyTorch's in each other), outputs, every gradient, requires_grad,
running statistics and the random numbers that follow have the bits of the plain run; also after an
exception at a random place of forward or recompute; and all of them die with their graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from memopt._checkpoint import is_checkpointing, is_recomputing
from memopt._extension import _C
from tests.checkpoint.programs import (
    CONTAINERS,
    OPS,
    RESULTS,
    Failure,
    Op,
    Part,
    Program,
    Region,
    Weights,
    build,
)
from tests.checkpoint.support import collector_disabled, taken_for_an_accelerator
from tests.recipes.support import scope
from tests.support.bits import assert_same_bits

indices = st.integers(0, 8)
several = st.lists(indices, min_size=1, max_size=4).map(tuple)
ops = st.builds(Op, st.sampled_from(sorted(OPS)), indices, indices)


def regions(items: st.SearchStrategy[Op | Region]) -> st.SearchStrategy[Op | Region]:
    return st.builds(
        Region,
        st.sampled_from(
            ["checkpoint", "disk", "wrapped", "offloaded", "torch", "recipes", "offload"]
        ),
        st.lists(items, min_size=1, max_size=5).map(tuple),
        several,
        st.sampled_from(sorted(CONTAINERS)),
        several,
        st.sampled_from(sorted(RESULTS)),
    )


items = st.recursive(ops, regions, max_leaves=12)
BACKWARDS = ["backward", "grad", "inputs", "twice", "parts", "left", "second derivative"]
programs = st.builds(
    Program,
    st.lists(regions(items) | ops, min_size=1, max_size=5).map(tuple),
    st.sampled_from(BACKWARDS),
    st.booleans(),
    st.booleans(),
)


@pytest.fixture(autouse=True)
def _offload() -> Iterator[None]:
    """In backward as well, where nested regions are entered again."""
    with taken_for_an_accelerator("cpu"):
        yield


@pytest.fixture
def collector_off() -> Iterator[None]:
    """For a whole test: collecting before each example takes longer than the example."""
    with collector_disabled():
        yield


@dataclass
class Run:
    """What a run of a program may be told by."""

    outputs: list[Tensor]
    requires_grad: list[bool]
    gradients: list[Tensor | None]
    state: list[object]
    buffers: list[Tensor]


def leaves_and_values() -> tuple[list[Tensor], list[Tensor]]:
    """Leaves, and what programs begin with: leaves, a constant, views of one base, a hidden one."""
    torch.manual_seed(1)
    leaf, base = torch.randn(3, 3, requires_grad=True), torch.randn(6, 3, requires_grad=True)
    hidden = leaf.sin()
    return [leaf, base], [leaf, torch.randn(3, 3), base[:3], base[1:4], base[3:].t(), hidden]


def forward(part: Part, values: list[Tensor]) -> Tensor:
    """Appends to `values`, and gives the loss of all of them."""
    torch.manual_seed(2)
    part.extend(values)
    return torch.stack([(value * (i + 1)).square().mean() for i, value in enumerate(values)]).sum()


def differentiate(loss: Tensor, leaves: list[Tensor], how: str) -> list[Tensor | None]:
    if how == "backward":
        loss.backward()
    if how == "inputs":
        loss.backward(inputs=leaves[1:])
    if how in ("backward", "inputs"):
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return gradients
    if how == "left":  # the rest of the graph is never asked for
        return list(torch.autograd.grad(loss, leaves[:1], retain_graph=True))
    if how == "parts":
        first = torch.autograd.grad(loss, leaves[1:2], retain_graph=True, materialize_grads=True)
        second = torch.autograd.grad(loss, leaves[:1], retain_graph=True)
        return [*first, *second, *torch.autograd.grad(loss, leaves, materialize_grads=True)]
    retain, create = how == "twice", how == "second derivative"
    found = torch.autograd.grad(
        loss, leaves, retain_graph=retain or create, create_graph=create, materialize_grads=True
    )
    if retain:
        found += torch.autograd.grad(loss, leaves[:2], materialize_grads=True)
    if create:
        slope = torch.stack([grad.square().mean() for grad in found]).sum()
        found += torch.autograd.grad(slope, leaves, materialize_grads=True)
    return [grad.detach() for grad in found]


def context_state() -> list[object]:
    return [
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        is_checkpointing(),
        is_recomputing(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    ]


def run(program: Program, weights: Weights, regions: bool) -> Run:
    weights.norm.reset_running_stats()
    part = build(program, weights, regions)
    leaves, values = leaves_and_values()
    with scope(program.recipes and regions):
        loss = forward(part, values)
    torch.rand(1)  # so that backward does not begin where forward ended
    gradients = differentiate(loss, [*leaves, weights.trained], program.backward)
    return Run(
        [value.detach() for value in values],
        [value.requires_grad for value in values],
        gradients,
        context_state(),
        [buffer.clone() for buffer in weights.norm.buffers()],
    )


def assert_same_run(actual: Run, expected: Run, program: Program) -> None:
    assert_same_bits(actual.outputs, expected.outputs)
    assert actual.requires_grad == expected.requires_grad
    assert_same_bits(actual.gradients, expected.gradients)
    assert actual.state == expected.state
    if "torch" not in program.kinds():  # PyTorch's checkpoint moves statistics twice
        assert_same_bits(actual.buffers, expected.buffers)


@pytest.mark.slow
@settings(max_examples=150)
@given(programs)
def test_random_programs_equal_the_plain_run(program: Program) -> None:
    weights = Weights()
    expected = run(program, weights, regions=False)
    assert_same_run(run(program, weights, regions=True), expected, program)


@given(programs)
def test_regions_of_random_programs_die_with_their_graph(
    collector_off: None, program: Program
) -> None:
    weights = Weights()
    run(program, weights, regions=True)
    before = _C.live_regions(), _C.live_handles()
    run(program, weights, regions=True)
    assert (_C.live_regions(), _C.live_handles()) == before


@given(programs, st.integers(0, 12))
def test_exceptions_in_forward_leave_what_the_plain_run_leaves(program: Program, at: int) -> None:
    weights = Weights()
    after: list[tuple[str, list[object]]] = []
    for with_regions in (False, True):
        part = build(program, weights, with_regions)
        _, values = leaves_and_values()
        weights.fuse.left, outcome = at, "ended"
        try:
            with scope(program.recipes and with_regions):
                forward(part, values)
        except Failure:
            outcome = "raised"
        weights.fuse.left = None
        after.append((outcome, context_state()))
    assert after[1] == after[0]
    expected = run(program, weights, regions=False)
    assert_same_run(run(program, weights, regions=True), expected, program)


@given(programs, st.integers(0, 12))
def test_exceptions_in_the_recompute_leave_the_graph_usable(program: Program, at: int) -> None:
    """The same graph gives the right gradients, if the first backward retained it."""
    weights = Weights()
    weights.norm.reset_running_stats()
    leaves, values = leaves_and_values()
    loss = forward(build(program, weights, regions=False), values)
    expected = torch.autograd.grad(loss, [*leaves, weights.trained], materialize_grads=True)

    weights.norm.reset_running_stats()
    leaves, values = leaves_and_values()
    with scope(program.recipes):
        loss = forward(build(program, weights, regions=True), values)
    torch.rand(1)
    before = context_state()
    buffers = [buffer.clone() for buffer in weights.norm.buffers()]
    own = list(weights.norm.buffers())
    weights.fuse.left = at
    tensors = [*leaves, weights.trained]
    with contextlib.suppress(Failure):  # a recompute may have fewer operations than that
        torch.autograd.grad(loss, tensors, retain_graph=True, materialize_grads=True)
    weights.fuse.left = None
    assert context_state() == before
    assert all(a is b for a, b in zip(weights.norm.buffers(), own, strict=True))
    if "torch" not in program.kinds():
        assert_same_bits(weights.norm.buffers(), buffers)
    assert_same_bits(torch.autograd.grad(loss, tensors, materialize_grads=True), expected)
    assert context_state() == before


@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("outer_first", [True, False])
def test_one_program_with_everything(how: str, outer_first: bool) -> None:
    """Not drawn: what the strategies must be able to make, in one."""
    every = tuple(Op(name, i, i + 1) for i, name in enumerate(OPS))
    inner: tuple[Op | Region, ...] = every
    for kind in ("wrapped", "offloaded", "offload", "recipes", "disk", "checkpoint", "wrapped"):
        region = Region(kind, inner, (0, 1, 1, 2), "nested", (0, 1, 5), "dict")
        inner = (Op("dropout"), region, Op("matmul", 0, 1))
    program = Program(inner, how, outer_first, recipes=True)
    weights = Weights()
    expected = run(program, weights, regions=False)
    assert_same_run(run(program, weights, regions=True), expected, program)
