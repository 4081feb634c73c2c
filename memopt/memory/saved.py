"""Counts what autograd saves for backward.

    memopt.saved_bytes(model, input)               one forward, as an int with a list of storages
    with SavedTensors() as saved: model(input)     every tensor that is saved in the scope

Memory is counted by storage: a tensor that is saved twice, or two views of one, cost their memory
once, and a view keeps all of the memory that it looks into.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt._compat import view_base
from memopt._extension import _C
from memopt.memory.storages import sizes_of, storages, tensors_in
from memopt.memory.unchanged import Written, unchanged

__all__ = [
    "Recorded",
    "SavedBytes",
    "SavedStorage",
    "SavedTensors",
    "check_can_measure",
    "recorded",
    "saved_bytes",
]

SavedT = TypeVar("SavedT", bound="SavedTensors")


@dataclass(frozen=True)
class SavedStorage:
    """A piece of memory that is held for backward."""

    nbytes: int
    device: torch.device
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Shape and dtype of the first saved tensor that looks into it."""

    is_input: bool
    """Whether it belongs to a tensor among the arguments of the call, which the caller may hold
    anyway.
    """


class SavedBytes(int):
    """A number of bytes, and the storages that add up to it."""

    storages: tuple[SavedStorage, ...]
    """The storages in the order in which they were saved first."""

    def __new__(cls, storages: Iterable[SavedStorage]) -> SavedBytes:
        storages = tuple(storages)
        self = super().__new__(cls, sum(storage.nbytes for storage in storages))
        self.storages = storages
        return self

    def __getnewargs__(self) -> tuple[tuple[SavedStorage, ...]]:  # type: ignore[override]
        return (self.storages,)


def saved_bytes(fn: Callable[..., object], /, *args: Any, **kwargs: Any) -> SavedBytes:
    """Count the bytes that are kept for backward when `fn(*args, **kwargs)` has returned.

        before = memopt.saved_bytes(model, input)
        memopt.convert(model)
        after = memopt.saved_bytes(model, input)
        loss = memopt.saved_bytes(lambda: criterion(model(input), target))

    Each storage that the autograd graph holds then counts, whole and once, inputs of the call among
    them (`storages` says which are). Under `memopt.recipes()` inside `fn`, as in a converted model,
    an output that is recomputed does not count, and what its recipe reads does. The arguments of a
    checkpointed region count; those that it offloads to the host do not.

    These do not count: parameters, buffers and what else modules hold already (tables in
    attributes, also in lists and dicts there), which are allocated anyway; tensors whose part of
    the graph was dropped before the end; numbers that products are formed with (8 bytes each, which
    PyTorch shows no hook); what saved-tensor hooks inside `fn` keep in place of tensors
    (`torch.autograd.graph.save_on_cpu`, for one); tensors that a Python `autograd.Function` sets as
    attributes of its context; and what threads save that `fn` starts. Hooks around this call
    (a `memopt.recipes()` there too) do not apply.

    `fn` runs twice, with gradients enabled, in its own training or evaluation mode: first to see
    what it writes, then to count. After each run all that it and its arguments hold is as it was,
    also if it raises: tensors of any kind with their gradients and version counters, attributes,
    containers, hooks, classes, variables that functions close over, random number generators of
    PyTorch, Python and NumPy. What it writes elsewhere stays: files, iterators that hand out their
    next element, globals of other files. Caches of functools that it filled are emptied.

    Args:
        fn: a module, or any function. A function's modules are those that it closes over, names as
            globals, or gets as arguments.
        args, kwargs: its arguments.

    Returns:
        An int: bytes, with the storages as its attribute `storages`.

    Raises:
        TypeError: `fn` is not callable.
        RuntimeError: torch.inference_mode() is on, in which nothing is saved, or `fn` calls a
            transform of torch.func around which PyTorch allows no saved tensor hooks.
    """
    check_can_measure("saved_bytes", fn)
    with recorded(fn, args, kwargs, SavedTensors) as run:
        return run.bytes()


@dataclass(frozen=True)
class Recorded(Generic[SavedT]):
    """A call that ran, while the graph that it made lives."""

    output: object
    saved: SavedT
    inputs: Sequence[Tensor]

    def bytes(self) -> SavedBytes:
        of_inputs = storages(self.inputs)
        return SavedBytes(
            SavedStorage(nbytes, tensor.device, sizes_of(tensor), tensor.dtype, key in of_inputs)
            for key, (nbytes, tensor) in self.saved.by_storage().items()
        )


@contextmanager
def recorded(
    fn: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    record: Callable[..., SavedT],
) -> Iterator[Recorded[SavedT]]:
    """Runs `fn` as saved_bytes does, under what `record` makes of the arguments of SavedTensors."""
    modules = _C.modules_reached(fn, args, kwargs)
    inputs = tensors_in((args, kwargs))
    constant = [t for m in modules for t in (*m.parameters(), *m.buffers(), *held_by(m))]
    saved = record(exclude=constant, parameters=False, dropped=False)
    with unchanged(fn, args, kwargs, written=Written()) as before:
        saved.leave_out(before.histories.of_parameters)
        with torch.enable_grad():
            before.rehearse_or_without_cut(lambda: fn(*args, **kwargs))
        with torch.enable_grad(), saved:
            output = fn(*args, **kwargs)
        yield Recorded(output, saved, inputs)


