"""Steps without arithmetic: tensors that have memory of the right size and no values.

Memory that nobody touches costs nothing: an operating system hands out pages when they are written
first. So a hollow tensor is an ordinary CPU tensor that nothing was written to, and a HollowLedger
runs no kernel: outcome.py says what an operator returns. All else is as in a real step: views,
autograd, autocast, the choice of attention kernel, memopt's recipes and regions.

Why not meta tensors? Autocast ignores them, and attention takes another path. Why not
FakeTensorMode? A FakeTensor is a subclass of Tensor, by which memopt's ops know that a graph is
being traced (csrc/autograd/ownership.h, `is_traced`). They then keep no recipe and write over
nothing, and a region's tensors are not its own: another step would be counted.

Small tensors whose values are known (an optimizer's count of steps, a constant) are computed.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from memopt._compat import wraps_tensors
from memopt.memory.copies import copied
from memopt.memory.histories import with_gradient_as
from memopt.memory.leaves import tensors_of_objects
from memopt.memory.ledger import Ledger
from memopt.memory.pieces import STATES, WEIGHTS, Piece
from memopt.memory.places import CodePlace
from memopt.memory.predicted.outcome import DependsOnValues, Made, is_made, outcome_of
from memopt.memory.predicted.repeated import Part, part_since, repeat
from memopt.memory.storages import has_sizes, storages, storages_of, tensors_in
from memopt.memory.totals import position_of
from memopt.memory.unchanged import Before, Written
from memopt.memory.writes import written_by

T = TypeVar("T")

# What follows from known values is computed, up to so many bytes: positions, masks, an optimizer's
# count of steps. transformers asks whether positions are those of packed sequences, of all rows.
_SMALL = 1 << 20
_SMALL_INTEGERS = 1 << 26
_LARGE = 1 << 32 if sys.platform == "linux" else sys.maxsize
"""Linux refuses to allocate more at once than it has, though nothing is written to it, unless it is
asked to reserve nothing."""
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python's mmap has no name for


class HollowLedger(Ledger):
    """A ledger of a step that computes nothing.

    Args:
        target: "cpu" or "cuda", whose allocations are rounded up.
        copies: what the step runs on.
        before: is told of tensors that are not among the copies, as functions close over them:
            gradients without values come to be theirs, and small ones may be written.
        counts_on_host: the optimizer's counts of steps do not count.
        parts: notes that this ledger repeats, or adds: see `alike`.
    """

    def __init__(
        self,
        model: nn.Module,
        target: str,
        copies: Copies,
        before: Before,
        counts_on_host: bool = False,
        parts: dict[Hashable, Part] | None = None,
    ) -> None:
        super().__init__(model, target=target)
        self._parts = {} if parts is None else parts
        self._counts_on_host = counts_on_host
        self._on_cpu = target == "cpu"
        self._copies = copies
        self._before = before
        self._outside: set[Hashable] = set()
        """Storages that are neither copies nor of an operator."""
        self.written = Written()
        """Tensors from before the step that forward and backward write: the originals of copies."""
        self._known: set[Piece] = set()
        """Pieces with values."""
        self._computed = False
        """Whether the newest operator ran."""

    def run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        pieces: Sequence[list[Piece]],
    ) -> Any:
        self._watch(func, args, kwargs)
        kinds = [type(tensor) for tensor in given if wraps_tensors(tensor)]
        if kinds:  # nobody but the class knows what its operators return
            raise DependsOnValues(
                f"a prediction runs nothing on a {kinds[0].__name__}, which holds other tensors "
                f"({func}, in {self._place().line or 'PyTorch'})"
            )
        # What the ledger does not know was not made by an operator: a Python number.
        with_values = all(map(self._known.issuperset, pieces))
        self._computed = True
        name = func.overloadpacket.__name__
        if func.is_view or name in _ALWAYS or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if name in _ASK:
            if with_values:
                return func(*args, **kwargs)
            raise DependsOnValues(
                f"a prediction has no values, and the step asks for one ({func}, in "
                f"{self._place().line or 'PyTorch'})"
            )
        if "nested" in name or not all(map(has_sizes, given)):
            raise DependsOnValues(
                f"the shapes of a step depend on values, of a nested tensor ({func})"
            )
        outcome = outcome_of(func, args, kwargs, self._on_cpu)
        if with_values and torch.Tag.nondeterministic_seeded not in func.tags:
            made = (leaf for leaf in outcome.leaves if is_made(leaf))
            if all(map(_is_small, (*made, *given))):
                return func(*args, **kwargs)
        written = list(written_by(func, args, kwargs))
        if not written and outcome.is_view:
            return func(*args, **kwargs)  # though not declared as one
        self._computed = False
        for tensor in written:
            self._known.difference_update(self.pieces_of(tensor))
        return outcome.form(
            [_allocated(leaf, given) if is_made(leaf) else leaf for leaf in outcome.leaves]
        )

    def _find(self, tensor: Tensor) -> None:
        # Neither of an operator nor a copy. Those in objects are in no piece.
        if _key(tensor) not in self._copies.originals:
            self._before.see(tensor)
            self._outside.update(storages([tensor]))
        super()._find(tensor)

    def _watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in written_by(func, args, kwargs):
            is_outside = self._outside and not self._outside.isdisjoint(storages([tensor]))
            if is_outside:
                self._before.about_to_write(tensor)
            if self.phase != "optimizer":
                originals = self._copies.originals.get(_key(tensor), ())
                self.written.add((tensor,) if is_outside else originals)

    def alike(self, key: Hashable, run: Callable[[], object]) -> None:
        """Repeats the notes of what ran in an earlier step by this key, where it left nothing."""
        part = self._parts.get(key)
        if part is not None:
            repeat(part, self)
            return
        begin = position_of(self)
        run()
        part = part_since(begin, self)
        if part is not None:
            self._parts[key] = part

    def exported(self, tensor: Tensor) -> None:
        """Notes a tensor whose memory is given to what is no operator, and may be written there."""
        originals = self._copies.originals.get(_key(tensor), ())
        self.written.add(originals)
        if not originals:
            self._before.about_to_write(tensor)
            self.written.add((tensor,))

    def adopt(self, category: str, named: Iterable[tuple[str, object]]) -> None:
        named = list(named)
        if category == STATES and self._counts_on_host:
            named = [(name, [t for t in tensors_in(value) if t.dim()]) for name, value in named]
        super().adopt(category, named)
        for _, value in named:
            for tensor in tensors_in(value):
                if _key(tensor) not in self._copies.hollow:
                    self._known.update(self.pieces_of(tensor))
                if category == WEIGHTS and _key(tensor) not in self._copies.originals:
                    self._outside.update(storages([tensor]))  # trained, and a closure's

    def close(self) -> None:
        super().close()
        self._copies = Copies(frozenset(), {})  # it may be looked at for long: it holds no tensor

    def _note(self, tensor: Tensor, op: str, phase: str, place: CodePlace) -> list[Piece]:
        if self._counts_on_host and phase == "optimizer" and op == "aten.lift_fresh.default":
            return []  # a Python number that became a tensor
        return super()._note(tensor, op, phase, place)

    def _note_state(self, get: Callable[[], Tensor]) -> Tensor:
        self._computed = True
        return super()._note_state(get)

    def _know(self, piece: Piece, name: str, args: tuple[Any, ...]) -> None:
        super()._know(piece, name, args)
        if self._computed:
            self._known.add(piece)


# Of these, values or memory are the point.
_ALWAYS = frozenset(("set_", "resize_", "lift_fresh", "_unsafe_view"))
_ASK = frozenset(("_local_scalar_dense", "is_nonzero", "equal"))


def _nbytes(value: Any) -> int:
    size: int = value.dtype.itemsize
    count: int = math.prod(value.shape)
    return count * size


def _is_small(value: Any) -> bool:
    widest = _SMALL if value.dtype.is_floating_point or value.dtype.is_complex else _SMALL_INTEGERS
    return _nbytes(value) <= widest


def _allocated(made: Made, given: Sequence[Tensor]) -> Tensor:
    if made.argument is not None:
        return given[made.argument]
    if made.storage:
        whole = torch.empty(made.storage // made.dtype.itemsize, dtype=made.dtype, device="cpu")
        return whole.resize_(made.shape)
    extent = 1 + sum((n - 1) * s for n, s in zip(made.shape, made.stride, strict=True))
    if math.prod(made.shape) and extent * made.dtype.itemsize > _LARGE:
        empty = torch.empty(0, dtype=made.dtype, device="cpu")
        storage = _unreserved(extent * made.dtype.itemsize)
        return empty.set_(storage, 0, made.shape, made.stride)
    return torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="cpu")


def _unreserved(nbytes: int) -> torch.UntypedStorage:
    """Memory that may be more than the machine has: the system reserves nothing for it."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


