"""The checkpointed regions that convert makes, and their undoing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from memopt.checkpoint.apply import Choice, as_predicate, choose_modules
from memopt.checkpoint.caches import checkpoints_itself, note_on_caches
from memopt.checkpoint.wrapper import (
    check_can_unwrap,
    checkpoint_wrapper,
    settings_of,
    unwrap_itself,
)
from memopt.convert.report import joined
from memopt.convert.swap import swap_of

# On a module that convert made a checkpointed region: the settings it had before, or None.
_SETTINGS_BEFORE = "_memopt_convert_settings_before"


class Regions:
    """Which submodules become regions: convert's arguments `checkpoint` and `offload`."""

    checkpointed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    """Paths, once they are applied. A module is in one of them."""

    notes: tuple[str, ...] = ()
    """What the report says about them."""

    def __init__(self, checkpoint: Choice | bool | None, offload: Choice | bool | None) -> None:
        self._choices = [
            (to_cpu, None if choice is True else as_predicate(f"convert: {name}", choice))
            for name, choice, to_cpu in (
                ("checkpoint", checkpoint, False),
                ("offload", offload, True),
            )
            if choice is not None and choice is not False
        ]

    def __bool__(self) -> bool:
        return bool(self.checkpointed or self.offloaded)

    def apply(self, model: nn.Module, recipes: bool) -> None:
        """Wrap the chosen modules, and note on each what it was before.

        Args:
            recipes: they will be on. Modules that are one op of memopt's are not wrapped then: they
                save their input, as a region does, but what a region returns has no recipe.
        """
        chosen: dict[str, tuple[nn.Module, bool]] = {}
        notes: dict[str, None] = {}
        for to_cpu, predicate in self._choices:
            candidates, note = choose_modules(model, predicate)
            chosen |= {path: (module, to_cpu) for path, module in candidates}
            notes[note] = None
        cheaper = [
            path
            for path, (module, to_cpu) in chosen.items()
            if recipes and not to_cpu and _is_one_op(module)
        ]
        if cheaper:
            notes[f"no regions, since recipes keep less: {joined(cheaper)}"] = None
            chosen = {path: each for path, each in chosen.items() if path not in set(cheaper)}
        for module, to_cpu in chosen.values():
            before = settings_of(module)
            checkpoint_wrapper(module, to_cpu)
            module.__dict__.setdefault(_SETTINGS_BEFORE, before)
        self.checkpointed = tuple(path for path, (_, to_cpu) in chosen.items() if not to_cpu)
        self.offloaded = tuple(path for path, (_, to_cpu) in chosen.items() if to_cpu)
        regions = [module for module, _ in chosen.values()]
        notes[note_on_caches(model, regions)] = None
        notes |= dict.fromkeys(_notes_on_own_checkpointing(model, regions))
        self.notes = tuple(filter(None, notes))


def _is_one_op(module: nn.Module) -> bool:
    swap = swap_of(module)
    return swap is not None and swap.is_one_op and settings_of(module) is None


def _notes_on_own_checkpointing(model: nn.Module, regions: Sequence[nn.Module]) -> Iterator[str]:
    """What becomes of gradient checkpointing that the model has turned on itself."""
    paths = {module: path for path, module in model.named_modules()}
    on = [m for m in paths if m.__dict__.get("gradient_checkpointing") is True]
    replaced = [paths[m] for m in regions if checkpoints_itself(m) and m in on]
    if replaced:
        yield (
            "the regions take the place of transformers' gradient checkpointing, which is on in "
            f"the model: {joined(replaced)}"
        )
    inside = {each for m in regions for each in m.modules() if each is not m}
    twice = [paths[m] for m in on if checkpoints_itself(m) and m in inside]
    if twice:
        yield (
            "transformers' gradient checkpointing is on inside regions, and backward runs its "
            f"layers again twice: {joined(twice)}"
        )
    # A model of diffusers runs blocks under a checkpoint, and these cannot tell.
    below = {each for m in on for each in m.modules() if each is not m}
    idle = [paths[m] for m in regions if m in below and not checkpoints_itself(m)]
    if idle:
        yield (
            "the model's own gradient checkpointing is on, and where it runs a region there is "
            f"nothing left for that to save: {joined(idle)}"
        )


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
        checkpoint_wrapper(
            module,
            False,
            settings.maintain_forward_counter,
            offload=settings.offload,
            partition=settings.partition,
        )
    elif settings_of(module) is not None:  # else it was unwrapped since
        unwrap_itself(module)
