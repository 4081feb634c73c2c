"""The log of a step as one of several data parallel ranks has it, from that of a single device.

DistributedDataParallel holds what one device holds, and a copy of all gradients in its buckets.

FSDP2 (torch.distributed.fsdp.fully_shard on each block, then on the model) holds 1/N of each
weight, gradient and optimizer state, by rows. Of the unit (a block, or the model's rest) that runs
it has the whole weights, gathered in one buffer and copied out of it; in backward those of the next
unit as well, which are prefetched, and the whole gradients of the unit, which one buffer carries to
the ranks. Source: PyTorch's documentation of fully_shard, its implicit prefetching and
reshard_after_forward=True.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from memopt._checkpoint.blocks import find_blocks
from memopt.memory.ledger import Ledger
from memopt.memory.paths import is_inside
from memopt.memory.pieces import GRADIENTS, STATES, TEMPORARY, WEIGHTS, Entry, Piece, in_order

Parallel = Literal["ddp", "fsdp"]
_OF_OPTIMIZER = "optimizer"


@dataclass
class _Unit:
    """A module whose weights are gathered together: a block, or the model without its blocks."""

    path: str
    nbytes: int = 0
    """Bytes of its weights, whole."""
    trained: int = 0
    """Bytes of its gradients, whole."""
    forward: tuple[int, int] = (0, 0)
    """The first and the last instant of its forward, and of its backward."""
    backward: tuple[int, int] = (0, 0)


def log_of_rank(
    log: Sequence[Entry], ledger: Ledger, model: nn.Module, ranks: int, parallel: Parallel
) -> list[Entry]:
    """The log of a step as one of `ranks` would have it.

    Args:
        log: of a step on one device, the ledger's or a changed one.
        model: the model of that step, whose parameters say what is trained.
    """
    if ranks == 1:
        return list(log)
    units = _units(ledger, model)
    if parallel == "ddp":
        buckets = sum(unit.trained for unit in units)
        return [Entry(0, 1, _piece(buckets, 0, "buckets of DistributedDataParallel")), *log]
    parts: dict[int, Piece] = {}
    mine = [entry for old in log for entry in _sharded(old, ranks, units, parts)]
    mine += [entry for unit in units for entry in _gathered(unit)]
    mine += _prefetched(units)
    return in_order(mine)


def _units(ledger: Ledger, model: nn.Module) -> list[_Unit]:
    """The units in the order of their forwards; the model's rest is the first."""
    blocks = find_blocks(model)
    units = [_Unit(path) for path, module in model.named_modules() if module in blocks]
    rest = _Unit("")
    instants: dict[tuple[str, str], list[int]] = defaultdict(list)
    for piece in ledger.pieces:
        if piece.born:
            unit = _unit_of(piece.module, units, rest)
            instants[unit.path, piece.phase].append(piece.born)
    for name, parameter in model.named_parameters():
        unit = _unit_of(name, units, rest)
        unit.nbytes += parameter.nbytes
        unit.trained += parameter.nbytes * parameter.requires_grad
    last = len(ledger.ops) - 1
    for unit in units:
        for phase in ("forward", "backward"):
            found = instants.get((unit.path, phase))
            setattr(unit, phase, (min(found), max(found)) if found else (last, last))
    steps = [i for i, phase in enumerate(ledger.phases) if phase in ("forward", "backward")]
    # The model itself is the one unit that stays whole from its forward to the end of backward.
    rest.forward = rest.backward = (min(steps, default=0), max(steps, default=0))
    return [rest, *sorted(units, key=lambda unit: unit.forward)]


def _unit_of(path: str, units: Iterable[_Unit], rest: _Unit) -> _Unit:
    return next((u for u in units if path == u.path or is_inside(path, u.path)), rest)


def _sharded(
    entry: Entry, ranks: int, units: Sequence[_Unit], parts: dict[int, Piece]
) -> Iterator[Entry]:
    """The lines that one rank has for a line of the whole step. `parts`: the pieces of this rank,
    by the whole ones.
    """
    piece = entry.piece
    in_optimizer = piece.category == TEMPORARY and piece.phase == _OF_OPTIMIZER
    if not (piece.category in (WEIGHTS, GRADIENTS, STATES) or in_optimizer):
        yield entry
        return
    part = parts.setdefault(id(piece), _part(piece, ranks))
    if piece.category != GRADIENTS or not piece.born:
        yield entry._replace(piece=part)
        return
    end = max(_unit_of(piece.module, units[1:], units[0]).backward[1], piece.born)
    if entry.sign > 0:  # whole until the unit's backward has ended
        whole = replace(piece)
        yield from (entry._replace(piece=whole), Entry(end, 1, part), Entry(end, -1, whole))
    else:
        yield Entry(max(end, entry.instant), -1, part)


def _part(piece: Piece, ranks: int) -> Piece:
    """This rank's rows; the last rank may have fewer."""
    rows = piece.shape[0] if piece.shape else 1
    share = math.ceil(rows / ranks) / rows if rows else 1.0
    return replace(piece, nbytes=math.ceil(piece.nbytes * share))


def _gathered(unit: _Unit) -> Iterator[Entry]:
    """The unit's weights, whole, and the buffers that they and its gradients travel in."""
    spans = [unit.forward] if unit.forward == unit.backward else [unit.forward, unit.backward]
    for first, last in spans:
        yield from _alive(unit.nbytes, first, last, f"weights of {unit.path or 'the model'}")
        yield from _alive(unit.nbytes, first, first, f"all-gather of {unit.path or 'the model'}")
    end = unit.backward[1]
    yield from _alive(unit.trained, end, end, f"reduce-scatter of {unit.path or 'the model'}")


def _prefetched(units: Sequence[_Unit]) -> Iterator[Entry]:
    """The next unit's weights, which travel while a unit computes in backward."""
    order = sorted(units[1:], key=lambda unit: unit.backward)
    for now, following in itertools.pairwise(order):
        first, last = now.backward[0], following.backward[0]
        yield from _alive(following.nbytes, first, last, f"all-gather of {following.path}")


def _alive(nbytes: int, first: int, last: int, name: str) -> Iterator[Entry]:
    if nbytes:
        piece = _piece(nbytes, first, name)
        yield from (Entry(first, 1, piece), Entry(last, -1, piece))


def _piece(nbytes: int, born: int, name: str) -> Piece:
    return Piece(nbytes, (nbytes,), torch.uint8, born, "forward", name, "", "", category=TEMPORARY)
