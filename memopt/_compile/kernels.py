"""The kernels of forward and backward, their order, and the tensors that they read and write in
memory: Inductor's lowering, fusion and sorting, in short.

An element-wise op that only generated code reads is computed inside of that code and has no tensor.
One that a library reads as well is stored in front of the library's op; if it reads little itself,
code that runs before recomputes it. Generated code of the same number of elements that
reads a tensor in common, or one of the other's, is one kernel, unless another must run between.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from memopt._compile.ops import (
    elements,
    has_tensor,
    is_elementwise,
    is_fusible,
    is_generated,
    is_product,
    is_reshape,
    is_scatter,
    is_sum,
    is_view,
    reduces_rows,
)
from memopt._compile.steps import GraphStep, Reader, Steps

# Inductor's: ops that are farther apart are not fused for a tensor that both read.
_FAR = 64


@dataclass
class Kernel:
    """A library's op, or a loop of generated code. Tensors in memory are named by their steps."""

    in_backward: bool
    loop: tuple[int, ...] | None
    """The sizes that are the same in all that one loop computes; None: a library's op."""
    first: float
    """The number of its first op. Kernels run in this order as far as what they read allows."""
    last: float
    index: int
    before: int
    """The kernels that must run before it: a bit for each index."""
    reads: dict[GraphStep, set[GraphStep]] = field(default_factory=dict)
    """The steps of this kernel that read each tensor."""
    writes: list[GraphStep] = field(default_factory=list)
    in_place: dict[GraphStep, list[GraphStep]] = field(default_factory=dict)
    """The tensors that each written one could be written over: read at the same places."""


