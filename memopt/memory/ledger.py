"""The ledger of a step: every piece of memory that operators make, from its birth to its end.

    with Ledger(model) as ledger:
        ledger.adopt("weights", model.named_parameters())
        loss = forward()
        ledger.end_of_forward(loss)
        loss.backward()
    ledger.total, ledger.pieces, ledger.log

A dispatch mode sees what each operator returns; a weak reference to each storage says when it ends,
also inside C++ code. So each storage counts once, whole, whichever views of it there are, for
as long as it lives. The memory that a CPU kernel allocates and frees inside itself follows from its
arguments (scratch/); for an accelerator's kernels it is not known.

Why not torch.distributed._tools? MemTracker counts by module and category. A plan needs more: which
operator and line made a piece, which save held it first, and its fate (recipe, region, offloaded).
By its own documentation it may take activations for temporary memory while a region is recomputed.
SACEstimator weighs the operators of each module by formulas. It runs under FakeTensorMode, where
recipes and regions do not act (predicted/hollow.py).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from memopt._compat import QUESTIONS, running_node, running_node_number, sequence_number
from memopt._extension import _C
from memopt.memory.attribution import innermost
from memopt.memory.exchanged import exchanged
from memopt.memory.modules import paths_of
from memopt.memory.paths import owner_of
from memopt.memory.pieces import (
    ACTIVATIONS,
    FUNCTIONALITY,
    KEPT,
    RECIPE,
    RECOMPUTED,
    REGION_INPUT,
    TEMPORARY,
    WEIGHTS,
    Entry,
    Mark,
    Piece,
)
from memopt.memory.places import NOWHERE, CodePlace, line_of
from memopt.memory.saved import SavedTensors
from memopt.memory.scratch.rules import scratch_of
from memopt.memory.scratch.size import Scratch
from memopt.memory.storages import (
    has_sizes,
    has_storage,
    parts_of,
    sizes_of,
    storage_keys,
    tensors_in,
)
from memopt.memory.uncompiled_mode import UncompiledMode
from memopt.memory.work import Work, work_of
from memopt.memory.writes import written_by

_CUDA_GRANULARITY = 512
"""CUDA's caching allocator rounds up to a multiple of this, in bytes."""


