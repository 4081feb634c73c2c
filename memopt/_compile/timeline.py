"""The bytes that are allocated at each time in a forward and a backward that a cut divides, and the
work that they take.

Inputs and parameters are allocated anyway and do not count. Tensors that are kept, outputs,
gradients and the tensors between kernels count. All that a kernel writes is allocated when it
begins, but for what it writes over a tensor that nothing reads any more. Incoming gradients count
from the start of backward, those that are returned to its end. The outputs of forward count until
backward begins, and longer if backward reads them: whoever makes their gradients needs both at one
time, but a loss that is a graph of its own has freed its logits when this backward begins. What the
caller holds on to beyond that is the caller's, as inputs are.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from memopt._compile.graph import JointGraph
from memopt._compile.kernels import Kernel, Kernels
from memopt._compile.ops import (
    device_kind,
    elements,
    is_contraction,
    is_draw,
    module_path,
    nbytes,
    operations,
)
from memopt._compile.policy import Cut
from memopt._compile.steps import GraphStep, Steps, steps_of

# What takes as long as reading or writing a byte, in a rough average over machines; see NOTES.md.
# Operations of contractions, and bytes for each number that is drawn.
_OPERATIONS_PER_BYTE = {"cpu": 5, "cuda": 150}
_BYTES_PER_DRAW = {"cpu": 190, "cuda": 2}


class Prediction(NamedTuple):
    """The predicted bytes and work of one division into forward and backward."""

    kept: int
    """Bytes kept between forward and backward, the outputs of forward among them."""
    most: int
    """The most bytes at any time."""
    where: str
    """The op that runs when they are allocated, and its module."""
    work: float
    """The cost of both halves, in bytes that are read or written in the same time."""


def predict_graph(joint: JointGraph, cut: Cut) -> Prediction:
    """The bytes and the work of a division of `joint`."""
    steps = steps_of(joint, cut)
    made = Kernels(steps)
    kernels, memory = made.order, made.memory
    end = len(kernels)
    boundary = next((i for i, kernel in enumerate(kernels) if kernel.in_backward), end)
    arrive = [
        GraphStep(n, True) for n in joint.nodes if n.op == "placeholder" and n in joint.backward
    ]
    begin = dict.fromkeys(arrive, boundary)
    last = dict(begin)
    for index, kernel in enumerate(kernels):
        begin.update(dict.fromkeys(kernel.writes, index))
        last.update(dict.fromkeys((*kernel.reads, *kernel.writes), index))
    held = {tensor for step in steps.kept for tensor in memory[step]}
    begin.update({tensor: 0 for tensor in held if tensor.node in joint.copied})
    for step in steps.kept:
        until = boundary if step.node in cut.kept else boundary - 1
        for tensor in memory[step]:
            last[tensor] = max(last.get(tensor, 0), until)
    returned = (GraphStep(node, False) for node in joint.forward_outputs)
    outputs = {tensor for step in returned if step in memory for tensor in memory[step]}
    results = {tensor for step in steps.results if step in memory for tensor in memory[step]}
    last.update(dict.fromkeys(results, end))
    between = sum(nbytes(t.node) for t in held if t in begin and not t.in_backward)
    not_ours = outputs | results | {tensor for tensor in held if tensor.node in joint.of_caller}
    for index, kernel in enumerate(kernels):
        for step, tensor in _written_over(kernel, index, begin, last, not_ours):
            begin[step] = begin.pop(tensor)
    call = _calls(kernels)
    changes = [0] * (len(kernels) + 2)
    for tensor, index in begin.items():
        taken = nbytes(tensor.node)
        changes[call[index]] += taken
        changes[call[last[tensor]] + 1] -= taken
    totals = list(itertools.accumulate(changes))
    most = max(totals)
    at = totals.index(most)
    running = [kernel for kernel, number in zip(kernels, call, strict=False) if number == at]
    where, work = _where(running), _work(steps, kernels)
    outside = between + sum(nbytes(step.node) for step in arrive)
    if outside > most:
        most, where = outside, "what makes the gradients of its outputs"
    return Prediction(between, most, where, work)


def _where(running: list[Kernel]) -> str:
    """The largest tensor that these kernels write, in words, and the module that it is of."""
    written = [step for kernel in running for step in kernel.writes]
    if not written:
        return "the end of backward"
    node, in_backward = max(written, key=lambda step: nbytes(step.node))
    half = "backward" if in_backward else "forward"
    module = module_path(node)
    return f"{node.name} of {module}, in {half}" if module else f"{node.name}, in {half}"


def _work(steps: Steps, kernels: list[Kernel]) -> float:
    """The bytes that kernels read and write, and those that take as long as what they compute."""
    moved = sum(
        nbytes(tensor.node) for kernel in kernels for tensor in (*kernel.reads, *kernel.writes)
    )
    nodes = [step.node for step in steps.order]
    device = device_kind(nodes)
    per_byte = _OPERATIONS_PER_BYTE.get(device, _OPERATIONS_PER_BYTE["cuda"])
    per_draw = _BYTES_PER_DRAW.get(device, _BYTES_PER_DRAW["cuda"])
    computed = sum(operations(node) for node in nodes if is_contraction(node)) / per_byte
    return moved + computed + sum(elements(node) for node in nodes if is_draw(node)) * per_draw


def _calls(kernels: list[Kernel]) -> list[int]:
    """The number of the call that runs each kernel, and that of the end: all generated code between
    two libraries' ops is called at once."""
    calls = [0]
    for before, kernel in itertools.pairwise(kernels):
        same = before.loop is not None and kernel.loop is not None
        calls.append(calls[-1] + (not same or before.in_backward != kernel.in_backward))
    return [*calls, calls[-1] + 1]


def _written_over(
    kernel: Kernel,
    index: int,
    begin: dict[GraphStep, int],
    last: dict[GraphStep, int],
    not_ours: set[GraphStep],
) -> list[tuple[GraphStep, GraphStep]]:
    """Pairs of a tensor that the kernel writes and one, read by no other, that it overwrites."""
    found: dict[GraphStep, GraphStep] = {}
    for step, candidates in kernel.in_place.items():
        for tensor in candidates:
            if (
                tensor not in found
                and tensor not in not_ours
                and begin.get(tensor, index) < index == last[tensor]
                and kernel.reads[tensor] == {step}
            ):
                found[tensor] = step
                break
    return [(step, tensor) for tensor, step in found.items()]
