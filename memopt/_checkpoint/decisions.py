"""The decisions of a region, kept from forward for its recompute: experts, samples, sizes.

A choice by values may come out otherwise when it is made again: products of another order, a kernel
that adds in any order or a reduced precision move two close scores past each other. The recompute
would then send rows to other experts, and backward would fail or give gradients of another call.

So the operators that choose keep their integer results: the indices of topk, sort and argmax, what
multinomial, nonzero, bincount and unique return, numbers that the host reads, and masks by which a
tensor is indexed. The recompute takes these in place of its own, and picks values by the kept
indices. All else it computes again. The two modes here stand where those of PyTorch's selective
checkpoint do (`torch.utils.checkpoint.create_selective_checkpoint_contexts`), in `context_fn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from memopt._compat import without_dispatch_modes
from memopt.memory.arguments import by_name
from memopt.memory.uncompiled_mode import UncompiledMode

# They return values and their indices, along a dim.
_WITH_INDICES = {
    *("topk", "sort", "kthvalue", "mode", "median", "nanmedian", "max", "min"),
    *("cummax", "cummin"),
}
_CHOOSING = {
    *("argmax", "argmin", "multinomial", "nonzero", "nonzero_static", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    *("searchsorted", "bucketize"),
}
_READ_BY_THE_HOST = {"_local_scalar_dense", "equal"}
_INDEXED_BY_MASK = {
    *("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"),
    *("masked_select", "masked_scatter", "masked_scatter_"),
}


def decision_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a region that keeps its decisions, for `context_fn`.

    For memopt's regions `keep_decisions=True` says the same in fewer words. They do for PyTorch's
    own as well::

        torch.utils.checkpoint.checkpoint(
            block, x, use_reentrant=False, context_fn=memopt.checkpoint.decision_contexts
        )

    Kept are, until the graph goes: the integer results of topk, sort, argmax and their like,
    multinomial, nonzero, bincount and unique (with the values of the latter), as they are, 8 bytes
    a number as a rule; masks that index a tensor, 1 byte an element; and numbers that the host
    reads. The host calls each operator of the region through Python, in both runs.
    """
    kept = _Kept()
    return _KeepDecisions(kept), _UseDecisions(kept)


class _Decision(NamedTuple):
    op: Any
    results: list[Any]
    """A tensor that is kept, a number or None, for each leaf of the result."""
    versions: list[int]


class _Kept:
    """The decisions of one call of a region."""

    def __init__(self) -> None:
        self.decisions: list[_Decision] = []
        self.masks: dict[int, Tensor] = {}
        """Masks that index, by their number among the results of dtype bool."""


