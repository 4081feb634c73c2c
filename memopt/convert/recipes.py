"""Turns recipes (memopt.recompute) on for every forward of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memopt._class_patch import ClassPatch, Forward, ForwardWrapper, patches_of, wrap_forward
from memopt._compat import in_function_transform
from memopt.recipes import recompute


class RecipesOn(ForwardWrapper):
    """Mixin of the classes of models whose forward runs inside memopt.recompute()."""

    _memopt_who = "convert: a converted"
    _memopt_undo = "revert"
    _memopt_instance_forward = "_memopt_recompute_instance_forward"

    @staticmethod
    def _memopt_call(
        module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch.compiler.is_compiling():  # there the compiler decides what is kept
            return forward(*args, **kwargs)
        if in_function_transform():  # where PyTorch allows no saved-tensor hooks
            return forward(*args, **kwargs)
        with recompute():
            return forward(*args, **kwargs)


def turn_recipes_on(model: nn.Module) -> None:
    """Run every forward of `model` inside memopt.recompute(), if it does not do so already."""
    if not issubclass(type(model), RecipesOn):
        wrap_forward(model, ClassPatch(RecipesOn))


def has_recipes(model: nn.Module) -> bool:
    """Whether `turn_recipes_on` was called for it."""
    return any(patch.mixin is RecipesOn for patch in patches_of(type(model)))
