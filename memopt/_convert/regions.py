"""The checkpointed regions that convert makes: which modules they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from memopt._checkpoint.apply import Modules, as_predicate, choose_modules, modules_in_chunks
from memopt._checkpoint.assigned import put_regions
from memopt._checkpoint.caches import note_on_caches
from memopt._checkpoint.chunks import checked_chunks
from memopt._checkpoint.naming import joined
from memopt._checkpoint.other import notes_on_own
from memopt._checkpoint.wrapper import settings_of
from memopt._convert.swap import swap_of
from memopt.assignment import Assignment, Choice


class Regions:
    """The submodules that become regions: convert's arguments `checkpoint` and `offload`."""

    notes: tuple[str, ...] = ()
    """Notes for the report, once the regions are put on a model."""

    def __init__(
        self,
        checkpoint: Modules | bool | None,
        offload: Modules | bool | None,
        chunks: int | None = None,
    ) -> None:
        self._choices = [
            (to_cpu, None if choice is True else as_predicate(f"convert: {name}", choice))
            for name, choice, to_cpu in (
                ("checkpoint", checkpoint, False),
                ("offload", offload, True),
            )
            if choice is not None and choice is not False
        ]
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
        chosen: dict[str, tuple[nn.Module, bool]] = {}
        notes: dict[str, None] = {}
        deciding: set[str] = set()
        for to_cpu, predicate in self._choices:
            found = choose_modules("convert", model, predicate, batch)
            chosen |= {path: (module, to_cpu) for path, module in found.modules}
            notes |= dict.fromkeys((*found.warnings, *found.notes))
            deciding |= found.deciding
        cheaper = [
            path
            for path, (module, to_cpu) in chosen.items()
            if recipes and not to_cpu and _is_one_op(module)
        ]
        if cheaper:
            notes[f"no regions, since recipes keep less: {joined(cheaper)}"] = None
            chosen = {path: each for path, each in chosen.items() if path not in set(cheaper)}
        choices = {
            path: Choice(checkpoint=True, offload=to_cpu, keep_decisions=path in deciding)
            for path, (_, to_cpu) in chosen.items()
        }
        if keeping := [path for path in choices if path in deciding]:
            notes[f"what these choose by values is kept from forward: {joined(keeping)}"] = None
        if self.chunks is not None:
            in_chunks, told = self._in_chunks(model, self.chunks, list(choices), batch)
            notes |= dict.fromkeys(told)
            for path, count in in_chunks.items():
                before = choices.get(path, Choice(checkpoint=True))
                choices[path] = replace(before, chunks=count)
                chosen.setdefault(path, (model.get_submodule(path), False))
        assignment = Assignment(choices, "cpu")
        for region in put_regions(model, assignment):
            region.note()
        regions = [module for module, _ in chosen.values()]
        notes[note_on_caches(model, regions)] = None
        if batch is None:
            notes |= dict.fromkeys(notes_on_own(model, regions))
        self.notes = tuple(filter(None, notes))
        return assignment

    def _in_chunks(
        self, model: nn.Module, chunks: int, regions: list[str], batch: Any
    ) -> tuple[dict[str, int], list[str]]:
        """The modules that run in chunks, by path, and notes."""
        predicate = next((p for to_cpu, p in self._choices if not to_cpu), None)
        if predicate is not None:
            mine = [path for path in regions if predicate(model.get_submodule(path))]
            return modules_in_chunks("convert", model, chunks, mine, predicate, batch)
        if batch is None:
            raise ValueError(
                "convert: chunks needs a batch, to find the modules that work on each row alone, "
                f"or a checkpoint that chooses them, got chunks={chunks!r} and neither"
            )
        return modules_in_chunks("convert", model, chunks, regions, None, batch)


def _is_one_op(module: nn.Module) -> bool:
    swap = swap_of(module)
    return swap is not None and swap.is_one_op and settings_of(module) is None
