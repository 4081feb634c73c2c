"""Counts the bytes that ops' results take at one time.

    with LiveBytes() as live:
        output.backward()
    live.most

Memory is counted by storage, from the op that returned it until nobody holds it. What is inside a
kernel (a workspace) is not seen; what was there before counts for nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, int] = {}
        self._number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in before:
                self._add(tensor)
        self.most = max(self.most, sum(self._live.values()))
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._number += 1
        self._live[self._number] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, self._number, None)
