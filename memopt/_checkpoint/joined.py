"""Modules that a model calls one after another, as one region, whoever's code makes the calls.

The first call begins a region, and the next ones go on with it: what they save for backward is
dropped too. The recompute makes the calls again, each with what the one before returned. So only
the first one's arguments are kept, and the others' as far as they come from elsewhere. What runs
between two calls is not a part of the region. A call that gets nothing of what the one before it
returned, or gets it written in place, or with objects whose content may change, or finds random
generators or autocast changed since, begins a region of its own: that keeps more, and is right.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt._checkpoint.caches import has_cache, may_have_caches
from memopt._checkpoint.naming import region_name
from memopt._checkpoint.region import is_region, run_region
from memopt._checkpoint.state import version_of
from memopt._extension import _C, HAS_NATIVE
from memopt.memory.storages import tensors_in

RunCall = Callable[..., Any]
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), types.FunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


class Joined:
    """A region that several modules share. A copy of it is a new one, for the modules' copies."""

    def __init__(self, paths: Sequence[str]) -> None:
        """
        Args:
            paths: of the modules, in the order of their calls.
        """
        self.paths = tuple(paths)
        self._open = _Open()

    def call(
        self,
        number: int,
        module: nn.Module,
        run: RunCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: Any,
    ) -> Any:
        """Call `run(*args, **kwargs)` as the module of this number, from 0."""
        if not is_region():
            return run(*args, **kwargs)
        if not HAS_NATIVE or (may_have_caches() and has_cache(args, kwargs)):
            # Each call finds what the others left in the cache, and the recompute would too.
            return run_region(run, args, kwargs, settings)
        joined = self._open.follow(args, kwargs) if number else None
        if joined is None:
            return self._open.begin(module, run, args, kwargs, settings)
        joined.module = module
        return self._open.go_on(joined, run, args, kwargs, is_last=number + 1 == len(self.paths))

    def __deepcopy__(self, memo: dict[int, Any]) -> Joined:
        copied: Joined = memo.setdefault(id(self), Joined(self.paths))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Joined, (self.paths,)


class _Open(threading.local):
    """A region that a thread may go on with. Nothing here keeps its tensors alive."""

    def __init__(self) -> None:
        self._region: _C.JoinedRegion | None = None
        self._replay: weakref.ref[_Replay] | None = None
        self._returned: list[_Returned] = []

    def begin(
        self,
        module: nn.Module,
        run: RunCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: Any,
    ) -> Any:
        region = _C.JoinedRegion()
        replay = _Replay(module, run, region)
        output = region.begin_with(replay, run, args, kwargs, settings)
        self._region, self._replay = region, weakref.ref(replay)
        self._returned = [_Returned(tensor) for tensor in tensors_in(output)]
        return output

    def follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Later | None:
        """How to make a call again; None where it does not follow the one before."""
        if self._region is None or not self._region.goes_on():
            return None
        known = {id(t): n for n, one in enumerate(self._returned) if (t := one.ref()) is not None}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        passed_on = [leaf for leaf in leaves if id(leaf) in known]
        if not passed_on or any(self._returned[known[id(t)]].is_written(t) for t in passed_on):
            return None
        if not all(map(_can_be_kept, leaves)):
            return None
        places = {n: known[id(leaf)] for n, leaf in enumerate(leaves) if id(leaf) in known}
        return _Later([_kept(leaf, id(leaf) in known) for leaf in leaves], spec, places)

    def go_on(
        self,
        later: _Later,
        run: RunCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_last: bool,
    ) -> Any:
        region = self._region
        assert region is not None
        assert self._replay is not None
        replay = self._replay()
        assert replay is not None  # it lives as long as the region
        later.run = run
        replay.calls.append(later)
        try:
            output = region.go_on(run, args, kwargs)
        except BaseException:
            self._region = None
            raise
        self._region = None if is_last else region
        self._returned = [_Returned(tensor) for tensor in tensors_in(output)]
        return output


class _Returned:
    """A tensor that a call returned."""

    def __init__(self, tensor: Tensor) -> None:
        self.ref = weakref.ref(tensor)
        self._version = version_of(tensor)

    def is_written(self, tensor: Tensor) -> bool:
        """Whether something wrote to it since, which a recompute of the calls would not do."""
        return version_of(tensor) != self._version


class _Later:
    """A call behind the first one, to be made again."""

    def __init__(self, leaves: list[Any], spec: Any, places: dict[int, int]) -> None:
        self.run: RunCall = _nothing
        self.module: nn.Module | None = None
        self._leaves, self._spec = leaves, spec
        self._versions = {
            n: version_of(leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)
        }
        self._places = places
        """Places of arguments that the call before it returned, and the tensors' numbers there."""

    def __call__(self, before: Any, region: _C.JoinedRegion) -> Any:
        """
        Raises:
            RuntimeError: an argument was written in place, as the engine says of a first call's.
        """
        for place, version in self._versions.items():
            now = version_of(self._leaves[place])
            if now != version:
                raise RuntimeError(
                    f"checkpoint: an argument of region {region_name(self.module)} must not be "
                    "written in place before backward has used it, got a tensor at version "
                    f"{now}; forward was called with version {version}"
                )
        returned = tensors_in(before)
        leaves = list(self._leaves)
        for place, number in self._places.items():
            leaves[place] = returned[number]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return region.again(self.run, args, kwargs)


class _Replay:
    """The calls of a region, made again."""

    def __init__(self, module: nn.Module, run: RunCall, region: _C.JoinedRegion) -> None:
        self.__wrapped__ = module  # by which messages name the region
        self.run = run
        self.region = region
        self.calls: list[_Later] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.region.again(self.run, args, kwargs)
        for later in self.calls:
            output = later(output, self.region)
        return output


def _can_be_kept(leaf: Any) -> bool:
    """Whether a recompute surely finds an argument as it is now. Of objects, whose tensors may be
    exchanged between two calls, a region of their own takes care.
    """
    return isinstance(leaf, (Tensor, nn.Module, *_VALUES))


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _kept(leaf: Any, is_passed_on: bool) -> Any:
    """An argument as the recompute gets it: without its history, which may hold the region."""
    if is_passed_on:
        return None
    if not isinstance(leaf, Tensor) or leaf.is_leaf:
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
