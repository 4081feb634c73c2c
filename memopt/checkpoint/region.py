"""A checkpointed region: a call whose saved tensors are dropped and made again in backward.

While the region's forward runs, each tensor that autograd saves is exchanged for an empty slot. The
first slot that backward opens runs the function again on the arguments that the region kept; the
tensors that this second forward saves, in the same order, fill all slots that are still wanted, and
it stops as soon as the last one is filled. Nothing is differentiated twice and backward is not
re-entered, so `torch.autograd.grad`, double backward, nesting and hooks work as without a region.

References point one way, from the autograd graph to slots to their region, which knows its slots
weakly. So the graph dies by reference counting, and with it everything here.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from memopt.checkpoint.ambient import AmbientState
from memopt.checkpoint.arguments import Arguments
from memopt.checkpoint.batch_norm import modules_reached, running_statistics_held
from memopt.checkpoint.flags import flags_set, is_disabled, is_recomputing

# What torch._C._current_graph_task_id() returns outside backward.
_NO_BACKWARD = -1


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn(*args, **kwargs)` and drop what it saves for backward, which calls it again.

    Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
    Memory falls to the tensors among the arguments; the cost is one more forward of `fn`. Losses
    and gradients are those of the plain call.

    Arguments and results may be of any kind. Tensors in lists, dicts, tuples and whatever else is
    registered with `torch.utils._pytree` are tracked; tensors inside other objects are kept with
    the object. Results are the very objects that `fn` returned. Random numbers (of the CPU, of the
    devices of the arguments and of the current accelerator), autocast and the default device are in
    the recompute what they were in forward; statistics of batch norm layers move in forward only.

    With gradients disabled, inside `disable_checkpointing`, and while `torch.jit.trace` looks on,
    this is the plain call. Under `torch.compile` it is
    `torch.utils.checkpoint.checkpoint(use_reentrant=False)`.

    `fn` must do the same in both calls as far as autograd can see, and must not write to its
    arguments in place. A tensor that `fn` closes over must not be written between forward and
    backward either; that is not checked.

    Raises:
        TypeError: `fn` is not callable.
        RuntimeError: in backward, if an argument was written in place or the recompute saved other
            tensors (in number, shape, dtype or device) than forward.
    """
    if not callable(fn):
        raise TypeError(f"checkpoint: fn must be callable, got {type(fn).__name__}")
    return run_region(fn, args, kwargs)


def run_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    owner: nn.Module | None = None,
    offload_to_cpu: bool = False,
    on_pass: Callable[[int], None] | None = None,
) -> Any:
    """`checkpoint` with the options of a wrapped module.

    `owner` is the module whose forward `fn` is. `on_pass` is called with 1 before a forward that is
    no part of a recompute, with -1 if that forward raises, and with -1 before each recompute.
    """
    if torch.compiler.is_compiling():
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)
    if is_disabled() or not torch.is_grad_enabled() or torch._C._get_tracing_state():
        return fn(*args, **kwargs)
    region = Region(fn, args, kwargs, owner, offload_to_cpu, on_pass)
    return region.forward(args, kwargs)


class _Slot:
    """What the autograd graph holds in place of a tensor that the region saved."""

    __slots__ = ("__weakref__", "index", "rebuilt")

    def __init__(self, index: int) -> None:
        self.index = index
        # The tensor and its version, per running backward; taken out when backward uses it.
        self.rebuilt: dict[int, tuple[Tensor, int]] = {}


