"""When a step enters and leaves each block, in forward and in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from memopt._checkpoint.flags import is_recomputing
from memopt._compat import is_in_backward
from memopt.memory.backwards import around_backward
from memopt.memory.modules import ByModule, seen_modules
from memopt.memory.storages import Deferred, sizes_of, tensors_in
from memopt.memory.totals import Position

StampT = TypeVar("StampT")
N = TypeVar("N", bound=float)


@dataclass
class BlockCall(Generic[StampT]):
    """One forward of a block, and its backward."""

    path: str
    kind: Hashable
    """Equal for calls of one class, with parameters and inputs of the same shapes."""
    begin: StampT
    end: StampT | None = None
    backward: StampT | None = None
    """When the first gradient of its outputs was there; None: it has no backward."""
    inputs_done: StampT | None = None
    """When the gradients of its inputs were; None: they need none."""
    follows: bool = False
    """Whether it gets a tensor that the call before it returned."""


@dataclass
class Watch(Generic[StampT]):
    """Hooks on a model. Its first forward begins a list of calls, and so does each one behind a
    backward.

    A call with gradients disabled keeps nothing for backward whatever is chosen for its block. It
    is no call here, but a part of what runs between calls.

    Args:
        stamp: what is noted of a moment: a time, a place in a log.
    """

    model: nn.Module
    paths: Sequence[str]
    stamp: Callable[[], StampT]
    calls: list[BlockCall[StampT]] = field(default_factory=list)
    start: StampT | None = None
    turns: list[tuple[StampT, StampT]] = field(default_factory=list)
    """When each backward of a step's own function begins and ends: see `of_function`."""
    again: ByModule[None] = field(default_factory=ByModule)
    """Modules that backward called, but for regions of memopt's: the model's own checkpointing."""

    @contextmanager
    def of_function(self) -> Iterator[None]:
        """Watch the call of a step's own function, which may alternate between forward and
        backward: all its calls count.
        """
        self.calls, self.start, self.turns, self._is_function = [], self.stamp(), [], True
        begins: list[StampT] = []
        self._backward = False

        def turn(_: Tensor) -> None:
            self._backward = True
            begins.append(self.stamp())

        def end() -> None:
            self._backward = False
            self.turns.append((begins[-1], self.stamp()))

        with around_backward(turn, end):
            yield

    def __enter__(self) -> Watch[StampT]:
        modules = seen_modules(self.model)
        self._turned = self._is_function = False
        self._backward = True
        self._returned: list[weakref.ref[Tensor]] = []
        self._handles = [
            self.model.register_forward_pre_hook(self._started),
            self.model.register_forward_hook(self._ended),
        ]
        self._handles += [
            module.register_forward_pre_hook(self._seen) for module in modules.values()
        ]
        for path in self.paths:
            block = modules[path]
            self._handles += [
                block.register_forward_pre_hook(self._entering(path), with_kwargs=True),
                block.register_forward_hook(self._left),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _started(self, module: nn.Module, args: Any) -> None:
        if is_in_backward() or self._is_function:
            return
        if self.start is None or self._turned:
            self.calls, self.start, self._turned = [], self.stamp(), False

    def _ended(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            # A hook on what nobody has computed would have it computed.
            is_there = not isinstance(tensor, Deferred) or tensor.made() is not None
            if is_there and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._turns)

    def _turns(self, _: Tensor) -> None:
        self._turned = True

    def _seen(self, module: nn.Module, args: Any) -> None:
        if is_in_backward() and not is_recomputing():
            self.again[module] = None

    def _entering(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
            if is_in_backward() or not torch.is_grad_enabled():
                return
            inputs = tensors_in((args, kwargs))
            returned = [tensor for ref in self._returned if (tensor := ref()) is not None]
            follows = any(one is other for one in inputs for other in returned)
            call = BlockCall(path, _kind(module, inputs), self.stamp(), follows=follows)
            self._returned = []
            self.calls.append(call)

            def inputs_done(_: Tensor) -> None:
                if self._backward:
                    call.inputs_done = self.stamp()

            for tensor in inputs:
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(inputs_done)

        return entered

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_in_backward() or not torch.is_grad_enabled():
            return
        call = next((call for call in reversed(self.calls) if call.end is None), None)
        if call is None:
            return
        call.end = self.stamp()
        self._returned = [weakref.ref(tensor) for tensor in tensors_in(output)]

        def begins(gradient: Tensor) -> None:
            self._turns(gradient)
            if call.backward is None and self._backward:
                call.backward = self.stamp()

        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(begins)


def kinds_of(calls: Sequence[BlockCall[Position]]) -> tuple[int, ...]:
    """Equal numbers for calls that do the same."""
    return _numbered([(call.kind,) for call in calls])


def follows_of(calls: Sequence[BlockCall[Position]]) -> tuple[bool, ...]:
    """Whether each call gets what the one before it returned, and no operator runs between."""
    alone = [False] * min(1, len(calls))
    return (
        *alone,
        *(
            other.follows and one.end is not None and one.end.operators == other.begin.operators
            for one, other in pairwise(calls)
        ),
    )


def sites_of(calls: Sequence[BlockCall[Position]], ops: Sequence[str]) -> tuple[int, ...]:
    """Equal numbers for calls that do the same between the same operators.

    What runs between two calls is a part of the first one's forward, and of the second one's
    backward. What is before the first call and behind the last one is a stage of its own, and makes
    no difference to these.
    """
    between = [
        None if one.end is None else tuple(ops[one.end.operators : other.begin.operators])
        for one, other in pairwise(calls)
    ]
    kinds = (call.kind for call in calls)
    return _numbered(list(zip(kinds, [None, *between], [*between, None], strict=True)))


def _numbered(looks: Sequence[tuple[Any, ...]]) -> tuple[int, ...]:
    """Equal numbers for what looks alike. None is like anything, so looks with one come last."""
    found: list[tuple[Any, ...]] = []
    numbers = {}
    for place in sorted(range(len(looks)), key=lambda place: None in looks[place]):
        alike = (n for n, other in enumerate(found) if _are_alike(looks[place], other))
        number = next(alike, len(found))
        if number == len(found):
            found.append(looks[place])
        numbers[place] = number
    return tuple(numbers[place] for place in range(len(looks)))


def _are_alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(a == b or None in (a, b) for a, b in zip(one, other, strict=True))


def spans_of(
    calls: Sequence[BlockCall[StampT]],
    start: StampT,
    turns: Sequence[tuple[StampT, StampT]],
    convert: Callable[[StampT], N],
    turn: N,
    end: N,
) -> list[tuple[tuple[N, N], tuple[N, N] | None]]:
    """When the forward and the backward of each stage begin and end, as other stamps.

    Args:
        start: when the first forward began.
        turns: when each backward of a step's own function begins and ends.
        turn, end: likewise where there is one backward, and no function.
    """

    def maybe(stamp: StampT | None) -> Any:
        return None if stamp is None else convert(stamp)

    converted: list[BlockCall[N]] = [
        BlockCall(
            *(call.path, call.kind, convert(call.begin)),
            *map(maybe, (call.end, call.backward, call.inputs_done)),
        )
        for call in calls
    ]
    passes = [(convert(one), convert(other)) for one, other in turns] or [(turn, end)]
    there = _forward_spans(converted, convert(start), passes)
    return list(zip(there, _backward_spans(converted, passes), strict=True))


def _forward_spans(
    calls: Sequence[BlockCall[N]], start: N, turns: Sequence[tuple[N, N]]
) -> list[tuple[N, N]]:
    """Spans of what is before the blocks, of each call until the next one or the next backward, of
    what is behind the last one until the last backward.
    """
    begins, last = [call.begin for call in calls], calls[-1].end
    turn = turns[-1][0]
    behind = turn if last is None else last
    ends = [*begins[1:], behind]
    spans = [
        (begin, min([end, *(t for t, _ in turns if t > begin)]))
        for begin, end in zip(begins, ends, strict=True)
    ]
    return [(start, begins[0]), *spans, (min(behind, turn), turn)]


def _backward_spans(
    calls: Sequence[BlockCall[N]], turns: Sequence[tuple[N, N]]
) -> list[tuple[N, N] | None]:
    """Return backward's spans, None where a stage has none. One ends where the next begins."""
    with_backward = [call for call in calls if call.backward is not None]
    before = with_backward[0].inputs_done if with_backward else None
    turn, end = turns[-1]
    begins: list[N | None] = [before, *(call.backward for call in calls), turn]
    bounds = {moment for pair in turns for moment in pair}
    moments = sorted({begin for begin in begins if begin is not None} | bounds)
    return [
        None if begin is None else (begin, next((m for m in moments if m > begin), end))
        for begin in begins
    ]


def _kind(module: nn.Module, inputs: Sequence[Tensor]) -> Hashable:
    parameters = [
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
    ]
    shapes = [(sizes_of(t), t.dtype, t.requires_grad) for t in inputs]
    # The class that it had before memopt patched it bears the same name.
    cls = type(module)
    return (cls.__module__, cls.__qualname__, module.training, tuple(parameters), tuple(shapes))
