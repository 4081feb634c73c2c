"""The operators that a call runs for so many rows.

A module may do something else for many rows than for the few of a probe: attention in windows adds
nothing below the length of a window. Its code asks for a size, so that other operators run. Here
they are counted on tensors that have sizes and no memory (FakeTensorMode), for any number of rows.
So are slices of what is no argument of rows, with their sizes: the places of a table of positions
are found by how many it takes of it, whatever is in the table now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memopt._checkpoint.chunks import CallRows

_SLICES = frozenset(("slice", "narrow", "split", "split_with_sizes", "as_strided"))

# Copies and their like: whether one is made depends on strides, and what is computed does not.
_COPIES = frozenset(
    (
        "_to_copy",
        "clone",
        "copy_",
        "empty",
        "empty_like",
        "empty_strided",
        "lift_fresh",
        "_unsafe_view",
    )
)


def other_operators(
    fn: Callable[..., Any],
    rows: CallRows,
    sizes: tuple[int, ...],
    others: Iterable[tuple[int, ...]],
) -> str:
    """Name what a call runs for rows of these sizes and not for one of the others, or the other way
    around; empty if nothing, or if it cannot be known since the call looks at values.

    Args:
        sizes, others: each as many as `rows.row_sizes`.
    """
    some = _operators(fn, rows, sizes)
    if some is None:
        return ""
    for other in others:
        more = _operators(fn, rows, other)
        if more is not None and some != more:
            names = ", ".join(sorted((some - more) | (more - some)))
            return f"for rows of {list(other)} it runs others ({names}) than for {list(sizes)}"
    return ""


def _operators(
    fn: Callable[..., Any], rows: CallRows, sizes: tuple[int, ...]
) -> Counter[str] | None:
    """How often each operator runs in a forward; None where that depends on values."""
    dims, counts = len(rows.row_sizes), _Counts()
    with _no_memory(), torch.no_grad():
        args, kwargs = rows.call_with(
            lambda leaf: torch.empty(
                (*sizes, *leaf.shape[dims:]), dtype=leaf.dtype, device=leaf.device
            )
        )
        try:
            with counts:
                fn(*args, **kwargs)
        except Exception:  # also its own: what it says of such sizes it says when it is called
            return None
    return counts.found


@contextmanager
def _no_memory() -> Iterator[None]:
    """Enter PyTorch's mode for tensors without memory. It lies in a cycle, and its converter has
    weak references to the parameters that it met: until the collector runs these could not be
    swapped (torch.utils.swap_tensors).
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            yield
    finally:
        del mode.fake_tensor_converter


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self._from_outside: dict[int, Tensor] = {}
        """Views of tensors that are no rows, which are kept so that no other one gets their id."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and func.namespace != "prim" and name not in _COPIES:
            self.found[name] += 1
        result = func(*args, **(kwargs or {}))
        if func.is_view and self._is_from_outside(args[0]):
            for view in result if isinstance(result, (list, tuple)) else [result]:
                self._from_outside[id(view)] = view
                if name in _SLICES:
                    self.found[f"{name} to {list(view.shape)}"] += 1
        return result

    def _is_from_outside(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and (
            id(tensor) in self._from_outside or not isinstance(tensor, FakeTensor)
        )
