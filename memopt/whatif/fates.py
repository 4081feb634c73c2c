"""Courses that a step might take: other fates, another device, another optimizer.

All are applied to copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from memopt._arguments import check_flags
from memopt._checkpoint.assigned import calls_in_turn, paths_in
from memopt._checkpoint.blocks import find_blocks
from memopt._checkpoint.chunks import checked_chunks
from memopt._checkpoint.row_modules import predicted_row_modules
from memopt._convert.head import find_heads
from memopt._errors import in_the_name_of
from memopt._offload.api import MIN_BYTES
from memopt.applied import assign
from memopt.assignment import Assignment, Choice, Paths
from memopt.memory.ledger import Ledger
from memopt.memory.pieces import ACTIVATIONS, OFFLOADED, REGION_INPUT, Entry, Piece, in_order
from memopt.memory.predicted.predict import Looks, predict
from memopt.memory.step import Step
from memopt.memory.trace import Trace, trace_of
from memopt.place import Place, check_names_place

Checkpoint = Literal["all", "sqrt", "optimal"] | int | None

CHUNKS = 8
"""The number of chunks that is tried where the user gives none."""


@dataclass(frozen=True)
class Fates:
    """Options that say what becomes of the activations."""

    recipes: bool = False
    """memopt.convert: outputs of norms, activations and dropouts are recomputed."""
    checkpoint: Checkpoint = None
    """Blocks as regions: "all"; every k-th of them; of a model whose blocks are in an nn.Sequential
    also "sqrt" and "optimal", as memopt.checkpoint_sequential. (A forward that loops over its
    blocks calls them one by one, and each can only be a region of its own.)"""
    head: bool = False
    """The head in chunks of rows with its loss; as with `recipes`, since memopt.convert does both.
    """
    chunks: int | None = None
    """Modules that work on each row alone (the MLPs of blocks) as regions in so many chunks."""
    rows: tuple[str, ...] = ()
    """The paths of these modules, once they were looked for: see `with_rows`."""
    offload: Place | None = None
    """The place where what is kept for backward waits between its last use in forward and its
    first in backward: with `checkpoint` the regions' inputs, else all of it but the last.
    """
    planned: tuple[tuple[Paths, Choice], ...] = ()
    """Choices of a plan, in place of what the options above say."""
    who: str = field(kw_only=True)
    """The function that the user called, for messages."""

    def __post_init__(self) -> None:
        if self.offload is not None:
            check_names_place(f"{self.who}: offload", self.offload)
        if not isinstance(self.checkpoint, (int, str, type(None))):
            raise TypeError(self._rule())
        checked_chunks(self.who, self.chunks)
        check_flags(self.who, recipes=self.recipes, head=self.head)

    def with_rows(self, step: Step) -> Fates:
        """Find the modules of the step's model that can run in chunks, for fates that know them.

        Raises:
            ValueError: there are to be chunks, and no module can run in them.
        """
        if self.chunks is None or self.rows:
            return self
        rows = predicted_row_modules(step)
        if not rows:
            raise ValueError(
                f"{self.who}: chunks must have a model with modules that work on each row alone, "
                f"got {type(step.model).__name__} without"
            )
        return replace(self, rows=rows)

    def put_on(self, model: nn.Module, place: Place | None = None) -> None:
        """Change a model in place, but for offloading all that is not a region's.

        Args:
            place: where inputs of regions wait, if they are offloaded; None: they stay.

        Raises:
            ValueError, TypeError: `checkpoint` is no such thing, or the model has no blocks for it.
        """
        with in_the_name_of(self.who, "assign", "convert", "checkpoint_wrapper"):
            assign(model, self.assignment(model, place))

    def assignment(self, model: nn.Module, place: Place | None = None) -> Assignment:
        """Say which of the model's modules get what. Arguments and errors: see `put_on`."""
        if self.planned:
            return Assignment(dict(self.planned), place)
        region = Choice(self.recipes, checkpoint=True, offload=float(place is not None))
        choices: dict[Paths, Choice] = {("",): Choice(self.recipes)} if self.recipes else {}
        if self.checkpoint in ("sqrt", "optimal"):
            chain = _chain(model, self.checkpoint, self.who)
            choices[chain] = replace(region, segments=self.checkpoint)
        elif self.checkpoint is not None:
            every = self._every()
            choices |= {(path,): region for path in self._blocks(model)[::every]}
        if self.recipes or self.head:
            heads = find_heads(model, ()).values()
            choices |= {(found.path,): Choice(head=True) for found in heads}
        in_chunks = Choice(self.recipes, checkpoint=True, chunks=self.chunks)
        choices |= {(path,): in_chunks for path in self.rows}
        return Assignment(choices, place)

    def _blocks(self, model: nn.Module) -> list[str]:
        blocks = find_blocks(model)
        if not blocks:
            raise ValueError(
                f"{self.who}: checkpoint={self.checkpoint!r} must have a model with blocks "
                "(an nn.ModuleList, nn.Sequential or nn.ModuleDict of modules of one class, or "
                f"such children), got {type(model).__name__} without"
            )
        return [path for path, module in model.named_modules() if module in blocks]

    def _every(self) -> int:
        """The first of how many blocks is a region."""
        every = 1 if self.checkpoint == "all" else self.checkpoint
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(self._rule())
        return every

    def _rule(self) -> str:
        return (
            f'{self.who}: checkpoint must be "all", "sqrt", "optimal", a number k of at least '
            f"1 for every k-th block, or None, got {self.checkpoint!r}"
        )

    def __str__(self) -> str:
        if self.planned:
            return "planned"
        words = ["recipes"] if self.recipes else []
        if self.checkpoint is not None:
            words.append(f"checkpoint={self.checkpoint}")
        words += ["head in chunks"] if self.head and not self.recipes else []
        words += [f"chunks={self.chunks}"] if self.chunks is not None else []
        words += ["offload"] if self.offload else []
        return ", ".join(words) or "plain"


