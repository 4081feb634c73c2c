"""Which kernels run in a forward and a backward that a cut divides, in what order, and which tensors
they read and write in memory: what Inductor's lowering, fusion and sorting do, in short.

An element-wise op that only generated code reads is computed inside of that code, and has no tensor.
One that a library reads as well is stored in front of the library's op; if it reads little itself,
code that runs before computes it once more. Generated code of the same number of elements that
reads a tensor in common, or one of the other's, is one kernel, unless another must run between.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from memopt.compile.graph import (
    JointGraph,
    ancestors,
    elements,
    has_tensor,
    is_convolution,
    is_generated,
    is_product,
    is_elementwise,
    is_fusible,
    is_reshape,
    is_sum,
    is_view,
    reduces_rows,
)
from memopt.compile.policy import Cut

# Inductor's: operations that are farther apart are not fused for a tensor that both read.
_FAR = 64


class Step(NamedTuple):
    """A run of a node: in forward, or (again) in backward."""

    node: fx.Node
    in_backward: bool


@dataclass
class Kernel:
    """A library's op, or a loop of generated code. Tensors in memory are named by their steps."""

    in_backward: bool
    number: int
    """Of its first op. Kernels run in this order as far as what they read allows."""
    last_number: int
    loop: tuple[int, ...] | None
    """What is the same in all that one loop computes; None: a library's op."""
    reads: dict[Step, set[Step]] = field(default_factory=dict)
    """By tensor, the steps of this kernel that read it."""
    writes: list[Step] = field(default_factory=list)
    in_place: dict[Step, list[Step]] = field(default_factory=dict)
    """By tensor that is written, those it could be written over: read at the same places."""


@dataclass
class Program:
    """Forward and backward."""

    kernels: list[Kernel]
    """In the order in which they run."""
    memory: dict[Step, frozenset[Step]]
    """Of each step the tensors that hold its value, or from which code computes it."""
    kept: list[Step]
    """What forward keeps for backward, and its outputs."""
    results: list[Step]
    """The gradients."""


def program(joint: JointGraph, cut: Cut) -> Program:
    """The kernels of a division of `joint`."""
    order = _steps(joint, cut)
    place = {step: index for index, step in enumerate(order)}
    made = {
        step: [_made(argument, step, cut, place) for argument in step.node.all_input_nodes]
        for step in order
    }
    kept = [s for s in _of(False, (*cut.kept, *joint.forward_outputs)) if s in place]
    results = [Step(node, node not in cut.kept) for node in joint.backward_outputs]
    results = [step for step in dict.fromkeys(results) if step in place]
    readers = _readers(order, made)
    build = _Builder(place, made, readers, _bases((*kept, *results), made))
    for step in order:
        build.add(step)
    return Program(_sorted(build.kernels, build.writer), build.memory, kept, results)


def _of(in_backward: bool, nodes: Iterable[fx.Node]) -> list[Step]:
    return list(dict.fromkeys(Step(node, in_backward) for node in nodes))


def _steps(joint: JointGraph, cut: Cut) -> list[Step]:
    """The ops of both halves: what is made again is made in front of its first reader."""
    needed = ancestors([*joint.forward_outputs, *cut.kept])
    forward = [Step(n, False) for n in joint.nodes if n in needed]
    backward: dict[Step, None] = {}
    for node in joint.nodes:
        if node in joint.backward:
            for argument in node.all_input_nodes:
                _make_again(argument, cut, backward)
            backward[Step(node, True)] = None
    for node in joint.backward_outputs:
        _make_again(node, cut, backward)
    return [*forward, *backward]


def _make_again(node: fx.Node, cut: Cut, steps: dict[Step, None]) -> None:
    """Append to `steps` what makes `node` in backward, if it is not kept."""
    stack = [(node, False)]
    while stack:
        node, ready = stack.pop()
        if node not in cut.again or Step(node, True) in steps:
            continue
        if ready:
            steps[Step(node, True)] = None
        else:
            stack.append((node, True))
            stack.extend((argument, False) for argument in node.all_input_nodes)


def _made(argument: fx.Node, reader: Step, cut: Cut, steps: Collection[Step]) -> Step:
    """The run that made what `reader` reads."""
    again = Step(argument, True)
    return again if reader.in_backward and again in steps else Step(argument, False)


class _Reader(NamedTuple):
    step: Step
    view: Step | None
    """Through which it reads: of several, the one next to what is read. A convolution's is its own,
    since it wants another layout."""


def _readers(order: list[Step], made: dict[Step, list[Step]]) -> dict[Step, list[_Reader]]:
    """What reads each step, itself or through views."""
    readers: dict[Step, list[_Reader]] = {step: [] for step in order}
    for step in reversed(order):
        through = [_Reader(reader.step, step) for reader in readers[step]]
        if not is_view(step.node):
            through = [_Reader(step, step if is_convolution(step.node) else None)]
        for argument in made[step]:
            readers[argument].extend(through)
    return readers