class Copies(NamedTuple):
    """The copies that `hollow_copy` made, by the addresses of storages."""

    hollow: frozenset[int]
    """Storages without values."""
    originals: Mapping[int, Sequence[Tensor]]
    """The tensors that each copy stands for."""


def hollow_copy(
    value: T, computed: Iterable[Tensor] = (), shared: Mapping[int, Any] | None = None
) -> tuple[T, Copies]:
    """A deep copy of modules, optimizers and tensors on the CPU, without values, but for small
    tensors that are not parameters, and for tensors that are neither parameters nor buffers. Copies
    share memory where the originals do: tied weights, and the parts of a batch. Parameters keep
    their class and attributes: those of quantized weights say how they are packed.

    Args:
        computed: results of autograd somewhere inside, which PyTorch refuses to copy.
        shared: what is not copied, by its id.

    Raises:
        DependsOnValues: a tensor is nested or sparse.
    """
    memo: dict[int, Any] = dict(shared or {})
    memory: dict[Hashable, tuple[Tensor, bool]] = {}
    originals: dict[int, list[Tensor]] = {}
    attributes: list[tuple[Tensor, dict[str, Any]]] = []
    for tensor in (*_tensors_of(value), *computed):
        if id(tensor) not in memo and isinstance(tensor, nn.Parameter) and tensor.__dict__:
            attributes.append((tensor, dict(tensor.__dict__)))
        memo[id(tensor)] = _hollow(tensor, memory)
        originals.setdefault(_key(memo[id(tensor)]), []).append(tensor)
    bases = (base for base, is_hollow in memory.values() if is_hollow)
    hollow = frozenset(base.untyped_storage()._cdata for base in bases)
    (result, copied_attributes), others = copied((value, [each for _, each in attributes]), memo)
    for (tensor, _), each in zip(attributes, copied_attributes, strict=True):
        memo[id(tensor)].__dict__.update(each)
    for original, copy in others:
        if isinstance(original, Tensor):
            originals.setdefault(_key(copy), []).append(original)
    return result, Copies(hollow, originals)


