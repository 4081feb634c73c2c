"""The checkpointed regions that convert makes, and their undoing."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from memopt._checkpoint.apply import Choice, as_predicate, choose_modules
from memopt._checkpoint.caches import note_on_caches
from memopt._checkpoint.naming import joined
from memopt._checkpoint.other import notes_on_own
from memopt._checkpoint.probe import cannot_run_again, left_out
from memopt._checkpoint.wrapper import (
    Settings,
    checkpoint_wrapper,
    settings_of,
    unwrap_itself,
)
from memopt._convert.swap import swap_of

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

    def apply(
        self, model: nn.Module, recipes: bool, run: Callable[[], object] | None = None
    ) -> None:
        """Wrap the chosen modules, and note on each what it was before.

        Args:
            run: a forward of the model on a sample, by which modules are found that cannot run
                again as they did, and are left out.
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
        if run is not None and chosen:
            modules = {path: module for path, (module, _) in chosen.items()}
            if reasons := cannot_run_again(model, run, modules):
                notes[left_out(reasons)] = None
                chosen = {path: each for path, each in chosen.items() if path not in reasons}
        for module, to_cpu in chosen.values():
            before = settings_of(module)
            checkpoint_wrapper(module, to_cpu)
            module.__dict__.setdefault(_SETTINGS_BEFORE, before)
        self.checkpointed = tuple(path for path, (_, to_cpu) in chosen.items() if not to_cpu)
        self.offloaded = tuple(path for path, (_, to_cpu) in chosen.items() if to_cpu)
        regions = [module for module, _ in chosen.values()]
        notes[note_on_caches(model, regions)] = None
        if run is None:
            notes |= dict.fromkeys(notes_on_own(model, regions))
        self.notes = tuple(filter(None, notes))


def _is_one_op(module: nn.Module) -> bool:
    swap = swap_of(module)
    return swap is not None and swap.is_one_op and settings_of(module) is None


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
            preserve_rng_state=settings.preserve_rng_state,
            early_stop=settings.early_stop,
        )
    elif settings_of(module) is not None:  # else it was unwrapped since
        unwrap_itself(module)


def forget_settings(module: nn.Module, settings: Settings | None) -> None:
    """If `revert_region` would give `module` these settings again, it will give it none: whoever
    put them there takes them off.
    """
    if settings is not None and module.__dict__.get(_SETTINGS_BEFORE) is settings:
        module.__dict__[_SETTINGS_BEFORE] = None