def _bases(steps: Iterable[Step], made: dict[Step, list[Step]]) -> set[Step]:
    """These, and what they are views of: what must be in memory."""
    found: set[Step] = set()
    for step in steps:
        found.add(step)
        while is_view(step.node):
            step = made[step][0]
            found.add(step)
    return found


class _Builder:
    """Makes kernels of steps, which are added in order."""

    def __init__(
        self,
        place: dict[Step, int],
        made: dict[Step, list[Step]],
        readers: dict[Step, list[_Reader]],
        owners: set[Step],
    ) -> None:
        self._place, self._made, self._readers, self._owners = place, made, readers, owners
        self.kernels: list[Kernel] = []
        self.memory: dict[Step, frozenset[Step]] = {}
        self.writer: dict[Step, Kernel] = {}
        # What its code reads, and what of it where it writes.
        self._inner: dict[Step, tuple[frozenset[Step], frozenset[Step]]] = {}
        # By sums of two, the matrix product that is computed in one op with the sum.
        self._products = {step: p for step in place if (p := self._added_product(step))}
        self._inside = set(self._products.values())
        self._before: dict[int, set[int]] = {}  # by kernel, all that must run before
        self._by_read: dict[Step, list[Kernel]] = {}

    def add(self, step: Step) -> None:
        node = step.node
        self.memory[step] = frozenset((step,))
        if node.op == "placeholder" or not self._made[step]:
            read, aligned = frozenset[Step](), frozenset[Step]()
        elif is_view(node):
            self.memory[step] = self.memory[self._made[step][0]]
            return
        else:
            read, aligned = self._reads(step)
        self._inner[step] = read, aligned
        if node.op == "placeholder":
            return
        if node.target is operator.getitem and not is_generated(node):
            (op,) = self._made[step]
            self.writer[op].writes.append(step)
            self.writer[step] = self.writer[op]
        elif step in self._inside or (is_generated(node) and not has_tensor(node)):
            self.memory[step] = read
        elif self._is_call(step):
            self._call(step, read)
        elif self._is_inlined(step):
            self.memory[step] = read
        else:
            self._join(step, read, aligned)

    def _reads(self, step: Step) -> tuple[frozenset[Step], frozenset[Step]]:
        """The tensors that it reads, and those of them that it reads where it writes."""
        read: set[Step] = set()
        moved: set[Step] = set()
        for argument in self._made[step]:
            in_place, view = is_elementwise(step.node), None
            while is_view(argument.node):
                in_place = in_place and is_reshape(argument.node)
                view, argument = argument, self._made[argument][0]
            memory, aligned = self.memory[argument], self.memory[argument]
            if argument not in memory or self._computes_once_more(_Reader(step, view), argument):
                memory, aligned = self._inner[argument]
            read |= memory
            moved |= memory - aligned if in_place else memory
        return frozenset(read), frozenset(read - moved)

    def _computes_once_more(self, reader: _Reader, argument: Step) -> bool:
        """Whether this is code, and `argument` a light expression that is stored for a library's op
        alone: that runs later, or reads it through another view."""
        if self._is_call(reader.step) or not self._is_stored_late(argument):
            return False
        call = self._first_call(argument)
        if call.view is not None and reader.view != call.view:
            return True
        return self._place[reader.step] < self._place[call.step]

    def _is_stored_late(self, step: Step) -> bool:
        """Whether it is in memory only because a library's op reads it, and from then on."""
        if step in self._owners or not is_fusible(step.node) or self._first_call(step) is None:
            return False
        light = sum(elements(source.node) > 1 for source in self._inner[step][0]) <= 1
        return light or len(step.node.users) == 1

    def _first_call(self, step: Step) -> _Reader | None:
        """The first library's op that reads it."""
        calls = (r for r in self._readers[step] if self._is_call(r.step))
        return min(calls, key=lambda call: self._place[call.step], default=None)

    def _is_call(self, step: Step) -> bool:
        """Whether a library's op computes it."""
        return not is_generated(step.node) or step in self._products

    def _added_product(self, step: Step) -> Step | None:
        """What Inductor makes an addmm: the matrix product to which the step adds another matrix."""
        if not is_sum(step.node):
            return None
        for made in self._made[step]:
            once = self._readers[made] == [_Reader(step, None)] and made not in self._owners
            if once and is_product(made.node) and made.in_backward == step.in_backward:
                return made
        return None

    def _is_inlined(self, step: Step) -> bool:
        return (
            step not in self._owners
            and step not in self._products
            and is_fusible(step.node)
            and all(
                reader.in_backward == step.in_backward and not self._is_call(reader)
                for reader, _ in self._readers[step]
            )
        )

    def _call(self, step: Step, read: frozenset[Step]) -> None:
        """A library's op."""
        number = self._place[step]
        kernel = Kernel(step.in_backward, number, number, None)
        kernel.reads = {source: {step} for source in read}
        self._start(kernel, read)
        self.writer[step] = kernel
        if has_tensor(step.node):
            kernel.writes.append(step)

    def _join(self, step: Step, read: frozenset[Step], aligned: frozenset[Step]) -> None:
        """A tensor that generated code writes."""
        number = self._place[step]
        if self._is_stored_late(step):
            number = self._place[self._first_call(step).step] - 1
        loop = _loop(step.node)
        before = self._all_before(read)
        kernel = self._best(step, read, loop, number)
        if kernel is None:
            kernel = Kernel(step.in_backward, number, number, loop)
            self._start(kernel, read)
        else:
            self._grow(kernel, before)
            kernel.number = min(kernel.number, number)
            kernel.last_number = max(kernel.last_number, number)
        for source in read:
            kernel.reads.setdefault(source, set()).add(step)
            self._by_read.setdefault(source, []).append(kernel)
        kernel.writes.append(step)
        self.writer[step] = kernel
        if is_fusible(step.node):
            kernel.in_place[step] = [s for s in aligned if _same(s.node, step.node)]

    def _best(
        self, step: Step, read: frozenset[Step], loop: tuple[int, ...], number: int
    ) -> Kernel | None:
        """The kernel of which it becomes a part: that with which most is shared."""
        shared: dict[int, int] = {}
        kernels: dict[int, Kernel] = {}
        for source in read:
            near = list(self._by_read.get(source, ()))
            if source in self.writer:
                near.append(self.writer[source])
            for kernel in {id(k): k for k in near}.values():
                kernels[id(kernel)] = kernel
                shared[id(kernel)] = shared.get(id(kernel), 0) + elements(source.node)
        found = None
        for key, kernel in kernels.items():
            if kernel.loop != loop or kernel.in_backward != step.in_backward:
                continue
            own = any(self.writer.get(source) is kernel for source in read)
            far = max(abs(number - kernel.number), abs(kernel.last_number - number)) > _FAR
            if far and not own:
                continue
            between = {id(self.writer[s]) for s in read if s in self.writer} - {key}
            if any(key in self._before[other] for other in between):
                continue
            if found is None or shared[key] > shared[id(found)]:
                found = kernel
        return found

    def _all_before(self, read: Iterable[Step]) -> set[int]:
        found: set[int] = set()
        for source in read:
            if source in self.writer:
                key = id(self.writer[source])
                found |= {key} | self._before[key]
        return found

    def _start(self, kernel: Kernel, read: Iterable[Step]) -> None:
        self.kernels.append(kernel)
        self._before[id(kernel)] = self._all_before(read)

    def _grow(self, kernel: Kernel, before: set[int]) -> None:
        key = id(kernel)
        new = before - self._before[key] - {key}
        if new:
            for other, earlier in self._before.items():
                if other == key or key in earlier:
                    earlier |= new


