"""Recipes on around a model's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memopt._subclass import Around, Change, Forward, changes, put_around
from memopt.recipes import recompute


class Recomputing(Around):
    """Mixin of the classes of models that run inside memopt.recompute()."""

    _memopt_who = "convert: a converted"
    _memopt_undo = "revert"
    _memopt_instance_forward = "_memopt_recompute_instance_forward"

    @staticmethod
    def _memopt_call(
        module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch.compiler.is_compiling():  # there the compiler decides what is kept
            return forward(*args, **kwargs)
        if torch._C._are_functorch_transforms_active():  # which refuse saved-tensor hooks
            return forward(*args, **kwargs)
        with recompute():
            return forward(*args, **kwargs)


def turn_recipes_on(model: nn.Module) -> None:
    """Run every forward of `model` inside memopt.recompute(), if it does not do so already."""
    if not issubclass(type(model), Recomputing):
        put_around(model, Change(Recomputing))


def has_recipes(model: nn.Module) -> bool:
    """Whether `turn_recipes_on` was called for it."""
    return any(change.mixin is Recomputing for change in changes(type(model)))
