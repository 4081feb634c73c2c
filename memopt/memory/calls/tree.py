"""The calls of a step's modules, as a tree, and the storages that they keep and pass on."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_INSIDE = 0.25
"""A share of the bytes that a call returns."""


@dataclass(frozen=True)
class HeldStorage:
    """A storage that forward made, and that a call gets, returns or keeps for backward."""

    nbytes: int
    maker: int
    """The number of the innermost call that ran when an operator made it."""
    savers: tuple[int, ...]
    """The innermost calls whose operators keep it for backward until forward has ended, each once;
    empty: none does."""
    home: int
    """The innermost call in which it was made and all its savers are. A region around that call
    drops it. Without one it stays: every saver is outside of regions, or gets it as an argument."""


@dataclass(frozen=True)
class ModuleCall:
    """One forward of a module, and its backward. Bytes are those of whole storages."""

    path: str
    """The module's path; empty for the model itself and for the step."""
    parent: int
    """The number of the call around it; -1 for the step."""
    with_gradients: bool
    inputs: tuple[int, ...]
    """The numbers of the storages behind its arguments that forward made."""
    outputs: tuple[int, ...]
    """Likewise of what it returns."""
    input_bytes: int
    """The bytes of all its arguments, also of those from before the step."""
    output_bytes: int
    own_bytes: int
    """Kept for backward, and at home in this call."""
    kept_bytes: int
    """Bytes as in `own_bytes`, with those of the calls inside."""
    forward: int
    """The most in its forward, above what was there when it began."""
    backward: int
    """The most in its backward, above what was there when its forward began, without gradients of
    parameters; 0 where it has none."""
    flops: int
    nbytes: int
    """Work of its forward, with the calls inside: see memopt/memory/work.py."""
    operators: int
    """The number of operators of that work."""
    returns_view: bool
    """Whether it returns a view of an argument that is another tensor."""
    writes_inputs: bool
    """Whether it writes to an argument in place."""
    inputs_written: bool
    """Whether an argument is written in place after it, in forward."""

    @property
    def keeps_inside(self) -> bool:
        """Whether it keeps more than a share of what it returns: else to recompute it, or to run it
        in chunks, gives next to nothing.
        """
        return self.kept_bytes > _LEAST_INSIDE * self.output_bytes


@dataclass(frozen=True)
class CallTree:
    """A step's calls in the order in which they began. Number 0 is the step, with all around the
    calls: the loss and its like.
    """

    calls: tuple[ModuleCall, ...]
    storages: tuple[HeldStorage, ...]
    peak: int
    """The most bytes of forward and backward, above what was there before."""
    again: tuple[str, ...]
    """Modules that backward calls outside of regions: the model checkpoints them itself."""
    margin: int = 0
    """Bytes of the peak that may not be allocated: a kernel's scratch that has only a bound."""

    @property
    def kept_bytes(self) -> int:
        """Held for backward when forward has ended."""
        return self.calls[0].kept_bytes

    @property
    def with_gradients(self) -> set[str]:
        """The paths of modules that have a call with gradients enabled."""
        return {call.path for call in self.calls if call.with_gradients}

    def calls_of(self, path: str) -> tuple[int, ...]:
        """The numbers of a module's calls."""
        return tuple(number for number, call in enumerate(self.calls) if call.path == path)
