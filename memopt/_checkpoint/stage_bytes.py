"""Bytes that each stage of a chain saves for backward, counted while the stages run as regions."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from memopt._checkpoint.segments import least_peak_segments
from memopt._extension import _C
from memopt.memory.storages import storages


class SavedInStage:
    """Counts storages, each whole and once, without the parameters and buffers of the stages.

    This is no `memopt.saved_bytes` of each stage: the stages run as regions, which drop what they
    save, and the storages that several stages share decide which of them to join.
    """

    def __init__(self, stages: Iterable[object]) -> None:
        constant = [
            tensor
            for module in _C.modules_reached(*stages)
            for tensor in (*module.parameters(), *module.buffers())
        ]
        self._constant = set(storages(constant))
        self._inputs: list[dict[Hashable, int]] = []
        self._saved: list[dict[Hashable, int]] = []

    def begin_stage(self, *arguments: Any) -> None:
        """Counts what is saved from now on for the next stage, which gets these arguments."""
        self._inputs.append(self._variable(pytree.tree_leaves(arguments)))
        self._saved.append({})

    def add_saved(self, tensor: Tensor) -> None:
        """The present stage saves `tensor`."""
        self._saved[-1].update(self._variable([tensor]))

    def least_peak_segments(self) -> list[int] | None:
        """The partition with the least peak; None if no stage saved anything."""
        if not any(self._saved):
            return None
        return least_peak_segments(
            [self._running_union(start, self._inputs[start]) for start in range(len(self._saved))],
            [self._running_union(start, ())[-1] for start in range(len(self._saved))],
            [sum(storages.values()) for storages in self._inputs],
        )

    def _running_union(self, start: int, without: Iterable[Hashable]) -> list[int]:
        """Bytes kept by the stage `start` alone, by it and the next one, and so on."""
        seen = set(without)
        total = 0
        totals = []
        for saved in self._saved[start:]:
            total += sum(size for storage, size in saved.items() if storage not in seen)
            seen.update(saved)
            totals.append(total)
        return totals

    def _variable(self, values: Iterable[object]) -> dict[Hashable, int]:
        found: dict[Hashable, int] = {}
        for tensor in (value for value in values if isinstance(value, Tensor)):
            if tensor.layout is torch.strided:
                found |= storages([tensor])
            else:  # sparse: its dense size is what its gradients may take, counted each time
                found[object()] = tensor.numel() * tensor.element_size()
        return {s: size for s, size in found.items() if s not in self._constant}
