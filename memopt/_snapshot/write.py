"""Writes a step's memory as a snapshot of PyTorch's allocator, which its viewer draws.

The form is that of torch.cuda.memory._snapshot: `device_traces` has each allocation and each end of
one with its frames, `segments` what is alive when the step has ended. Addresses are invented: each
piece has its own, none is used twice. A time is the number of an operator.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from memopt.memory.pieces import Piece

_ROUND = 512
_FIRST_ADDRESS = 1 << 32


def write_snapshot(path: Path, pieces: Sequence[Piece]) -> None:
    """Write pieces of memory to a file that PyTorch's viewer opens. Pieces of no bytes are left
    out.
    """
    blocks = list(_placed(pieces))
    snapshot = {
        "segments": [_segment(*block) for block in blocks if block[1].died is None],
        "device_traces": [_trace(blocks)],
        "allocator_settings": {},
        "external_annotations": [],
    }
    path.write_bytes(pickle.dumps(snapshot))


def _placed(pieces: Iterable[Piece]) -> Iterable[tuple[int, Piece]]:
    address = _FIRST_ADDRESS
    for piece in pieces:
        if piece.nbytes:
            yield address, piece
            address += _rounded(piece.nbytes)


def _segment(address: int, piece: Piece) -> dict[str, Any]:
    """One for each piece that is alive at the end, without gaps, which nobody can predict."""
    return {
        "device": 0,
        "address": address,
        "total_size": _rounded(piece.nbytes),
        "allocated_size": piece.nbytes,
        "active_size": piece.nbytes,
        "requested_size": piece.nbytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": address,
                "size": _rounded(piece.nbytes),
                "requested_size": piece.nbytes,
                "state": "active_allocated",
                "frames": _frames(piece),
            }
        ],
    }


def _trace(blocks: Sequence[tuple[int, Piece]]) -> list[dict[str, Any]]:
    events: list[tuple[int, int, dict[str, Any]]] = []
    for address, piece in blocks:
        for instant, order, action in (
            (piece.born, 0, "alloc"),
            (piece.died, 1, "free_requested"),
            (piece.died, 2, "free_completed"),
        ):
            if instant is not None:
                event = {
                    "action": action,
                    "addr": address,
                    "size": piece.nbytes,
                    "stream": 0,
                    "time_us": instant,
                    "frames": _frames(piece),
                }
                events.append((instant, order, event))
    return [event for _, _, event in sorted(events, key=lambda event: event[:2])]


def _frames(piece: Piece) -> list[dict[str, Any]]:
    """The innermost first: the operator, then the module, each with the line that called it."""
    file, _, line = piece.line.rpartition(":")
    number = int(line) if line.isdigit() else 0
    shape = "x".join(map(str, piece.shape))
    return [
        {
            "name": f"{piece.category}: {piece.op} {shape} {str(piece.dtype).split('.')[-1]}",
            "filename": file,
            "line": number,
        },
        {"name": f"{piece.module or 'the model'} ({piece.phase})", "filename": file, "line": 0},
    ]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ROUND) * _ROUND