class Ledger(UncompiledMode):
    """Records the memory of one device while it is entered.

    Args:
        model: gives the paths of modules.
        device: the type of the device that counts; None: all devices.
        target: that whose allocator is meant, which rounds sizes up on CUDA. Default: `device`.
    """

    def __init__(
        self, model: nn.Module, device: str | None = None, target: str | None = None
    ) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.log: list[Entry] = []
        self.late: list[Piece] = []
        """Pieces from before the step that were found when an operator of forward read them: in a
        closure, in a list. They count from the beginning, and are in no line of the log."""
        self.scratch: list[tuple[int, Piece]] = []
        """Memory that kernels allocated and freed inside themselves, each with the number of lines
        that the log had then. It is in no line of the log."""
        self.ops: list[str] = ["before"]
        """The name of each instant's operator."""
        self.phases: list[str] = ["before"]
        self.marks: list[Mark] = []
        self.work: list[Work] = []
        self.saved_pieces: list[Sequence[Piece]] = []
        """The pieces that each save holds."""
        self.nodes: list[int] = [-1]
        """The number of the autograd node whose backward ran at each instant; else -1."""
        self.total = 0
        self.phase = "forward"
        self.target = target or device
        self._granularity = _CUDA_GRANULARITY if self.target == "cuda" else 1
        self._device = device
        self._on_cpu = device in (None, "cpu")
        """Whether kernels are the CPU's, whose scratch counts."""
        self._live: dict[int, tuple[weakref.ref[Any], Piece]] = {}
        self._places: dict[int, CodePlace] = {}
        self._weights: set[int] = set()
        self._paths = paths_of(model)
        self._hooks = _Hooks(self)

    @property
    def instant(self) -> int:
        """The number of the newest operator."""
        return len(self.ops) - 1

    @property
    def saves(self) -> int:
        """How often something was saved for backward."""
        return len(self.saved_pieces)

    def adopt(self, category: str, named: Iterable[tuple[str, object]]) -> None:
        """Enter memory allocated before the step, in a category; a piece that has one keeps it."""
        for name, value in named:
            for tensor in tensors_in(value):
                for piece in self._note(tensor, name, "before", CodePlace(owner_of(name), "")):
                    piece.category = piece.category or category
                    if category == WEIGHTS:
                        self._weights.add(id(piece))

    def assign(self, category: str, named: Iterable[tuple[str, object]]) -> None:
        """Give pieces that operators made a category, and the parameter that they belong to."""
        for name, value in named:
            for tensor in tensors_in(value):
                for piece in self.pieces_of(tensor):
                    if not piece.category or piece.phase == "backward":
                        piece.category, piece.fate, piece.module = category, "", owner_of(name)

    def pieces_of(self, tensor: Tensor) -> list[Piece]:
        """The live pieces behind a tensor."""
        return self._alive(storage_keys(tensor))

    def _alive(self, keys: Sequence[int]) -> list[Piece]:
        return [self._live[key][1] for key in keys if key in self._live]

    def saved(self, tensor: Tensor, fate: str = KEPT) -> None:
        """The graph holds the tensor itself, or a region does."""
        pieces = self.pieces_of(tensor)
        self.saved_pieces.append(pieces)
        for piece in pieces:
            piece.category = piece.category or ACTIVATIONS
            piece.saved = self.saves if piece.saved is None else piece.saved
            if not piece.fate or piece.fate == REGION_INPUT:
                piece.fate = fate

    def end_of_forward(self, loss: Tensor) -> None:
        """Take all that forward made and is still alive, but for the loss, for activations."""
        results = {id(piece) for piece in self.pieces_of(loss)}
        for _, piece in list(self._live.values()):
            if piece.phase == "forward" and not piece.category and id(piece) not in results:
                piece.category = ACTIVATIONS
                piece.fate = REGION_INPUT
        self.marks.append(Mark("end of forward", self.instant, len(self.log)))

    def restart(self) -> None:
        """Forget what has been, but not what is allocated: the next step begins."""
        self.pieces = [piece for _, piece in self._live.values()]
        self.late, self.scratch = [], []
        for piece in self.pieces:
            piece.born, piece.phase, piece.saved, piece.writes = 0, "before", None, []
        self.log = [Entry(0, 1, piece) for piece in self.pieces]
        self.ops, self.phases, self.marks, self.work = ["before"], ["before"], [], []
        self.saved_pieces, self.nodes = [], [-1]

    def alike(self, key: Hashable, run: Callable[[], object]) -> None:
        """Call what does the same in every step of one key."""
        run()

    def close(self) -> None:
        """End the record: no piece ends from now on. Pieces without a category were temporary."""
        for piece in self.pieces:
            piece.category = piece.category or TEMPORARY
        self._live = {}

    def __enter__(self) -> Ledger:
        self._hooks.__enter__()
        self._states = exchanged(torch, "get_rng_state", self._note_state)
        self._states.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        vars(self).pop("_states").__exit__(*error)  # a generator, which nothing can copy
        self._hooks.__exit__(*error)  # raises where it can say more of the error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name in QUESTIONS:
            return func(*args, **kwargs)
        self.ops.append(name)
        self.phases.append(self.phase)
        self.nodes.append(running_node_number() if self.phase == "backward" else -1)
        given = tensors_in((args, kwargs) if kwargs else args)
        pieces = [self._read(tensor) for tensor in given]
        self._used(pieces)
        self._note_writes(func, args, kwargs)
        result = self.run(func, args, kwargs, given, pieces)
        place: CodePlace | None = None
        results = tensors_in(result)
        for tensor in results:
            if any(key not in self._live for key in storage_keys(tensor)):
                place = place or self._place()
                for piece in self._note(tensor, name, self.phase, place):
                    self._know(piece, name, args)
        if self.phase == "backward":
            self._know_recipes(kwargs, results)
        if not all(map(has_sizes, (*given, *results))):
            return result  # neither scratch nor work follows from them
        if self._on_cpu:
            self._note_scratch(func, scratch_of(func, args, given, results, kwargs), given)
        work = work_of(func, args, kwargs, result, (*given, *results))
        if work is not None:
            place = place or self._place()
            self.work.append(work._replace(module=place.module, phase=self.phase))
        return result

    def _read(self, tensor: Tensor) -> list[Piece]:
        """The pieces behind a tensor that an operator reads."""
        keys = storage_keys(tensor)
        pieces = self._alive(keys)
        if len(pieces) < len(keys):
            self._find(tensor)
            pieces = self._alive(keys)
        return pieces

    def _find(self, tensor: Tensor) -> None:
        """Enter what an operator reads and none has made. (Numbers become tensors on the way.)"""
        if self.phase == "forward" and tensor.dim():
            begin = len(self.log)
            self.adopt(
                WEIGHTS if isinstance(tensor, nn.Parameter) else FUNCTIONALITY, [("", tensor)]
            )
            self.late += [entry.piece for entry in self.log[begin:]]
            del self.log[begin:]

    def run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        pieces: Sequence[list[Piece]],
    ) -> Any:
        """Call the operator. For a ledger whose operators compute nothing.

        Args:
            given: the tensors among the arguments; `pieces`: those behind each of them.
        """
        return func(*args, **kwargs)

    def _note_state(self, get: Callable[[], Tensor]) -> Tensor:
        """Note the generator's state, of 5 KB, which no operator makes and a checkpoint holds."""
        state = get()
        if self._on_cpu:
            for piece in self._note(state, "get_rng_state", self.phase, self._place()):
                self._know(piece, "get_rng_state", ())
        return state

    def _note_scratch(self, func: Any, scratch: Scratch, given: Sequence[Tensor]) -> None:
        """Note what the kernel allocated and freed, in addition to what it returned."""
        by_processor = scratch.measured + scratch.margin
        nbytes = scratch.known + by_processor
        is_elsewhere = self._device is None and any(t.device.type != "cpu" for t in given)
        if not nbytes or is_elsewhere:
            return
        op = f"{_name(func)} (scratch)"
        piece = Piece(
            *(nbytes, (nbytes,), torch.uint8, self.instant, self.phase, op),
            *(*self._place(), TEMPORARY),
            died=self.instant,
            margin=scratch.margin,
            by_processor=by_processor,
        )
        self.scratch.append((len(self.log), piece))

    def _know(self, piece: Piece, name: str, args: tuple[Any, ...]) -> None:
        """Note what is known of a piece when an operator has made it."""
        piece.again = self._recomputes()
        if name == "aten._to_copy.default" and isinstance(args[0], Tensor):
            sources = self.pieces_of(args[0])
            if sources and all(id(source) in self._weights for source in sources):
                piece.category = FUNCTIONALITY  # a weight in autocast's type

    def _know_recipes(self, kwargs: dict[str, Any], results: Sequence[Tensor]) -> None:
        """Note outputs that are recomputed from recipes: by a call for that alone, as the engine
        tells, or by an op's backward that was asked for it and returns them last.
        """
        if self._recomputes():
            return
        if not _C.makes_output_again():
            results = results[-1:] if kwargs.get("recompute_output") else ()
        for tensor in results:
            for piece in self.pieces_of(tensor):
                if not piece.category:
                    piece.category, piece.fate = ACTIVATIONS, RECIPE

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.phase == "forward":
            for tensor in written_by(func, args, kwargs):
                for piece in self.pieces_of(tensor):
                    piece.writes.append(self.instant)

    def _used(self, pieces: Sequence[list[Piece]]) -> None:
        for behind in pieces:
            for piece in behind:
                if self.phase == "forward":
                    piece.last_in_forward = self.instant
                elif self.phase == "backward" and piece.first_in_backward is None:
                    piece.first_in_backward = self.instant

    def _recomputes(self) -> bool:
        """Whether a region is recomputed: backward itself has gradients disabled."""
        return self.phase == "backward" and torch.is_grad_enabled()

    def _note(self, tensor: Tensor, op: str, phase: str, place: CodePlace) -> list[Piece]:
        """Enter the new storages behind a tensor; return these, or all of one from before."""
        found = []
        for part in parts_of(tensor):
            if not has_storage(part) or (self._device and part.device.type != self._device):
                continue
            storage = part.untyped_storage()
            key = storage._cdata
            known = self._live.get(key)
            if known is not None:
                if phase == "before":
                    found.append(known[1])
                continue
            nbytes = -(-storage.nbytes() // self._granularity) * self._granularity
            piece = Piece(nbytes, sizes_of(part), part.dtype, self.instant, phase, op, *place)
            self._live[key] = (weakref.ref(storage, partial(self._end, key)), piece)
            self.pieces.append(piece)
            self.log.append(Entry(self.instant, 1, piece))
            self.total += nbytes
            found.append(piece)
        return found

    def _end(self, key: int, _: object) -> None:
        if key not in self._live:
            return
        piece = self._live.pop(key)[1]
        if piece in self.late:
            return
        piece.died = self.instant
        self.log.append(Entry(self.instant, -1, piece))
        self.total -= piece.nbytes
        if piece.again and not piece.category and not self._recomputes():
            piece.category, piece.fate = ACTIVATIONS, RECOMPUTED

    def _place(self) -> CodePlace:
        number = sequence_number()
        if self.phase == "backward" and not torch.is_grad_enabled():
            node = running_node()
            if node is None:
                return NOWHERE
            parameter = getattr(node, "variable", None)
            if parameter is not None:
                pieces = self.pieces_of(parameter)
                return CodePlace(pieces[0].module, "") if pieces else NOWHERE
            return self._places.get(node._sequence_nr(), NOWHERE)
        frame = sys._getframe(2)
        module = "" if self.phase == "optimizer" else innermost(frame, self._paths)[0]
        place = CodePlace(module, line_of(frame))
        self._places.setdefault(number - 1, place)  # later operators may have no node of their own
        return place


class _Hooks(SavedTensors):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__(dropped=False)
        self._ledger = weakref.ref(ledger)

    def _pack(self, tensor: Tensor) -> Any:
        ledger = self._ledger()
        if ledger is not None:
            ledger.saved(tensor, REGION_INPUT if _C.keeps_arguments() else KEPT)
        return super()._pack(tensor)


@lru_cache(maxsize=4096)
def _name(func: Any) -> str:
    return str(func)