def _chain(model: nn.Module, segments: str, who: str) -> Paths:
    """The elements of the nn.Sequential with most blocks.

    A region of several blocks is a call of them in turn. Where a model's own forward loops over its
    blocks there is no such call, and what it does between them is nobody's to repeat.
    """
    blocks = find_blocks(model)
    chains = {
        path: list(module.children())
        for path, module in model.named_modules()
        if calls_in_turn(module) and len(module._modules) > 2
    }
    holding = {path: len(blocks.intersection(chain)) for path, chain in chains.items()}
    if not chains or (blocks and not any(holding.values())):
        first = next((path for path, m in model.named_modules() if m in blocks), "")
        where = f", whose {len(blocks)} blocks are called one by one ({first} first)"
        if len(blocks) == 1:
            where = f", whose one block, {first}, makes a region of each of its calls"
        raise ValueError(
            f'{who}: checkpoint="{segments}" must have a model whose blocks are in an '
            f"nn.Sequential, got {type(model).__name__} without one{where if blocks else ''}: only "
            'an nn.Sequential calls several as one; checkpoint="all" or a number k fits, and '
            "memopt.plan has one region for several blocks that a forward calls in a loop"
        )
    longest = max(chains, key=lambda path: (holding[path], len(chains[path])))
    return paths_in(longest, model.get_submodule(longest))


def predicted_trace(
    step: Step, fates: Fates, target: str, looks: Looks | None = None
) -> tuple[Trace, Ledger]:
    """The memory of a step with these fates, predicted; and its ledger.

    Args:
        target: "cpu" or "cuda".
        looks: the others at this step: see `predict`.

    Raises:
        DependsOnValues: the step looks at values.
    """
    fates = fates.with_rows(step)
    ledger, seconds, *_ = predict(step, fates.put_on, target, looks)
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
    if fates.checkpoint is None:
        leaves = leaves[:-1]
    log = list(ledger.log)
    for piece in leaves:
        piece.fate = OFFLOADED
        back = piece.died if piece.first_in_backward is None else piece.first_in_backward
        assert back is not None  # else it does not leave
        log.append(Entry(max(piece.last_in_forward, piece.born), -1, piece))
        log.append(Entry(back, 1, piece))
    return in_order(log)


def _leaves(piece: Piece, fates: Fates) -> bool:
    """memopt.offload, as it is by default, leaves small tensors alone; a region's does not."""
    if fates.checkpoint is not None:
        read_or_dropped = piece.first_in_backward is not None or piece.died is not None
        return piece.fate == REGION_INPUT and read_or_dropped
    return piece.first_in_backward is not None and piece.nbytes >= MIN_BYTES
