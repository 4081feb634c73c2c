"""Counts the bytes that autograd keeps for backward.

    with SavedTensors(exclude=module.parameters()) as saved:
        output = module(input)
    saved.bytes

Memory is counted by storage: a tensor that is saved twice, or two views of it, cost its memory
once, and a view keeps all of the memory that it looks into. Parameters are alive anyway and can be
excluded.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor


class SavedTensors:
    """Records every tensor that is saved for backward while it is entered."""

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self.tensors: list[Tensor] = []
        self._excluded = {t.untyped_storage().data_ptr() for t in exclude}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._record, lambda t: t)

    def _record(self, tensor: Tensor) -> Tensor:
        # A detached alias: it keeps the storage, so that its address names it, without keeping the
        # graph.
        if tensor.untyped_storage().data_ptr() not in self._excluded:
            self.tensors.append(tensor.detach())
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes of the distinct storages that the recorded tensors look into."""
        return sum(self.storage_bytes)

    @property
    def storage_bytes(self) -> list[int]:
        """The same, storage by storage."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.tensors}
        return [storage.nbytes() for storage in storages.values()]

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
