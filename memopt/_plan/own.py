"""Finds what a model brings that a plan would choose: regions, converted modules, checkpointing of
its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from memopt._call_hooks import has_around_calls
from memopt._checkpoint.other import says_that_it_checkpoints
from memopt._class_patch import SwappedModule
from memopt._forwards import around_forward
from memopt._plan.watch import Watch
from memopt.memory.paths import outermost_paths

_TURN_OFF = (
    "turn that off first (transformers and diffusers: model.gradient_checkpointing_disable() or "
    "disable_gradient_checkpointing(); else the option of the model, or the wrapper, that calls "
    "torch.utils.checkpoint). Blocks that an autograd.Function of the model's own recomputes, as "
    "reversible ones, leave a plan nothing to choose"
)
_UNDO = "memopt.revert(model) and memopt.unwrap(model) undo these, plan.undo() a plan"


def check_is_plain(who: str, model: nn.Module) -> None:
    """Raises ValueError, in the name of the function `who`, where regions, a conversion or a plan
    are on a model, or where it says that its own gradient checkpointing is. (What says nothing is
    found when it runs: see `check_runs_once`.)
    """
    for path, module in model.named_modules():
        if module.training and says_that_it_checkpoints(module):
            raise ValueError(
                f"{who}: model must not recompute its blocks in backward by itself, since a plan "
                f"chooses which do, got checkpointing of its own in {type(module).__name__}; "
                f"{_TURN_OFF}"
            )
        wrapped = isinstance(module, SwappedModule) or around_forward(module) is not None
        if wrapped or has_around_calls(module):
            where = f" at {path!r}" if path else ""
            raise ValueError(
                f"{who}: model must be without regions and not converted, since a plan chooses "
                f"both, got {type(module).__name__}{where}; {_UNDO}"
            )


def check_runs_once(watch: Watch[Any]) -> None:
    """Raises ValueError where the model's own checkpointing recomputes blocks in backward."""
    modules = dict(watch.model.named_modules())
    mine = [path for path in watch.paths if _runs_again(modules[path], watch.again)]
    if mine:
        raise ValueError(
            "plan: model must not recompute its blocks in backward by itself, since a plan "
            f"chooses them, got checkpointing of its own around {_listed(mine)}; {_TURN_OFF}"
        )


def again_in(watch: Watch[Any]) -> tuple[str, ...]:
    """Paths of the modules, none inside another of them, that the model itself recomputes in
    backward.
    """
    paths = [path for path, module in watch.model.named_modules() if module in watch.again]
    return tuple(outermost_paths(paths))


def note_on(again: Sequence[str]) -> str:
    """A note for a plan of a model whose own checkpointing runs parts of blocks, or others."""
    return (
        f"the model's own checkpointing recomputes {_listed(again)} in backward, with this plan as "
        "without it: it counts in both peaks"
    )


def _runs_again(block: nn.Module, again: Collection[nn.Module]) -> bool:
    """Whether all of the block does: itself, or every module in it that has parameters."""
    parts = [child for child in block.children() if next(child.parameters(), None) is not None]
    return block in again or (bool(parts) and all(part in again for part in parts))


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths) if len(paths) <= 3 else f"{paths[0]}, ..., {paths[-1]}"