class _KeepDecisions(UncompiledMode):
    """Notes what operators decide."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept
        self._numbers = WeakIdKeyDictionary()
        """The numbers of results of dtype bool."""
        self._count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for mask in _masks_of(func, args):
            if mask in self._numbers:
                self._kept.masks.setdefault(self._numbers[mask], mask.detach())
        result = func(*args, **(kwargs or {}))
        if _decides(func):
            leaves = pytree.tree_leaves(result)
            kept = [_kept_of(func, leaf) for leaf in leaves]
            versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in kept]
            self._kept.decisions.append(_Decision(func, kept, versions))
        elif _is_mask(result):
            self._numbers[result] = self._count
            self._count += 1
        return result


class _UseDecisions(UncompiledMode):
    """Gives operators the results that they had in forward."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept
        self._next = self._count = 0

    def __enter__(self) -> _UseDecisions:
        self._next = self._count = 0
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _decides(func):
            with without_dispatch_modes():  # a selective checkpoint around sees forward's operators
                return self._decided(func, args, kwargs)
        result = func(*args, **kwargs)
        if not _is_mask(result):
            return result
        mask = self._kept.masks.get(self._count)
        self._count += 1
        if mask is None:
            return result
        if result.shape != mask.shape:
            _fail(f"a mask of shape {list(mask.shape)}", f"{list(result.shape)} of {func}")
        with without_dispatch_modes():
            return result.copy_(mask) if func._schema.is_mutable else mask.clone()

    def _decided(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._next == len(self._kept.decisions):
            _fail("no more decisions", str(func))
        decision = self._kept.decisions[self._next]
        self._next += 1
        if decision.op is not func:
            _fail(str(decision.op), str(func))
        for one, version in zip(decision.results, decision.versions, strict=True):
            if isinstance(one, Tensor) and one._version != version:
                raise RuntimeError(
                    f"checkpoint: what {func} returns must not be written in place in a region "
                    "that keeps its decisions, got a tensor that was written"
                )
        kept = [one.clone() if isinstance(one, Tensor) else one for one in decision.results]
        if None not in kept:
            return kept[0] if len(kept) == 1 else tuple(kept)
        return _along_a_dim(func, args, kwargs, kept[1])


def _decides(func: Any) -> bool:
    name = func.overloadpacket.__name__
    if name in _WITH_INDICES:
        return len(func._schema.returns) == 2 and not func._schema.is_mutable
    return name in _CHOOSING or name in _READ_BY_THE_HOST


def _kept_of(func: Any, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    is_value = leaf.is_floating_point() and func.overloadpacket.__name__ in _WITH_INDICES
    if is_value:
        return None
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return leaf.detach()  # of the same version counter


def _along_a_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], indices: Tensor) -> Any:
    """Values and indices of an operator that chooses along a dim, by the indices."""
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given = defaults | by_name(func, args, kwargs)
    source, dim = given["self"], given.get("dim", -1)
    if source.dim() == 0:
        return source.clone(), indices
    lost = indices.dim() < source.dim()
    values = source.gather(dim, indices.unsqueeze(dim) if lost else indices)
    return values.squeeze(dim) if lost else values, indices


def _is_mask(result: Any) -> bool:
    return isinstance(result, Tensor) and result.dtype is torch.bool


def _masks_of(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The masks by which an operator indexes."""
    if func.overloadpacket.__name__ not in _INDEXED_BY_MASK:
        return []
    return [leaf for leaf in pytree.tree_leaves(args[1:2]) if _is_mask(leaf)]


def _fail(expected: str, got: str) -> None:
    raise RuntimeError(
        "checkpoint: recompute of a region that keeps its decisions must decide as forward did, "
        f"{expected} here, got {got}"
    )


ADVICE = (
    "; where a call chooses experts, samples or sizes by values, which may come out otherwise, "
    "keep_decisions=True keeps what it chose"
)


def advice() -> str:
    """Text that ends the error of a recompute that differs."""
    return ADVICE


@contextmanager
def noting_decisions(
    modules: Mapping[str, nn.Module], found: Callable[[str], None]
) -> Iterator[None]:
    """A scope in which `found` is told of each module, by path, that chooses by values."""
    running: list[str] = []

    def begin(path: str) -> Callable[..., None]:
        return lambda module, args: running.append(path)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for path, module in modules.items():
            stack.callback(module.register_forward_pre_hook(begin(path)).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)
        stack.enter_context(_NoteDecisions(running, found))
        yield


class _NoteDecisions(UncompiledMode):
    def __init__(self, running: list[str], found: Callable[[str], None]) -> None:
        super().__init__()
        self._running, self._found = running, found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._running and _chooses_by_values(func, args):
            for path in self._running:
                self._found(path)
        return func(*args, **(kwargs or {}))


def _chooses_by_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator chooses by floats, from which all other choices of a region follow."""
    if not _decides(func) and not _masks_of(func, args):
        return False
    if func.overloadpacket.__name__ in _READ_BY_THE_HOST | {"max", "min", "cummax", "cummin"}:
        return False
    return isinstance(args[0], Tensor) and args[0].is_floating_point()
