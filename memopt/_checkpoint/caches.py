"""Caches of keys and values (transformers' `use_cache=True`) among the arguments of a region.

A cache grows with each call, and so it would a second time in the recompute, which then computed
something else. So forward gets the very cache, and the recompute a copy of the cache as it was
before the call, which grows and is dropped.

A copy shares the tensors that caches replace and never write (those of DynamicCache), and clones
the others (of StaticCache, of states of linear attention). A region keeps those of the layers that
its modules read and write, `layer_idx` says which: nothing, where the layer is empty before the
call, as in training. Tensors of other layers live as long as something else holds them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt._checkpoint.naming import region_name
from memopt._checkpoint.state import version_of
from memopt._extension import _C

_BEFORE = "cache before the call"  # the argument that a region gets in addition
_INDICES = ("layer_idx", "layer_id", "layer_index", "kv_shared_layer_index")

_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def may_have_caches() -> bool:
    """Whether transformers' caches exist in this process. Costs nothing where they do not."""
    return "transformers.cache_utils" in sys.modules


def has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a cache is among the arguments, or in a container among them."""
    return any(map(_holds_cache, args)) or any(map(_holds_cache, kwargs.values()))


def with_caches(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    owner: nn.Module | None = None,
) -> Call:
    """The call to make a region of, in place of `fn(*args, **kwargs)`, which `has_cache`.

    owner: the module whose forward `fn` is; None if `fn` says by itself what it uses.
    """
    modules = owner.modules() if owner is not None else _C.modules_reached(fn)
    caches: dict[int, Any] = {}

    def place(cache: Any) -> _Place:
        caches.setdefault(id(cache), cache)
        return _Place(list(caches).index(id(cache)))

    placed = tuple(_exchanged(value, place) for value in args)
    named = {name: _exchanged(value, place) for name, value in kwargs.items()}
    copier = _Copier(_layers_of(modules))
    before = _Before(copier.copy(list(caches.values())), copier.tensors, (args, kwargs))

    def call(*args: Any, **kwargs: Any) -> Any:
        given: _Before = kwargs.pop(_BEFORE)
        if given.live is not None:
            in_forward, named_in_forward = given.live
            return fn(*in_forward, **named_in_forward)
        recompute = _Recompute(given)
        try:
            return fn(*recompute.arguments(args), **recompute.arguments(kwargs))
        except Exception as error:
            recompute.explain(error, fn if owner is None else owner)
            raise

    call.__wrapped__ = fn  # type: ignore[attr-defined]
    return call, placed, {**named, _BEFORE: before}


def note_on_caches(model: nn.Module, regions: Iterable[nn.Module]) -> str:
    """A report's note on what becomes of a model's caches; empty for a model without any."""
    if not makes_caches(model) or not any(True for _ in regions):
        return ""
    return (
        "the model's config has use_cache=True: where forward returns a cache, a step holds the "
        "keys and values of all layers for as long as it holds the model's output, regions or not; "
        "model.config.use_cache = False frees them"
    )


def makes_caches(model: nn.Module) -> bool:
    """Whether a model of transformers may make a cache in forward, by its configuration and code.
    The configurations of encoders (BERT, ViT) may say use_cache=True too: but their forward takes
    no such argument, or all of their layers have is_decoder=False. Some that take it make none
    (Mamba in training).
    """
    return any(map(_makes_cache, model.modules()))


def _makes_cache(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", None) is not True:
        return False
    if "use_cache" not in inspect.signature(module.forward).parameters:
        return False
    said = {getattr(m, "is_decoder", None) for m in module.modules()}
    return True in said or False not in said  # decoders without encoders (Llama) say nothing


@dataclass
class _Place:
    """Stands in the arguments of a region for the cache of this number."""

    number: int


@dataclass
class _Kept:
    """Stands in a copied cache for a tensor that the region keeps."""

    number: int


@dataclass(slots=True)
class _Elsewhere:
    """Stands in a copied cache for a tensor of a layer that the region does not use."""

    found: weakref.ref[Tensor]
    version: int
    shape: torch.Size
    dtype: torch.dtype

    def get(self) -> Tensor | None:
        """The tensor, if it is there and was not written since."""
        tensor = self.found()
        return tensor if tensor is not None and version_of(tensor) == self.version else None


@dataclass
class _Before:
    """Caches as they were before the call; a node for pytree, whose leaves are their tensors."""

    copies: list[Any]
    tensors: list[Tensor]
    live: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The arguments with the caches themselves; in forward only."""


pytree.register_pytree_node(
    _Before,
    lambda before: (before.tensors, before.copies),
    lambda tensors, copies: _Before(copies, list(tensors)),
)


@dataclass
class _Copier:
    """Copies caches with all that is theirs; `_Kept` or `_Elsewhere` stand for tensors."""

    layers: set[int]
    tensors: list[Tensor] = field(default_factory=list)
    _copied: dict[int, Any] = field(default_factory=dict)
    _is_used: bool = True
    _is_written: bool = True

    def copy(self, value: Any) -> Any:
        return _copied(value, self._copied, self._tensor, self._enter)

    def _enter(self, value: Any, index: int | None) -> None:
        """Called with a part of a cache, and with its number if it is a layer."""
        if index is not None:
            self._is_used = not self.layers or index in self.layers
        self._is_written = _writes_in_place(value)

    def _tensor(self, tensor: Tensor) -> _Kept | _Elsewhere:
        # Of the other layers positions count: a single number, which may be a tensor.
        if self._is_used or tensor.numel() <= 1:
            self.tensors.append(tensor.clone() if self._is_written else tensor)
            return _Kept(len(self.tensors) - 1)
        return _Elsewhere(weakref.ref(tensor), version_of(tensor), tensor.shape, tensor.dtype)


