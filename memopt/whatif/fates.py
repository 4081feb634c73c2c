"""Courses that a step might take: other fates, another device, another optimizer.

All are applied to copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from memopt._checkpoint import apply_activation_checkpointing, checkpoint_sequential
from memopt._checkpoint.blocks import find_blocks
from memopt._convert import convert
from memopt._errors import in_the_name_of
from memopt.memory.depth import Depth
from memopt.memory.ledger import Ledger
from memopt.memory.pieces import ACTIVATIONS, OFFLOADED, REGION_INPUT, Entry, Piece
from memopt.memory.predicted.predict import predict
from memopt.memory.step import Step
from memopt.memory.trace import Trace, trace_of

Checkpoint = Literal["all", "sqrt", "optimal"] | int | None


@dataclass(frozen=True)
class Fates:
    """What becomes of the activations."""

    recipes: bool = False
    """memopt.convert: what norms, activations and dropouts return is made again."""
    checkpoint: Checkpoint = None
    """Blocks as regions: "all"; every k-th of them; of a model whose blocks are in an nn.Sequential
    also "sqrt" and "optimal", as memopt.checkpoint_sequential. (A forward that loops over its
    blocks calls them one by one, and each can only be a region of its own.)"""
    offload: bool = False
    """What is held for backward is on the host between its last use in forward and its first in
    backward: with `checkpoint` the regions' inputs, else all of it but the last."""
    offload_min_bytes: int = 64 * 1024
    keep_last: int = 1
    who: str = field(kw_only=True)
    """The function that the user called, for messages."""

    def apply(self, model: nn.Module) -> None:
        """Change a model in place, but for offloading.

        Raises:
            ValueError, TypeError: `checkpoint` is no such thing, or the model has no blocks for it.
        """
        with in_the_name_of(
            self.who, "convert", "apply_activation_checkpointing", "checkpoint_wrapper"
        ):
            if self.recipes:
                convert(model)
            if self.checkpoint in ("sqrt", "optimal"):
                _segment(model, str(self.checkpoint), self.who)
            elif self.checkpoint is not None:
                every = self._every()
                if not find_blocks(model).modules:
                    raise ValueError(
                        f"{self.who}: checkpoint={self.checkpoint!r} must have a model with blocks "
                        "(an nn.ModuleList, nn.Sequential or nn.ModuleDict of modules of one "
                        f"class), got {type(model).__name__} without"
                    )
                apply_activation_checkpointing(model, every=every)

    def _every(self) -> int:
        """The first of how many blocks is a region."""
        every = 1 if self.checkpoint == "all" else self.checkpoint
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f'{self.who}: checkpoint must be "all", "sqrt", "optimal", a number k of at least '
                f"1 for every k-th block, or None, got {self.checkpoint!r}"
            )
        return every

    def __str__(self) -> str:
        words = ["recipes"] if self.recipes else []
        if self.checkpoint is not None:
            words.append(f"checkpoint={self.checkpoint}")
        words += ["offload"] if self.offload else []
        return ", ".join(words) or "plain"


def _segment(model: nn.Module, segments: str, who: str) -> None:
    """The nn.Sequential with most blocks runs in segments that are regions.

    A region of several blocks is a call of them in turn. Where a model's own forward loops over its
    blocks there is no such call, and what it does between them is nobody's to repeat.
    """
    blocks = find_blocks(model).modules
    chains = [m for m in model.modules() if isinstance(m, nn.Sequential) and len(m) > 2]
    if not chains or (blocks and not any(blocks.intersection(chain) for chain in chains)):
        path = next((name for name, m in model.named_modules() if m in blocks), "")
        where = f", whose {len(blocks)} blocks are called one by one ({path} first)"
        raise ValueError(
            f'{who}: checkpoint="{segments}" must have a model whose blocks are in an '
            f"nn.Sequential, got {type(model).__name__} without one{where if blocks else ''}: only "
            'an nn.Sequential calls several as one; checkpoint="all" or a number k fits'
        )
    chain = max(chains, key=lambda chain: (len(blocks.intersection(chain)), len(chain)))
    chain.forward = _Segments(chain, segments)  # type: ignore[method-assign]


class _Segments:
    """The forward of a chain."""

    def __init__(self, chain: nn.Sequential, segments: str) -> None:
        self._stages = list(chain)
        self._segments = segments

    def __call__(self, input: Any) -> Any:
        return checkpoint_sequential(self._stages, self._segments, input)


def predicted_trace(
    step: Step, fates: Fates, target: str, depth: Depth | None = None
) -> tuple[Trace, Ledger]:
    """The memory of a step with these fates, predicted; and its ledger.

    Args:
        target: "cpu" or "cuda".
        depth: of other looks at this step.

    Raises:
        DependsOnValues: the step looks at values.
    """
    ledger, seconds, *_ = predict(step, fates, target, depth)
    entries = offloaded(ledger, fates) if fates.offload else None
    return trace_of(ledger, seconds, entries), ledger


def offloaded(ledger: Ledger, fates: Fates) -> list[Entry]:
    """The log as it would be if activations left the device after their last use in forward.

    The copies count as done at once, and back when they are wanted: a few tensors that are under
    way (memopt.offload.configure) come on top.
    """
    leaves = [
        piece
        for piece in ledger.pieces
        if piece.category == ACTIVATIONS and piece.phase == "forward" and _leaves(piece, fates)
    ]
    if fates.checkpoint is None and fates.keep_last:
        leaves = leaves[: -fates.keep_last]
    log = list(ledger.log)
    for piece in leaves:
        piece.fate = OFFLOADED
        back = piece.died if piece.first_in_backward is None else piece.first_in_backward
        assert back is not None  # else it does not leave
        log.append(Entry(max(piece.last_in_forward, piece.born), -1, piece))
        log.append(Entry(back, 1, piece))
    # In each instant first what comes, then what goes: an operator's arguments are still there.
    return sorted(log, key=lambda entry: (entry.instant, -entry.sign))


def _leaves(piece: Piece, fates: Fates) -> bool:
    """memopt.offload leaves small tensors alone, and a region's offload does not."""
    if fates.checkpoint is not None:
        read_or_dropped = piece.first_in_backward is not None or piece.died is not None
        return piece.fate == REGION_INPUT and read_or_dropped
    return piece.first_in_backward is not None and piece.nbytes >= fates.offload_min_bytes
