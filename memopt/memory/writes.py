"""Modes that see which storages are written, before they are: by operators, or by what is given
their memory.

They are on only where nothing is measured that a mode would change: under one of dispatch, memopt's
ops write over nothing (csrc/autograd/ownership.h), and each operator takes some ten microseconds
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.memory.storages import storages_of, tensors_in


class Writes(TorchDispatchMode):
    """Tells of tensors that no operator inside it made.

    Args:
        read: is called with each that an operator reads.
        written: is called with each that an operator is about to write.
    """

    supports_higher_order_operators = True

    def __init__(self, read: Callable[[Tensor], None], written: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = read
        self._written = written
        self._made: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs compiled under this mode: that is how it is to be measured."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tensors_in((args, kwargs)) if not self._is_made(t)]
        for tensor in given:
            self._read(tensor)
        if given:
            for tensor in written_by(func, args, kwargs):
                if not self._is_made(tensor):
                    self._written(tensor)
        result = func(*args, **kwargs)
        known = {storage._cdata for tensor in given for storage in storages_of(tensor)}
        for tensor in tensors_in(result):
            self._made.update({s._cdata for s in storages_of(tensor)} - known)
        return result

    def _is_made(self, tensor: Tensor) -> bool:
        return all(storage._cdata in self._made for storage in storages_of(tensor))


class Exports(TorchFunctionMode):
    """Tells of tensors on the CPU whose memory is given to what is no operator: NumPy, a C library.

    Args:
        exported: is called with each, before.
    """

    def __init__(self, exported: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._exported = exported

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _EXPORTS and args[0].device.type == "cpu":
            self._exported(args[0])
        return func(*args, **(kwargs or {}))


_EXPORTS = frozenset((Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    places = _written_places(func)
    if places is None:
        yield from tensors_in((args, kwargs))
        return
    for place, name in places:
        yield from tensors_in(args[place] if place < len(args) else kwargs.get(name))


@lru_cache(maxsize=4096)
def _written_places(func: Any) -> tuple[tuple[int, str], ...] | None:
    """Places and names of the arguments that an operator writes; None: any of them."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # of a higher order: one around a Triton kernel writes what it is given
        return None if "mutation" in str(func) else ()
    name = func.overloadpacket.__name__
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (argument.name in _SILENT and not name.endswith("backward"))
    )


# Arguments that kernels write though some schemas do not say so: batch norm's statistics, the noise
# of a leaky ReLU.
_SILENT = frozenset(("running_mean", "running_var", "noise"))
