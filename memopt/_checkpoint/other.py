"""Activation checkpointing of a model's own: PyTorch's, called in its forward, or by a function of
its own. A region inside it saves nothing: what it would drop is dropped already. Where it is
reentrant, backward runs the region once more.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from memopt._checkpoint.naming import joined
from memopt._checkpoint.wrapper import unwrap
from memopt._class_patch import original_class
from memopt._function_code import codes_in, plain_function
from memopt.memory.frames import first_argument

# Without the native library a region of memopt's calls PyTorch's, and is called by it.
_REGIONS = str(Path(__file__).parents[1] / "_without_native" / "region.py")


def is_in_other_checkpointing() -> bool:
    """Whether what runs here was called by torch.utils.checkpoint, or by a custom function of
    autograd, as reentrant checkpointing is made (FairScale, DeepSpeed, guided diffusion).
    """
    frame: Any = sys._getframe(1)
    inner = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == torch_checkpoint.__file__ and inner not in (file, _REGIONS):
            return True
        inner = file
        if isinstance(first_argument(frame), torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back
    return False


def says_that_it_checkpoints(module: nn.Module) -> bool:
    """Asks the property of models of transformers and diffusers, under its name of today."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    name = next((name for name in names if hasattr(type(module), name)), None)
    return name is not None and getattr(module, name) is True


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether it is a layer of transformers that gradient checkpointing can be turned on in. A
    region around its forward takes the place of that.
    """
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and isinstance(module, layers.GradientCheckpointingLayer)


def layers_that_checkpoint(model: nn.Module) -> list[nn.Module]:
    """Layers of transformers whose own gradient checkpointing is on."""
    return [m for m in model.modules() if checkpoints_itself(m) and _is_on(m)]


def _is_on(module: nn.Module) -> bool:
    return module.__dict__.get("gradient_checkpointing") is True


def without_own(model: nn.Module) -> None:
    """Take regions away, and the checkpointing whose place they would take."""
    unwrap(model)
    _turn(layers_that_checkpoint(model), False)


@contextmanager
def own_turned_off(model: nn.Module) -> Iterator[None]:
    """Turns off, in this scope, the checkpointing whose place regions would take."""
    layers = layers_that_checkpoint(model)
    _turn(layers, False)
    try:
        yield
    finally:
        _turn(layers, True)


def _turn(layers: Sequence[nn.Module], on: bool) -> None:
    for layer in layers:
        layer.__dict__["gradient_checkpointing"] = on


def with_own(model: nn.Module) -> None:
    """Take regions away, and turn on the checkpointing that the model has itself."""
    unwrap(model)
    for module in _with_own(model):
        name = next(name for name in _TURN_ON if hasattr(module, name))
        getattr(module, name)()


def has_own(model: nn.Module) -> bool:
    """Whether it has gradient checkpointing that can be turned on, as transformers, diffusers and
    timm have.
    """
    return bool(_with_own(model))


_TURN_ON = (  # of transformers, by its names of today and of before, diffusers, timm
    "activation_checkpointing_enable",
    "gradient_checkpointing_enable",
    "enable_gradient_checkpointing",
    "set_grad_checkpointing",
)
_SUPPORTS = ("supports_gradient_checkpointing", "_supports_gradient_checkpointing")


def _with_own(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that have it."""
    found: list[nn.Module] = []
    todo = [model]
    while todo:
        module = todo.pop()
        supports = [getattr(module, name) for name in _SUPPORTS if hasattr(type(module), name)]
        if all(supports) and any(hasattr(module, name) for name in _TURN_ON):
            found.append(module)
        else:
            todo += module.children()
    return found


def notes_on_own(model: nn.Module, regions: Sequence[nn.Module]) -> list[str]:
    """Notes for the user on regions in a model that may checkpoint by itself, as far as the model
    says so or its code shows it.
    """
    if not regions:
        return []
    paths = {module: path for path, module in model.named_modules()}
    on = list(filter(_is_on, paths))
    inside = {each for m in regions for each in m.modules() if each is not m}
    below = {each for m in on for each in m.modules() if each is not m}
    replaced = [paths[m] for m in regions if checkpoints_itself(m) and m in on]
    twice = [paths[m] for m in on if checkpoints_itself(m) and m in inside]
    # A model of diffusers runs blocks under a checkpoint, and these cannot tell.
    idle = [paths[m] for m in regions if m in below and not checkpoints_itself(m)]
    notes = []
    if replaced:
        notes.append(
            "the regions take the place of transformers' gradient checkpointing, which is on in "
            f"the model: {joined(replaced)}"
        )
    if twice:
        notes.append(
            "transformers' gradient checkpointing is on inside regions, and backward recomputes "
            f"its layers twice: {joined(twice)}"
        )
    if idle:
        notes.append(
            "the model's own gradient checkpointing is on, and where it runs a region there is "
            f"nothing left for that to save: {joined(idle)}"
        )
    return notes or _notes_by_code(model)


def _notes_by_code(model: nn.Module) -> list[str]:
    classes = dict.fromkeys(
        original_class(type(m)).__name__ for m in model.modules() if _calls_checkpoint(m)
    )
    if any(map(says_that_it_checkpoints, model.modules())):
        which = "gradient checkpointing of the model's own is on"
    elif classes:
        which = f"{', '.join(classes)} may call torch.utils.checkpoint in forward"
    else:
        return []
    return [
        f"{which}: regions inside it save nothing, and backward runs them once more where it is "
        "reentrant; a sample shows which these are"
    ]


def _calls_checkpoint(module: nn.Module) -> bool:
    """Whether a method of its class, or a function of the same file that one calls, does."""
    for base in original_class(type(module)).__mro__:
        if base.__module__.startswith("torch.nn."):
            continue
        for method in vars(base).values():
            if isinstance(method, types.FunctionType) and any(_found(method, inner=True)):
                return True
    return False


def _found(function: types.FunctionType, inner: bool) -> Iterator[bool]:
    for code in codes_in(plain_function(function)):
        for name in code.co_names:
            value = function.__globals__.get(name)
            by_path = value is torch and {"utils", "checkpoint"} <= set(code.co_names)
            if by_path or value is torch_checkpoint or value is torch_checkpoint.checkpoint:
                yield True
            is_near = getattr(value, "__module__", None) == function.__module__
            if inner and is_near and isinstance(value, types.FunctionType):
                yield from _found(value, inner=False)
