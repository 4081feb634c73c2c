"""Fates that the modules of a model are set to: by memopt, transformers, PyTorch and FairScale."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from memopt._checkpoint.other import layers_that_checkpoint, without_own
from memopt._checkpoint.wrapper import settings_of
from memopt._class_patch import SwappedModule
from memopt._convert import revert
from memopt._convert.head import is_head
from memopt._convert.recipes import has_recipes

RECIPES = "recipes"
HEAD = "head in chunks"
REGION = "region"
TRANSFORMERS = "region by transformers"
PYTORCH = "region by PyTorch's wrapper"
FAIRSCALE = "region by FairScale's wrapper"


def regions_asked(model: nn.Module) -> dict[str, str]:
    """The modules that are set to be recomputed in backward, by path: who asked for it, and where
    their inputs wait.
    """
    layers = set(layers_that_checkpoint(model))
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        settings = settings_of(module)
        if settings is not None:
            where = "" if settings.offload is None else f", inputs offloaded to {settings.offload}"
            chunks = "" if settings.chunks is None else f" in {settings.chunks} chunks"
            joined = settings.joined
            shared = "" if joined is None else f" of {len(joined.paths)} in a row"
            found[path] = f"{REGION}{shared}{chunks}{where}"
        elif module in layers:
            found[path] = TRANSFORMERS
        elif isinstance(module, CheckpointWrapper):
            found[path] = PYTORCH
        elif _is_of_fairscale(module):
            found[path] = FAIRSCALE
    return found


def asks_for_recipes(model: nn.Module) -> bool:
    """Whether it was converted: recipes are on in its calls, or modules of it are memopt's."""
    return any(
        has_recipes(m) or (isinstance(m, SwappedModule) and not is_head(m)) for m in model.modules()
    )


def heads_asked(model: nn.Module) -> frozenset[str]:
    """The paths of linears whose logits are lazy."""
    return frozenset(path for path, module in model.named_modules() if is_head(module))


def without_fates(model: nn.Module) -> None:
    """Take all of these off a copy of a model, and the conversion."""
    without_own(model)
    if asks_for_recipes(model) or heads_asked(model):
        revert(model)
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            module.checkpoint_fn = functools.partial(_call)
        elif _is_of_fairscale(module):
            del module.__dict__["forward"]


def _is_of_fairscale(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    if not isinstance(forward, functools.partial):
        return False
    return getattr(forward.func, "__module__", "").startswith("fairscale.")


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
