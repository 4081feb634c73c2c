"""The tree of a step that runs under a ledger.

Hooks on every module note when its forward begins and ends. All else follows from the ledger: which
operators ran in between, what they made and kept, and which ran in backward for their nodes. A call
is what a region would run, the forward alone: hooks of others, which compute a weight before it for
one, are outside.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from memopt._compat import is_in_backward
from memopt._extension import _C
from memopt.memory.calls.tree import CallTree, HeldStorage, ModuleCall
from memopt.memory.ledger import Ledger
from memopt.memory.modules import ByModule, seen_modules
from memopt.memory.pieces import GRADIENTS, Piece
from memopt.memory.totals import Position, highs_of, margin_at, position_of, totals_of


@dataclass
class _Open:
    """A call while the step runs."""

    path: str
    parent: int
    with_gradients: bool
    inputs: list[Piece]
    begin: Position
    given: frozenset[int]
    """Identities of the argument tensors."""
    end: Position | None = None
    outputs: Sequence[Piece] = ()
    returns_view: bool = False


class CallRecorder:
    """Hooks on the modules of a model, while it is entered, for one step under a ledger."""

    def __init__(self, model: nn.Module, ledger: Ledger) -> None:
        self._paths = ByModule((module, path) for path, module in seen_modules(model).items())
        self._ledger = ledger
        self._calls: list[_Open] = []
        self._again: dict[str, None] = {}
        self._stack: list[int] = []
        self._switches: list[tuple[Position, int]] = []
        """When another call became the innermost one, and which."""

    def __enter__(self) -> CallRecorder:
        self._handles: list[Any] = []
        for module in self._paths:
            self._handles += [
                module.register_forward_pre_hook(self._entered, with_kwargs=True),
                module.register_forward_hook(self._left, prepend=True),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _open(self, path: str, tensors: Sequence[Tensor]) -> None:
        now = position_of(self._ledger)
        parent = self._stack[-1] if self._stack else -1
        given = frozenset(map(id, tensors))
        inputs = _pieces(self._ledger, tensors)
        self._stack.append(len(self._calls))
        self._switches.append((now, len(self._calls)))
        self._calls.append(_Open(path, parent, torch.is_grad_enabled(), inputs, now, given))

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_in_backward():
            if not _C.flags().recomputing:
                self._again[self._paths[module]] = None
            return
        if not self._stack:
            self._open("", ())  # the step
        self._open(self._paths[module], list(_passed((args, kwargs))))

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_in_backward():
            return
        path = self._paths[module]
        while len(self._stack) > 1:  # those above it have raised
            call = self._calls[self._stack.pop()]
            call.end = position_of(self._ledger)
            self._switches.append((call.end, self._stack[-1]))
            if call.path == path:
                tensors = list(_passed(output))
                call.outputs = _pieces(self._ledger, tensors)
                others = [t for t in tensors if t.requires_grad and id(t) not in call.given]
                known = {id(piece) for piece in call.inputs}
                call.returns_view = any(id(p) in known for p in _pieces(self._ledger, others))
                return

    def tree(self, by_processor: bool = True) -> CallTree:
        """The tree of the ledger's calls. The ledger is closed.

        Args:
            by_processor: count scratch whose size is the processor's choice.
        """
        if not self._calls:
            self._open("", ())
        builder = _Builder(self._ledger, self._calls, self._switches, by_processor)
        return builder.tree(tuple(self._again))


def _passed(value: object) -> Iterator[Tensor]:
    """The tensors that a region tracks among arguments and results: those in containers, and
    attributes of other objects. A cache of keys and values holds them deeper.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _passed(entry)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _passed(entry)
    elif not isinstance(value, (nn.Module, type)):
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        yield from (each for each in attributes.values() if isinstance(each, Tensor))


def _pieces(ledger: Ledger, tensors: Iterable[Tensor]) -> list[Piece]:
    found = {id(piece): piece for tensor in tensors for piece in ledger.pieces_of(tensor)}
    return list(found.values())


