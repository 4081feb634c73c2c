"""The checkpointed regions that convert makes: which modules they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from memopt._checkpoint.assigned import put_regions, region_choices
from memopt._checkpoint.caches import note_on_caches
from memopt._checkpoint.chosen_modules import (
    Modules,
    as_predicate,
    choose_modules,
    modules_in_chunks,
)
from memopt._checkpoint.chunks import checked_chunks
from memopt._checkpoint.naming import joined
from memopt._checkpoint.other import layers_that_checkpoint, notes_on_own
from memopt._checkpoint.settings import fate_of_arguments
from memopt._checkpoint.wrapper import settings_of
from memopt._convert.swap import swap_of
from memopt.assignment import Assignment, Choice, Paths
from memopt.memory.calls.measure import step_with
from memopt.memory.step import Step, StepFunction
from memopt.place import Place


class Regions:
    """The submodules that become regions: convert's arguments `checkpoint`, `offload`, `chunks`."""

    notes: tuple[str, ...] = ()
    """Notes for the report, once the regions are put on a model."""

    def __init__(
        self,
        checkpoint: Modules | bool | None,
        offload: Place | None,
        chunks: int | None = None,
        step: StepFunction = None,
    ) -> None:
        fate_of_arguments("convert: offload", offload)
        self.place, self._step = offload, step
        self._are_wanted = bool(offload) if checkpoint is None or checkpoint is False else True
        self._predicate = (
            None
            if checkpoint is None or isinstance(checkpoint, bool)
            else as_predicate("convert: checkpoint", checkpoint)
        )
        self.chunks = checked_chunks("convert", chunks)

    def put(self, model: nn.Module, recipes: bool, batch: Any = None) -> Assignment:
        """Make the chosen modules regions. Each knows what it was before, for `revert_region`.

        Args:
            batch: modules are chosen by what a step with it keeps; those that cannot run again as
                they did are left out.
            recipes: they will be on. Modules that are one op of memopt's are not wrapped then: they
                save their input, as a region does, but what a region returns has no recipe.

        Returns:
            What was put on the model.
        """
        chosen: dict[str, nn.Module] = {}
        notes: dict[str, None] = {}
        deciding: Collection[str] = ()
        segments: Sequence[Paths] = ()
        step = step_with("convert", model, batch, self._step)
        if self._are_wanted:
            found = choose_modules(step, self._predicate)
            chosen, deciding = dict(found.modules), found.deciding
            segments = found.segments
            notes |= dict.fromkeys((*found.warnings, *found.notes))
        if recipes and self.place is None:
            cheaper = [path for path, module in chosen.items() if _is_one_op(module)]
            if cheaper:
                notes[f"no regions, since recipes keep less: {joined(cheaper)}"] = None
                chosen = {path: each for path, each in chosen.items() if path not in cheaper}
                segments = [one for one in segments if not {*one}.intersection(cheaper)]
        fate = Choice(checkpoint=True, offload=float(self.place is not None))
        choices = {
            at: replace(fate, keep_decisions=at[0] in deciding)
            for at in region_choices(chosen, () if self.chunks else segments)
        }
        if keeping := [path for path in chosen if path in deciding]:
            notes[f"what these choose by values is kept from forward: {joined(keeping)}"] = None
        if self.chunks is not None:
            in_chunks, told = self._in_chunks(step, self.chunks, list(chosen))
            notes |= dict.fromkeys(told)
            for path, count in in_chunks.items():
                before = choices.get((path,), fate)
                choices[path,] = replace(before, chunks=count)
                chosen.setdefault(path, model.get_submodule(path))
        assignment = Assignment(choices, self.place)
        for region in put_regions(model, assignment):
            region.note()
        regions = list(chosen.values())
        notes[note_on_caches(model, regions)] = None
        if batch is None or layers_that_checkpoint(model):
            notes |= dict.fromkeys(notes_on_own(model, regions))
        self.notes = tuple(filter(None, notes))
        return assignment

    def _in_chunks(
        self, step: Step, chunks: int, regions: list[str]
    ) -> tuple[dict[str, int], list[str]]:
        """The modules that run in chunks, by path, and notes."""
        predicate = self._predicate
        if predicate is not None:
            regions = [path for path in regions if predicate(step.model.get_submodule(path))]
        elif step.batch is None:
            raise ValueError(
                "convert: chunks needs a batch, to find the modules that work on each row alone, "
                f"or a checkpoint that chooses them, got chunks={chunks!r} and neither"
            )
        return modules_in_chunks(step, chunks, regions, predicate)


def _is_one_op(module: nn.Module) -> bool:
    swap = swap_of(module)
    return swap is not None and swap.is_one_op and settings_of(module) is None
