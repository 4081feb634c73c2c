"""The checkpointed regions that convert makes, and their undoing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from memopt.checkpoint.apply import apply_checkpointing
from memopt.checkpoint.wrapper import (
    check_can_unwrap,
    checkpoint_wrapper,
    settings_of,
    unwrap_itself,
)

Predicate = Callable[[nn.Module], bool]
Choice = Predicate | type[nn.Module] | Sequence[type[nn.Module]]

# On a module that convert made a checkpointed region: the settings it had before, or None.
_SETTINGS_BEFORE = "_memopt_convert_settings_before"


class Regions:
    """Which submodules become regions: convert's arguments `checkpoint` and `offload`."""

    checkpointed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    """Paths, once they are applied. A module is in one of them."""

    def __init__(self, checkpoint: object, offload: object) -> None:
        self._blocks = checkpoint is True
        is_flag = isinstance(checkpoint, bool)
        self._checkpoint = None if is_flag else _predicate("checkpoint", checkpoint)
        self._offload = _predicate("offload", offload)

    def __bool__(self) -> bool:
        return bool(self.checkpointed or self.offloaded)

    def apply(self, model: nn.Module) -> None:
        """Wrap the chosen modules, and note on each what it was before."""
        before = {module: settings_of(module) for module in model.modules()}
        checkpointed, offloaded = [], []
        if self._blocks or self._checkpoint is not None:
            checkpointed = apply_checkpointing(model, self._checkpoint)
        if self._offload is not None:
            offloaded = apply_checkpointing(model, self._offload, offload_to_cpu=True)
        for path in {*checkpointed, *offloaded}:
            module = model.get_submodule(path)
            module.__dict__.setdefault(_SETTINGS_BEFORE, before[module])
        self.checkpointed = tuple(path for path in checkpointed if path not in offloaded)
        self.offloaded = tuple(offloaded)


def check_can_revert_region(module: nn.Module) -> None:
    """Raises RuntimeError if the region's class was derived from since."""
    if _SETTINGS_BEFORE in module.__dict__ and settings_of(module) is not None:
        check_can_unwrap("revert", module)


def revert_region(module: nn.Module) -> None:
    """Unwrap `module`, or give it the settings that it had, if `Regions.apply` changed it."""
    if _SETTINGS_BEFORE not in module.__dict__:
        return
    settings = module.__dict__.pop(_SETTINGS_BEFORE)
    if settings is not None:
        checkpoint_wrapper(module, settings.offload_to_cpu, settings.maintain_forward_counter)
    elif settings_of(module) is not None:  # else it was unwrapped since
        unwrap_itself(module)


def _predicate(name: str, choice: object) -> Predicate | None:
    if choice is None:
        return None
    if isinstance(choice, type) or not callable(choice):
        classes: Any = tuple(choice) if isinstance(choice, (list, tuple, set)) else (choice,)
        if classes and all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            return lambda module: isinstance(module, classes)
        raise TypeError(
            f"convert: {name} must be a function of a module, a subclass of nn.Module, or a "
            f"sequence of such classes, got {choice!r}"
        )
    return choice
