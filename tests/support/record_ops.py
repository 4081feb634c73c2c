"""Records which dispatcher ops run below autograd, with their positional arguments."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class RecordOps(TorchDispatchMode):
    """While entered, appends (op, positional arguments) to `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def ops(self) -> list[Any]:
        """The ops alone, in order."""
        return [op for op, _ in self.calls]
