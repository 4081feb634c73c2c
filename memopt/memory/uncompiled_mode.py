"""The dispatch mode of all that watches operators one by one."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from memopt._compat import CompilerOff


class UncompiledMode(TorchDispatchMode):
    """A dispatch mode under which nothing is compiled, so that it sees the operators of compiled
    code as well. Without that, a function that torch.compile meets under a mode would never be
    compiled again in this process, for any model that has it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compilers: list[CompilerOff] = []

    def __enter__(self) -> Any:
        self._compilers.append(CompilerOff())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._compilers.pop().end()