class _Builder:
    def __init__(
        self,
        ledger: Ledger,
        calls: Sequence[_Open],
        switches: Sequence[tuple[Position, int]],
        by_processor: bool,
    ) -> None:
        self._ledger, self._calls, self._by_processor = ledger, calls, by_processor
        self._innermost = [number for _, number in switches]
        self._operators = [moment.operators for moment, _ in switches]
        self._saves = [moment.saves for moment, _ in switches]
        self._nodes = [moment.nodes for moment, _ in switches]
        self._turns = [mark.instant for mark in ledger.marks]
        mark = ledger.marks[-1]
        self._turn = mark.instant
        """The last operator of forward."""
        self._turn_place = mark.place
        self._instants = [entry.instant for entry in ledger.log]
        self._totals, self._highs = totals_of(ledger), highs_of(ledger, by_processor)
        changes = (e.sign * e.piece.nbytes * (e.piece.category == GRADIENTS) for e in ledger.log)
        gradients = accumulate(changes, initial=0)
        pairs = zip(self._highs, gradients, strict=True)
        self._without_gradients = [high - there for high, there in pairs]

    def tree(self, again: tuple[str, ...]) -> CallTree:
        pieces, savers = self._held()
        numbers = {id(piece): number for number, piece in enumerate(pieces)}
        storages = []
        for piece in pieces:
            maker = self._innermost_at(self._operators, piece.born)
            mine = tuple(sorted(savers.get(id(piece), ())))
            home = maker
            for saver in mine:
                home = self._around_both(home, saver)
            storages.append(HeldStorage(piece.nbytes, maker, mine, home))
        own, kept = [0] * len(self._calls), [0] * len(self._calls)
        for storage in storages:
            if storage.savers:
                own[storage.home] += storage.nbytes
        for number in reversed(range(len(self._calls))):
            kept[number] += own[number]
            if number:
                kept[self._calls[number].parent] += kept[number]
        backward = self._backward_spans()
        calls = tuple(
            self._call(call, numbers, own[number], kept[number], backward.get(number))
            for number, call in enumerate(self._calls)
        )
        start = self._calls[0].begin.log
        highest = max(range(start, len(self._highs)), key=self._highs.__getitem__)
        peak = self._highs[highest] - self._totals[start]
        margin = margin_at(self._ledger, highest) if self._by_processor else 0
        return CallTree(calls, tuple(storages), peak, again, margin)

    def _held(self) -> tuple[list[Piece], dict[int, set[int]]]:
        """The pieces that forward made and that are kept or passed on, and who keeps which."""
        found: dict[int, Piece] = {}
        savers: defaultdict[int, set[int]] = defaultdict(set)
        for number, pieces in enumerate(self._ledger.saved_pieces):
            for piece in pieces:
                turn = self._turns[min(bisect_left(self._turns, piece.born), len(self._turns) - 1)]
                is_kept = piece.died is None or piece.died > turn
                if piece.phase == "forward" and is_kept:
                    found[id(piece)] = piece
                    savers[id(piece)].add(self._innermost_at(self._saves, number))
        for call in self._calls:
            for piece in (*call.inputs, *call.outputs):
                if piece.phase == "forward":
                    found[id(piece)] = piece
        return list(found.values()), savers

    def _innermost_at(self, positions: Sequence[int], number: int) -> int:
        """The innermost call when something had this number."""
        place = bisect_right(positions, number) - 1
        return self._innermost[place] if place >= 0 else 0

    def _around_both(self, one: int, other: int) -> int:
        """The innermost call that is or is around both."""
        while one != other:  # a call has a larger number than those around it
            if one < other:
                one, other = other, one
            one = self._calls[one].parent
        return one

    def _backward_spans(self) -> dict[int, tuple[int, int]]:
        """The first and the last operator of backward that ran for each call."""
        spans: dict[int, tuple[int, int]] = {}
        for instant, node in enumerate(self._ledger.nodes):
            number = self._innermost_at(self._nodes, node) if node >= 0 else -1
            while number >= 0:
                first, _ = spans.get(number, (instant, instant))
                spans[number] = (first, instant)
                number = self._calls[number].parent
        return spans

    def _call(
        self,
        call: _Open,
        numbers: dict[int, int],
        own: int,
        kept: int,
        backward: tuple[int, int] | None,
    ) -> ModuleCall:
        ledger = self._ledger
        begin, end = call.begin.log, self._turn_place if call.end is None else call.end.log
        held = self._totals[begin]
        most = 0
        if backward is not None:
            first = bisect_left(self._instants, backward[0])
            last = bisect_right(self._instants, backward[1])
            others = self._without_gradients[first : last + 1]
            most = max(0, max(others) - self._without_gradients[begin])
        work = ledger.work[call.begin.work : None if call.end is None else call.end.work]
        work = [one for one in work if one.phase == "forward"]
        writes = [instant for piece in call.inputs for instant in piece.writes]
        stop = self._turn + 1 if call.end is None else call.end.operators
        writes = [instant for instant in writes if instant >= call.begin.operators]
        return ModuleCall(
            path=call.path,
            parent=call.parent,
            with_gradients=call.with_gradients,
            inputs=tuple(numbers[id(p)] for p in call.inputs if id(p) in numbers),
            outputs=tuple(numbers[id(p)] for p in call.outputs if id(p) in numbers),
            input_bytes=sum(piece.nbytes for piece in call.inputs),
            output_bytes=sum(piece.nbytes for piece in call.outputs),
            own_bytes=own,
            kept_bytes=kept,
            forward=max(self._highs[begin : end + 1]) - held,
            backward=most,
            flops=sum(one.flops for one in work),
            nbytes=sum(one.nbytes for one in work),
            operators=len(work),
            returns_view=call.returns_view,
            writes_inputs=any(instant < stop for instant in writes),
            inputs_written=any(instant >= stop for instant in writes),
        )