class _Recompute:
    """The arguments of one recompute."""

    def __init__(self, before: _Before) -> None:
        self._tensors = before.tensors
        self._any_gone = False
        self._caches = _copied(before.copies, {}, self._tensor, lambda *_: None)

    def arguments(self, arguments: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: self._caches[leaf.number] if isinstance(leaf, _Place) else leaf,
            arguments,
            is_leaf=lambda node: isinstance(node, torch.Size),
        )

    def _tensor(self, held: Any) -> Tensor:
        if isinstance(held, _Kept):
            return self._tensors[held.number]
        tensor: Tensor | None = held.get()
        self._any_gone |= tensor is None
        if tensor is not None:
            return tensor
        return torch.empty(held.shape, dtype=held.dtype, device="meta")

    def explain(self, error: Exception, subject: object) -> None:
        """Raises if `error` is of a tensor that is gone: its stand-in is on the device meta."""
        if self._any_gone and "meta" in str(error):
            raise RuntimeError(
                f"checkpoint: the region {region_name(subject)} must find in its recompute what it "
                "read of a cache, got a layer that is none of its own and was dropped or written "
                "since; hold the cache, unchanged, until backward has ended"
            ) from error


def _copied(
    value: Any,
    copied: dict[int, Any],
    of_tensor: Callable[[Any], Any],
    enter: Callable[[Any, int | None], None],
    index: int | None = None,
) -> Any:
    """A copy of a cache, or of what it holds; what belongs to no cache is shared."""
    if id(value) in copied:
        return copied[id(value)]
    if isinstance(value, (Tensor, _Kept, _Elsewhere)):
        copied[id(value)] = of_tensor(value)
        return copied[id(value)]
    again = functools.partial(_copied, copied=copied, of_tensor=of_tensor, enter=enter)
    kind = type(value)
    made: Any = value
    if kind is list or kind is tuple:
        made = kind(map(again, value))
    elif kind is dict:
        made = {key: again(element) for key, element in value.items()}
    elif kind is set:
        made = set(value)
    elif _is_known_part(kind):
        made = object.__new__(kind)
        copied[id(value)] = made
        enter(value, index)
        for name, attribute in vars(value).items():
            if name == "layers" and isinstance(attribute, list):
                made.__dict__[name] = [again(a, index=i) for i, a in enumerate(attribute)]
                enter(value, None)
            elif type(attribute) not in _PLAIN:
                made.__dict__[name] = again(attribute)
            else:
                made.__dict__[name] = attribute
    copied[id(value)] = made
    return made


def _holds_cache(value: Any) -> bool:
    if value is None or isinstance(value, (Tensor, int, float, str)):
        return False
    if _is_cache(type(value)):
        return True
    # Most containers are pairs of tensors.
    if type(value) is tuple and all(isinstance(element, Tensor) for element in value):
        return False
    if type(value) in pytree.SUPPORTED_NODES:
        leaves = pytree.tree_leaves(value, is_leaf=lambda node: _is_cache(type(node)))
        return any(_is_cache(type(leaf)) for leaf in leaves)
    return False


def _exchanged(value: Any, place: Callable[[Any], _Place]) -> Any:
    if not _holds_cache(value):
        return value
    return pytree.tree_map(
        lambda leaf: place(leaf) if _is_cache(type(leaf)) else leaf,
        value,
        is_leaf=lambda node: _is_cache(type(node)) or isinstance(node, torch.Size),
    )


def _is_cache(kind: type) -> bool:
    """Caches of some models (xLSTM, Reformer) have no base class."""
    if issubclass(kind, sys.modules["transformers.cache_utils"].Cache):
        return True
    return kind.__name__.endswith("Cache") and _is_part(kind)


def _is_part(kind: type) -> bool:
    """Whether an object of this class is a cache's own: a cache, or a layer of one."""
    names = (base.__module__ for base in kind.__mro__)
    return (
        any(name.split(".")[0] == "transformers" for name in names)
        and hasattr(kind, "__dict__")
        and not issubclass(kind, (nn.Module, Tensor, type))
        and any("Cache" in base.__name__ or "Layer" in base.__name__ for base in kind.__mro__)
    )


_is_known_part: Callable[[type], bool] = functools.cache(
    _is_part
)  # asked for each attribute; not by torch.compile


def _writes_in_place(part: Any) -> bool:
    """Whether a layer of a cache writes to the tensors that it holds, as far as is known."""
    caches = sys.modules["transformers.cache_utils"]
    is_linear = isinstance(part, getattr(caches, "LinearAttentionCacheLayerMixin", ()))
    return is_linear or not isinstance(part, (caches.DynamicLayer, caches.Cache))


def _layers_of(modules: Iterable[nn.Module]) -> set[int]:
    """The numbers of the layers of a cache that the modules use; empty if they do not say."""
    found = (module.__dict__.get(name) for module in modules for name in _INDICES)
    return {index for index in found if isinstance(index, int)}
