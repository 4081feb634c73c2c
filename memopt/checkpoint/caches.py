"""Caches of keys and values (transformers' `use_cache=True`) among the arguments of a region.

A cache grows with each call, and so a second time in the recompute, which then computes something
else. transformers' own gradient checkpointing gives its layers no cache in training
(GradientCheckpointingLayer); a region does the same for these layers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt.checkpoint.naming import region_name

_NAMES = ("past_key_values", "past_key_value", "layer_past")
_TURNED_OFF = "regions turn the cache of keys and values off"
_FIX = "set use_cache=False (model.config.use_cache = False)"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def may_have_caches() -> bool:
    """Whether transformers' caches exist in this process. Costs nothing where they do not."""
    return "transformers.cache_utils" in sys.modules


def has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a cache is among the arguments."""
    cache: type = sys.modules["transformers.cache_utils"].Cache
    return any(isinstance(value, cache) for value in (*args, *kwargs.values()))


def module_of(fn: object) -> nn.Module | None:
    """The module that a call of `fn` runs: itself, or the one that it is a method of."""
    fn = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return fn if isinstance(fn, nn.Module) else None


def without_cache(
    who: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """The arguments for a region of `module`, which `has_cache`; None if it must run without one.

    who: what errors and warnings begin with.

    Raises:
        RuntimeError: in training, the module is none that can do without a cache, or the cache
            holds something already.
    """
    if getattr(module, "_can_checkpoint_with_cache", False):  # it only reads the cache
        return args, kwargs
    if not module.training:
        warnings.warn(
            f"{who}: {region_name(module)} is in evaluation mode and was called with "
            "a cache, which would grow again in the recompute: it runs without a region, and what "
            f"it saves for backward stays; {_FIX}, or disable gradients",
            stacklevel=3,
        )
        return None
    cache: type = sys.modules["transformers.cache_utils"].Cache
    named = [*((None, value) for value in args), *kwargs.items()]
    found = [(name, value) for name, value in named if isinstance(value, cache)]
    if not checkpoints_itself(module) or any(name not in (None, *_NAMES) for name, _ in found):
        rule = f"must not get a cache, which would grow again in the recompute; {_FIX}"
    elif not all(_is_empty(value, module) for _, value in found):
        rule = (
            "must get an empty cache (or none), since it does without one, and what the cache "
            f"holds would be lost; {_FIX} and give the tokens before as input"
        )
    else:
        warnings.warn(
            f"{who}: {_TURNED_OFF} in training, as "
            f"transformers' gradient checkpointing does; {_FIX} to do so from the beginning",
            stacklevel=3,
        )
        kwargs = {k: None if isinstance(v, cache) else v for k, v in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return tuple(None if isinstance(v, cache) else v for v in args), kwargs
    raise RuntimeError(
        f"{who}: the region {region_name(module)} {rule}; got "
        f"{', '.join(f'{name or type(value).__name__}' for name, value in found)}"
    )


@contextmanager
def without_warnings_of_caches() -> Iterator[None]:
    """For steps that memopt runs by itself, of which a report says what becomes of caches."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*: {_TURNED_OFF}")
        yield


def note_on_caches(model: nn.Module, regions: Iterable[nn.Module]) -> str:
    """For a report: what becomes of the caches of a model that has them; empty for another one."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    if not any(getattr(config, "use_cache", False) is True for config in configs):
        return ""
    if not any(map(checkpoints_itself, regions)):
        return ""
    return (
        "the model's config has use_cache=True: in training, regions turn the cache of keys and "
        "values off, as transformers' gradient checkpointing does"
    )


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether it is a layer of transformers that gradient checkpointing can be turned on in, and
    that does without a cache then.
    """
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and isinstance(module, layers.GradientCheckpointingLayer)


def _is_empty(cache: Any, module: nn.Module) -> bool:
    """Of the layers of the cache, those that `module` writes."""
    indices = {i for m in module.modules() if isinstance(i := getattr(m, "layer_idx", None), int)}
    parts = [getattr(cache, f"{kind}_attention_cache", None) for kind in ("self", "cross")]
    layers = [
        layer
        for part in (cache, *parts)
        for index, layer in enumerate(getattr(part, "layers", ()))
        if index in indices or not indices
    ]
    values = [value for layer in layers for value in pytree.tree_leaves(vars(layer))]
    return not any(isinstance(value, Tensor) and value.dim() and value.numel() for value in values)
