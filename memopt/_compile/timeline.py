"""The bytes that are allocated at each time, in a forward and a backward that a cut divides.

Inputs and parameters are allocated anyway and do not count. Tensors that are kept, outputs,
gradients and the tensors between kernels count. All that a kernel writes is allocated when it
begins, but for what it writes over a tensor that nothing reads any more. The outputs of
forward count until the end, and incoming gradients from the start of backward, since the caller may
hold them.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from memopt._compile.graph import JointGraph
from memopt._compile.kernels import Kernel, Kernels
from memopt._compile.policy import Cut
from memopt._compile.steps import GraphStep, steps_of

# Followed to the byte in most models; this is for what was not measured.
_MARGIN = 200


class Bytes(NamedTuple):
    """The predicted bytes of one division into forward and backward."""

    kept: int
    """Bytes kept between forward and backward, the outputs of forward among them."""
    most: int
    """The most bytes at any time."""


def predict_graph(joint: JointGraph, cut: Cut) -> Bytes:
    """The bytes of a division of `joint`."""
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
    for tensor in held:
        last[tensor] = max(last.get(tensor, 0), boundary)
    until_end = {GraphStep(node, False) for node in joint.forward_outputs}.union(steps.results)
    outputs = {tensor for step in until_end if step in memory for tensor in memory[step]}
    last.update(dict.fromkeys(outputs, end))
    between = sum(joint.nbytes(t.node) for t in held if t in begin and not t.in_backward)
    not_ours = outputs | {tensor for tensor in held if tensor.node in joint.of_caller}
    for index, kernel in enumerate(kernels):
        for step, tensor in _written_over(kernel, index, begin, last, not_ours):
            begin[step] = begin.pop(tensor)
    call = _calls(kernels)
    changes = [0] * (len(kernels) + 2)
    for tensor, index in begin.items():
        nbytes = joint.nbytes(tensor.node)
        changes[call[index]] += nbytes
        changes[call[last[tensor]] + 1] -= nbytes
    most = max(itertools.accumulate(changes))
    return Bytes(between, most + most // _MARGIN)


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
