"""The settings of a region, and the functions of this package that the engine calls for it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from memopt._checkpoint.decisions import advice
from memopt._checkpoint.naming import region_name
from memopt._checkpoint.partition import Partition
from memopt._checkpoint.uncompiled import call_uncompiled
from memopt._extension import _C, HAS_NATIVE
from memopt.fates import Fate
from memopt.memory.modules import ByModule
from memopt.place import Place, directory_of


def region_settings(
    *,
    preserve_rng_state: bool = True,
    check_metadata: bool = True,
    early_stop: bool = True,
    arguments: Literal["keep", "cpu"] | Fate | _C.Offload | _C.Buffers = "keep",
    partition: Partition | None = None,
    check_partition: bool = False,
    on_pass: Callable[[nn.Module | None, int], None] | None = None,
    on_saved: Callable[[Tensor], None] | None = None,
    again: Callable[..., Any] | None = None,
    diagnose: Callable[[], str] | None = None,
) -> _C.RegionSettings:
    """The engine's settings, to be made once for many calls.

    Args:
        preserve_rng_state: draw the same random numbers in the recompute.
        check_metadata: shape, dtype and device of what both runs save must agree.
        early_stop: end the recompute as soon as the last tensor that backward wants is there.
        arguments: the fate of the tensors among the arguments, except parameters and subclasses of
            Tensor. "keep": they are saved for backward as usual.
        partition: the ranks that keep a part each of these tensors; `arguments` is the fate of the
            parts.
        check_partition: compare the ranks' tensors in every call.
        on_pass: called with (owner, +1) before a first forward, (owner, -1) before a recompute.
        on_saved: called with each tensor that the first forward saves, before it is dropped.
        again: what the recompute calls in place of the function.
        diagnose: its text ends the error of a recompute that differs, in place of `advice`.
    """
    return _C.RegionSettings(
        call_uncompiled=call_uncompiled,
        region_name=region_name,
        hold_statistics=hold_statistics,
        preserve_rng_state=preserve_rng_state,
        check_metadata=check_metadata,
        early_stop=early_stop,
        arguments=arguments,
        partition=None if partition is None else partition.native,
        check_partition=check_partition,
        on_pass=on_pass,
        on_saved=on_saved,
        again=again,
        diagnose=diagnose or (advice if HAS_NATIVE else None),
    )


def fate_of_arguments(who: str, place: Place | None) -> Literal["keep"] | _C.Offload:
    """The `arguments` of `region_settings` for a place that a user names."""
    return "keep" if place is None else _C.Offload(directory=directory_of(who, place))


# Two threads may recompute the same layer at once: the first one in makes the copies, the last one
# out gives the statistics back.
_lock = threading.Lock()
_own_buffers: ByModule[dict[str, Tensor | None]] = ByModule()
_holders: ByModule[int] = ByModule()


def hold_statistics(layers: list[nn.Module]) -> Callable[[], None]:
    """Makes calls of these normalisation layers move copies of their running statistics, until the
    result is called: statistics move in forward and stand still in the recompute. In training the
    output does not depend on them, and passing them as usual, rather than not at all, saves the
    same tensors as forward did. The engine finds the layers (csrc/python/modules_reached.h).
    """
    with _lock:
        for layer in layers:
            if layer not in _holders:
                own = dict(layer._buffers)
                copies = {name: b if b is None else b.clone() for name, b in own.items()}
                layer._buffers.update(copies)
                _own_buffers[layer] = own
            _holders[layer] = _holders.get(layer, 0) + 1
    return functools.partial(_give_back, layers)


def _give_back(layers: list[nn.Module]) -> None:
    with _lock:
        for layer in layers:
            _holders[layer] -= 1
            if not _holders[layer]:
                del _holders[layer]
                layer._buffers.update(_own_buffers.pop(layer))
