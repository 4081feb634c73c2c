"""A real step whose activations leave the device, under a ledger."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from memopt._offload import offload, offload_stats
from memopt.memory.ledger import Ledger
from memopt.memory.pieces import ACTIVATIONS, OFFLOADED
from memopt.memory.places import NOWHERE
from memopt.memory.step import Step
from memopt.place import check_is_elsewhere, directory_of
from memopt.whatif.fates import Fates


def check_place(fates: Fates, device: str) -> None:
    """Raises ValueError where a real step has nowhere to offload to."""
    if fates.checkpoint in ("sqrt", "optimal"):
        raise ValueError(
            f'{fates.who}: measure with offload must have checkpoint=None, "all" or a number, got '
            f'"{fates.checkpoint}", whose regions keep their inputs'
        )
    if device == "cpu":
        check_is_elsewhere(fates.who, fates.offload)
    directory_of(f"{fates.who}: offload", fates.offload)


def apply_fates(step: Step, fates: Fates) -> None:
    """Put fates on the model of a real step. Activations leave in the step's context; of regions
    their inputs.
    """
    fates.put_on(step.model, fates.offload)
    if fates.offload is not None and fates.checkpoint is None:
        step.context = partial(offload, fates.offload)


class OffloadLedger(Ledger):
    """Forward ends when what leaves has left. What comes back counts from the first operator that
    reads it: no operator makes it. (It may be there earlier, by the copies that are under way.)
    """

    def end_of_forward(self, loss: Tensor) -> None:
        offload_stats(wait=True)
        super().end_of_forward(loss)

    def _find(self, tensor: Tensor) -> None:
        if self.phase != "backward":
            super()._find(tensor)
            return
        for piece in self._note(tensor, "offload", self.phase, NOWHERE):
            piece.category, piece.fate = ACTIVATIONS, OFFLOADED
