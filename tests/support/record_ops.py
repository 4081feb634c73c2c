"""Records which dispatcher ops run below autograd, with their positional arguments."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class RecordOps(TorchDispatchMode):
    """While entered, appends (op, positional arguments) to `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self._keywords: list[dict[str, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls.append((func, args))
        self._keywords.append(kwargs or {})
        return func(*args, **(kwargs or {}))

    def arguments_of(self, op: Any) -> list[dict[str, Any]]:
        """All arguments that were given at each call of `op`, by name."""
        names = [argument.name for argument in op._schema.arguments]
        return [
            {**dict(zip(names, args, strict=False)), **keywords}
            for (called, args), keywords in zip(self.calls, self._keywords, strict=True)
            if called == op
        ]

    @property
    def ops(self) -> list[Any]:
        """The ops alone, in order."""
        return [op for op, _ in self.calls]