def _loop(node: fx.Node) -> tuple[int, ...]:
    """Of how many elements, and for reductions that are not over the last dimensions how many
    results: they run in another order."""
    op = node.args[0] if node.target is operator.getitem else node
    assert isinstance(op, fx.Node)
    size = max(map(elements, (op, *op.all_input_nodes)))
    if is_fusible(op) or reduces_rows(op):
        return (size,)
    return (size, elements(node))


def _same(a: fx.Node, b: fx.Node) -> bool:
    """Whether one can be written over the other."""
    left, right = a.meta["val"], b.meta["val"]
    return (
        isinstance(left, torch.Tensor)
        and left.dtype == right.dtype
        and elements(a) == elements(b)
    )


def _sorted(kernels: list[Kernel], writer: dict[Step, Kernel]) -> list[Kernel]:
    """In the order of their first ops, each after what writes what it reads."""
    done: dict[int, Kernel] = {}
    for first in sorted(kernels, key=lambda kernel: (kernel.in_backward, kernel.number)):
        stack = [(first, False)]
        while stack:
            kernel, ready = stack.pop()
            if id(kernel) in done:
                continue
            if ready:
                done[id(kernel)] = kernel
                continue
            stack.append((kernel, True))
            sources = {id(writer[s]): writer[s] for s in kernel.reads if s in writer}
            sources.pop(id(kernel), None)
            earlier = sorted(sources.values(), key=lambda source: source.number, reverse=True)
            stack.extend((source, False) for source in earlier if id(source) not in done)
    return list(done.values())