def held_by(module: nn.Module) -> Iterator[Tensor]:
    """The tensors in a module's own attributes, in containers there too, which are neither
    parameters nor buffers: tables, for the most part.
    """
    return _held_in(v for k, v in vars(module).items() if k not in _REGISTRIES)


def let_go_of_graphs(model: nn.Module, others: Iterable[nn.Module]) -> None:
    """Take away what the forward of a copy, which is not needed any more, has left in attributes
    and buffers and has a history. A region in that history holds its module, in C++, where the
    garbage collector does not look: the copy would never end.

    Args:
        others: modules that stay as they are, though the copy may hold them.
    """
    alone = {id(module) for module in others}
    for module in model.modules():
        if id(module) in alone:
            continue
        buffers = module._buffers if isinstance(module._buffers, dict) else {}  # not TorchScript's
        for names in (vars(module), buffers):
            for name in [k for k in names if k not in _REGISTRIES]:
                if any(tensor.grad_fn is not None for tensor in _held_in([names[name]])):
                    del names[name]


def _held_in(values: Iterable[object]) -> Iterator[Tensor]:
    seen: set[int] = set()
    todo: list[Any] = list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, _CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            # By its iterator: a tuple of some class (e3nn's Irreps) refuses to say its length.
            todo += value.values() if isinstance(value, Mapping) else iter(value)


_CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)
_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))


def saved_unseen() -> saved_tensors_hooks:
    """A context in which hooks around it see nothing of what is saved, which stays as it is."""
    return saved_tensors_hooks(_itself, _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def check_can_measure(who: str, fn: object) -> None:
    """Raises, in the name of the function `who`, where `saved_bytes(fn)` could count nothing."""
    if not callable(fn):
        raise TypeError(f"{who}: fn must be a module or a function, got {type(fn).__name__}")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{who}: bytes kept for backward must be counted outside torch.inference_mode(), in "
            "which autograd saves nothing, got inference mode on"
        )


class HooksRefused(RuntimeError):
    """A RuntimeError: what ran allows no saved tensor hooks, by which memopt counts."""


class SavedTensors:
    """Records the tensors that are saved for backward while it is entered.

    Args:
        exclude: tensors whose storages do not count.
        parameters: count nn.Parameters and views of them, unless they are excluded.
        dropped: record a tensor also if the graph that saved it is gone. These are kept alive.
    """

    def __init__(
        self, exclude: Iterable[Tensor] = (), *, parameters: bool = True, dropped: bool = True
    ) -> None:
        self._excluded = set(storages(exclude))
        self._parameters = parameters
        self._dropped = dropped
        self._packed: list[Callable[[], _Packed | None]] = []
        self._hooks = saved_tensors_hooks(self._pack, _Packed.unpack)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Storages of these do not count."""
        self._excluded.update(storages(tensors))

    def _pack(self, tensor: Tensor) -> _Packed:
        packed = _Packed(tensor)
        if not self._parameters and _is_parameter(tensor):
            self._excluded.update(storages([tensor]))
        if not self._excluded.issuperset(storages([tensor])):
            self._packed.append(_strong(packed) if self._dropped else weakref.ref(packed))
        return packed

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, each as often as it was saved; aliases of those without a history."""
        return [packed.tensor for ref in self._packed if (packed := ref()) is not None]

    def by_storage(self) -> dict[Hashable, tuple[int, Tensor]]:
        """The bytes of each distinct storage, and the first tensor that looks into it."""
        found: dict[Hashable, tuple[int, Tensor]] = {}
        for tensor in self.tensors:
            for key, nbytes in storages([tensor]).items():
                if key not in self._excluded:
                    found.setdefault(key, (nbytes, tensor))
        return found

    @property
    def storage_bytes(self) -> list[int]:
        """Bytes of each distinct storage."""
        return [nbytes for nbytes, _ in self.by_storage().values()]

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.storage_bytes)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        if error is not None and _C.refuses_hooks(error):
            raise HooksRefused(
                "memopt counts what autograd saves for backward by saved tensor hooks, so the code "
                "that runs must not call torch.func.grad, vjp, jacrev or hessian, around which "
                "PyTorch allows none; memopt.check(model, batch) counts such a step by the "
                "allocator, memopt.convert(model, recipes=False) puts no hooks around it, and "
                "memopt.checkpoint_wrapper(module) is for modules that do not call them"
            ) from error


class _Packed:
    """Stands in the graph for a tensor, and lives as long as the graph needs the tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # With its history, the tensor would keep the graph alive that holds it.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()

    def unpack(self) -> Tensor:
        return self.tensor


def _strong(packed: _Packed) -> Callable[[], _Packed]:
    return lambda: packed


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(view_base(tensor), nn.Parameter)