def _key(tensor: Tensor) -> int:
    return next((storage._cdata for storage in storages_of(tensor)), 0)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        yield from tensors_in([dict(state) for state in value.state.values()])
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors_of(entry)
    else:
        yield from tensors_in(value)
        yield from (tensor for tensor in tensors_of_objects(value) if tensor.is_meta)


def _hollow(tensor: Tensor, memory: dict[Hashable, tuple[Tensor, bool]]) -> Tensor:
    if tensor.is_nested or tensor.layout is not torch.strided or wraps_tensors(tensor):
        kind = "a nested tensor" if tensor.is_nested else f"a {type(tensor).__name__}"
        kind = kind if tensor.is_nested or wraps_tensors(tensor) else f"{tensor.layout}"
        raise DependsOnValues(f"the shapes of a step depend on values, of {kind}")
    ((key, nbytes),) = storages([tensor]).items()
    if key not in memory:
        memory[key] = _base(tensor, nbytes)
    with torch.no_grad():
        view = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            memory[key][0].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    if isinstance(tensor, nn.Parameter):
        parameter = nn.Parameter(view, requires_grad=tensor.requires_grad)
        object.__setattr__(parameter, "__class__", type(tensor))
        return parameter
    return with_gradient_as(tensor, view)


def _base(tensor: Tensor, nbytes: int) -> tuple[Tensor, bool]:
    """Memory for a copy of a tensor's storage, and whether it has no values."""
    if nbytes > _SMALL or tensor.is_meta or isinstance(tensor, nn.Parameter):
        if nbytes > _LARGE:
            return torch.empty(0, dtype=torch.uint8, device="cpu").set_(_unreserved(nbytes)), True
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), True
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    with torch.no_grad():
        whole.set_(tensor.untyped_storage(), 0, (nbytes,), (1,))
    return whole.cpu().clone(), False