class _Metadata(NamedTuple):
    """What must be the same of a saved tensor in forward and recompute."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Metadata:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


class Region:
    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        owner: nn.Module | None,
        offload_to_cpu: bool,
        on_pass: Callable[[int], None] | None,
    ) -> None:
        self._fn = fn
        self._owner = owner
        self._on_pass = on_pass
        self._arguments = Arguments(args, kwargs, offload_to_cpu)
        self._ambient = AmbientState.capture(self._arguments.devices)
        self._slots: list[weakref.ref[_Slot]] = []
        self._metadata: list[_Metadata] = []
        # Backward may reach one region from several threads: one recomputes, the others wait.
        self._lock = threading.RLock()
        self._recomputed_in: set[int] = set()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call, with the caller's own arguments."""
        first = not is_recomputing()
        if first and self._on_pass:
            self._on_pass(1)
        try:
            with (
                flags_set(checkpointing=first, recomputing=not first, disabled=False),
                saved_tensors_hooks(_uncompiled(self._pack), _uncompiled(self._unpack)),
            ):
                result = self._fn(*args, **kwargs)
        except BaseException:
            if first and self._on_pass:
                self._on_pass(-1)
            raise
        self._ambient.keep_generators_that_moved()
        return result

    def _pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot(len(self._slots))
        self._slots.append(weakref.ref(slot))
        self._metadata.append(_Metadata.of(tensor))
        return slot

    def _unpack(self, slot: _Slot) -> Tensor:
        task = torch._C._current_graph_task_id()
        with self._lock:
            if task not in slot.rebuilt:
                self._recompute(task, self._wanted(task, slot))
            tensor, version = slot.rebuilt.pop(task)
        if tensor._version != version:
            raise RuntimeError(
                f"checkpoint: tensor {slot.index} saved in region {self.name} must not be written "
                f"in place after it is saved, got {_Metadata.of(tensor)} at version "
                f"{tensor._version}; it was saved at version {version}"
            )
        return tensor

    def _wanted(self, task: int, slot: _Slot) -> dict[int, _Slot]:
        """The slots, by index, to fill in the recompute that `slot` asks for."""
        if task == _NO_BACKWARD or task in self._recomputed_in:
            # Someone looks at a node's saved tensors, or a node reads its own a second time.
            return {slot.index: slot}
        self._recomputed_in.add(task)
        # Backward may end without opening every slot (`inputs=`), and the graph may live on.
        Variable._execution_engine.queue_callback(
            functools.partial(_forget, weakref.ref(self), task)
        )
        return {live.index: live for live in self._live_slots()}

    def _live_slots(self) -> Iterator[_Slot]:
        return (slot for ref in self._slots if (slot := ref()) is not None)

    def _forget(self, task: int) -> None:
        self._recomputed_in.discard(task)
        for slot in self._live_slots():
            slot.rebuilt.pop(task, None)

    def _recompute(self, task: int, wanted: dict[int, _Slot]) -> None:
        """Call the function again and fill the slots in `wanted` with what it saves."""
        self._arguments.check_unwritten(self.name)
        args, kwargs = self._arguments.restore()
        if self._on_pass:
            self._on_pass(-1)
        modules = modules_reached(self._fn, args, kwargs) if self._owner is None else [self._owner]
        recompute = _Recompute(self, task, wanted)
        try:
            with (
                self._ambient.replay(),
                flags_set(checkpointing=False, recomputing=True, disabled=False),
                running_statistics_held(modules),
                torch.enable_grad(),
                saved_tensors_hooks(_uncompiled(recompute.pack), _identity),
            ):
                self._fn(*args, **kwargs)
        except _AllFilled as stop:
            if stop.recompute is not recompute:
                raise
        except BaseException:
            self._forget(task)
            raise
        if wanted:
            self._forget(task)
            raise RuntimeError(
                f"checkpoint: recompute of region {self.name} must save the {len(self._slots)} "
                f"tensors that its forward saved, got {recompute.saved}"
            )

    @property
    def name(self) -> str:
        """The class of the module or the function, for error messages."""
        named: Any = self._fn if self._owner is None else self._owner
        while isinstance(named, functools.partial):
            named = named.func
        if isinstance(named, nn.Module) or not hasattr(named, "__qualname__"):
            named = type(named)
        return f"{named.__module__}.{named.__qualname__}"


_disabled = functools.cache(torch.compiler.disable)


def _uncompiled(method: Any) -> Any:
    """`method`, hidden from torch.compile.

    Compiled functions that run inside a region call the hooks while frames are being captured.
    """
    if "torch._dynamo" not in sys.modules:  # to import it would take seconds
        return method
    return functools.partial(_disabled(method.__func__), method.__self__)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _forget(region: weakref.ref[Region], task: int) -> None:
    if (live := region()) is not None:
        live._forget(task)


class _AllFilled(BaseException):
    """Ends a recompute. No Exception, so that `except Exception` in the function lets it pass."""

    def __init__(self, recompute: _Recompute) -> None:
        self.recompute = recompute


class _Recompute:
    """Counts what one recompute saves and puts it in the slots that are wanted."""

    def __init__(self, region: Region, task: int, wanted: dict[int, _Slot]) -> None:
        self._region = region
        self._task = task
        self._wanted = wanted
        self.saved = 0

    def pack(self, tensor: Tensor) -> Tensor:
        if not self._wanted:  # the function caught the exception and went on
            raise _AllFilled(self)
        index = self.saved
        self.saved += 1
        expected, got = self._region._metadata[index], _Metadata.of(tensor)
        if got != expected:
            raise RuntimeError(
                f"checkpoint: recompute of region {self._region.name} must save as tensor {index} "
                f"what its forward saved, {expected}, got {got}"
            )
        # Detached, since the graph of the recompute is of no use and must not hold itself.
        tensor = tensor.detach()
        if slot := self._wanted.pop(index, None):
            slot.rebuilt[self._task] = tensor, tensor._version
            if not self._wanted:
                raise _AllFilled(self)
        return tensor