class Kernels:
    """The kernels of forward and backward."""

    order: list[Kernel]
    """The kernels in the order in which they run."""
    memory: dict[GraphStep, frozenset[GraphStep]]
    """The tensors that hold each step's value, or from which code computes it."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        # By sums of two, the matrix product that is computed in one op with the sum.
        self._products = {step: p for step in steps.order if (p := self._added_product(step))}
        self._inside = set(self._products.values())
        self._users = Counter(made for all_made in steps.arguments.values() for made in all_made)
        self._number: dict[GraphStep, float] = {}
        for step in steps.order:
            self._number[step] = len(self._number)
        self.order = []
        self.memory = {}
        self._writer: dict[GraphStep, Kernel] = {}
        self._by_read: dict[GraphStep, list[Kernel]] = {}
        # What a step's code reads, and what of it where it writes.
        self._inner: dict[GraphStep, tuple[frozenset[GraphStep], frozenset[GraphStep]]] = {}
        for step in steps.order:
            self._add(step)
        self.order = _sorted(self.order, self._writer)

    def _add(self, step: GraphStep) -> None:
        node = step.node
        self.memory[step] = frozenset((step,))
        if not self._steps.arguments[step]:
            read, aligned = frozenset[GraphStep](), frozenset[GraphStep]()
        elif is_view(node):
            self.memory[step] = self.memory[self._steps.arguments[step][0]]
            return
        else:
            read, aligned = self._reads(step)
        self._inner[step] = read, aligned
        if node.op != "call_function":
            return
        if node.target is operator.getitem and not is_generated(node):
            kernel = self._writer[step] = self._writer[self._steps.arguments[step][0]]
            if has_tensor(node):
                kernel.writes.append(step)
        elif step in self._inside or (is_generated(node) and not has_tensor(node)):
            self.memory[step] = read
        elif self._is_call(step):
            self._call(step, read)
        elif self._is_inlined(step):
            self.memory[step] = read
        else:
            self._join(step, read, aligned)

    def _reads(self, step: GraphStep) -> tuple[frozenset[GraphStep], frozenset[GraphStep]]:
        """The tensors that it reads, and those of them that it reads where it writes."""
        read: set[GraphStep] = set()
        moved: set[GraphStep] = set()
        for argument in self._steps.arguments[step]:
            in_place, view = is_elementwise(step.node), None
            while is_view(argument.node):
                in_place = in_place and is_reshape(argument.node)
                view, argument = argument, self._steps.arguments[argument][0]
            memory, aligned = self.memory[argument], self.memory[argument]
            if argument not in memory or self._computes_once_more(Reader(step, view), argument):
                memory, aligned = self._inner[argument]
            read |= memory
            moved |= memory - aligned if in_place else memory
        return frozenset(read), frozenset(read - moved)

    def _computes_once_more(self, reader: Reader, argument: GraphStep) -> bool:
        """Whether this is code, and `argument` a light expression that is stored for a library's op
        alone: that runs later, or reads it through another view."""
        call = self._first_call(argument)
        if call is None or self._is_call(reader.step) or not self._is_stored_late(argument):
            return False
        if call.view is not None and reader.view != call.view:
            return True
        return self._number[reader.step] < self._number[call.step]

    def _is_stored_late(self, step: GraphStep) -> bool:
        """Whether, if a library's op reads it, it is stored for that op and from then on."""
        if step in self._steps.stored or not is_fusible(step.node):
            return False
        light = sum(elements(source.node) > 1 for source in self._inner[step][0]) <= 1
        return light or self._users[step] == 1

    def _first_call(self, step: GraphStep) -> Reader | None:
        """The first library's op that reads it."""
        calls = (r for r in self._steps.readers[step] if self._is_call(r.step))
        return min(calls, key=lambda call: self._number[call.step], default=None)

    def _is_call(self, step: GraphStep) -> bool:
        """Whether a library's op computes it."""
        return not is_generated(step.node) or step in self._products

    def _added_product(self, step: GraphStep) -> GraphStep | None:
        """The matrix product to which the step adds: Inductor makes both one op."""
        if not is_sum(step.node):
            return None
        for made in self._steps.arguments[step]:
            once = (
                self._steps.readers[made] == [Reader(step, None)] and made not in self._steps.stored
            )
            if once and is_product(made.node) and made.in_backward == step.in_backward:
                return made
        return None

    def _is_inlined(self, step: GraphStep) -> bool:
        return (
            step not in self._steps.stored
            and step not in self._products
            and is_fusible(step.node)
            and all(
                reader.in_backward == step.in_backward and not self._is_call(reader)
                for reader, _ in self._steps.readers[step]
            )
        )

    def _call(self, step: GraphStep, read: frozenset[GraphStep]) -> None:
        """A library's op."""
        kernel = self._start(step, self._number[step], None, self._before(read))
        kernel.reads = {source: {step} for source in read}
        self._writer[step] = kernel
        if has_tensor(step.node):
            kernel.writes.append(step)

    def _join(
        self, step: GraphStep, read: frozenset[GraphStep], aligned: frozenset[GraphStep]
    ) -> None:
        """A tensor that generated code writes."""
        number = self._number[step]
        call = self._first_call(step)
        if call is not None and self._is_stored_late(step):
            number = self._number[call.step] - 0.5
        loop, before = _loop(step.node), self._before(read)
        kernel = self._best(step, read, loop, number)
        if kernel is None:
            kernel = self._start(step, number, loop, before)
        else:
            self._grow(kernel, before)
            kernel.first, kernel.last = min(kernel.first, number), max(kernel.last, number)
        for source in read:
            kernel.reads.setdefault(source, set()).add(step)
            self._by_read.setdefault(source, []).append(kernel)
        kernel.writes.append(step)
        self._writer[step] = kernel
        if is_fusible(step.node):
            kernel.in_place[step] = [s for s in aligned if _same(s.node, step.node)]

    def _best(
        self, step: GraphStep, read: frozenset[GraphStep], loop: tuple[int, ...], number: float
    ) -> Kernel | None:
        """The kernel of which it becomes a part: that with which most is shared."""
        shared: Counter[int] = Counter()
        for source in read:
            near = {kernel.index for kernel in self._by_read.get(source, ())}
            if source in self._writer:
                near.add(self._writer[source].index)
            shared.update(dict.fromkeys(near, elements(source.node)))
        writers = {self._writer[source].index for source in read if source in self._writer}
        for index, _ in shared.most_common():
            kernel = self.order[index]
            if kernel.loop != loop or kernel.in_backward != step.in_backward:
                continue
            far = max(abs(number - kernel.first), abs(kernel.last - number)) > _FAR
            if far and index not in writers:
                continue
            if not any(self.order[w].before >> index & 1 for w in writers - {index}):
                return kernel
        return None

    def _before(self, read: Iterable[GraphStep]) -> int:
        """The kernels that must run before one that reads these."""
        found = 0
        for source in read:
            if source in self._writer:
                kernel = self._writer[source]
                found |= kernel.before | 1 << kernel.index
        return found

    def _start(
        self, step: GraphStep, number: float, loop: tuple[int, ...] | None, before: int
    ) -> Kernel:
        kernel = Kernel(step.in_backward, loop, number, number, len(self.order), before)
        self.order.append(kernel)
        return kernel

    def _grow(self, kernel: Kernel, before: int) -> None:
        own = 1 << kernel.index
        new = before & ~kernel.before & ~own
        if new:
            for other in self.order:
                if other is kernel or other.before & own:
                    other.before |= new


def _loop(node: fx.Node) -> tuple[int, ...]:
    """The number of elements, and for reductions that are not over the last dimensions also of
    results: they run in another order."""
    op = node.args[0] if node.target is operator.getitem else node
    assert isinstance(op, fx.Node)
    if is_scatter(op):  # over what is scattered
        return (max(map(elements, op.all_input_nodes[1:]), default=1),)
    size = max(map(elements, (op, *op.all_input_nodes)))
    if is_fusible(op) or reduces_rows(op):
        return (size,)
    return (size, elements(node))


def _same(a: fx.Node, b: fx.Node) -> bool:
    """Whether one can be written over the other."""
    left, right = a.meta.get("val"), b.meta.get("val")
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    return left.dtype == right.dtype and elements(a) == elements(b)


def _sorted(kernels: list[Kernel], writer: dict[GraphStep, Kernel]) -> list[Kernel]:
    """The kernels in the order of their first ops, each after those that write what it reads."""
    done: dict[int, Kernel] = {}
    for first in sorted(kernels, key=lambda kernel: (kernel.in_backward, kernel.first)):
        stack = [(first, False)]
        while stack:
            kernel, ready = stack.pop()
            if kernel.index in done:
                continue
            if ready:
                done[kernel.index] = kernel
                continue
            stack.append((kernel, True))
            sources = {writer[s].index: writer[s] for s in kernel.reads if s in writer}
            sources.pop(kernel.index, None)
            earlier = sorted(sources.values(), key=lambda source: source.first, reverse=True)
            stack.extend((source, False) for source in earlier)
    return list(done.values())
