"""`memopt.anatomy.read_snapshot`."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt._arguments import as_path
from memopt._snapshot.report import LargeBlock, Snapshot
from memopt._snapshot.stacks import Frame, settled, users_line, where, written_category

_ENDS = ("free_completed", "free")
_MOST_LARGEST = 25
_TYPES = {("builtins", name): kind for name, kind in (("set", set), ("frozenset", frozenset))}


@dataclass(eq=False)
class _Block:
    nbytes: int
    category: str
    line: str
    is_certain: bool = False
    """Whether the snapshot says the category itself."""
    ended_in: str | None = None
    """The category of the stack of the event that ended it."""

    @property
    def settled(self) -> str:
        return self.category if self.is_certain else settled(self.category, self.ended_in)


def read_snapshot(path: str | Path, device: int = 0) -> Snapshot:
    """Read a memory snapshot of PyTorch's: what was alive at the peak, and what fragments hold.

        torch.cuda.memory._record_memory_history()
        ...  # a few steps
        torch.cuda.memory._dump_snapshot("snapshot.pickle")
        print(memopt.anatomy.read_snapshot("snapshot.pickle"))

    An allocator does not know what memory is for; categories come from the stacks, as far as these
    tell (see memopt/_snapshot/stacks.py), the rest is "not known". What was allocated before the
    history begins has the stack that its block has, if any. `Anatomy.to_snapshot` writes such
    files.

    Args:
        path: a file that `torch.cuda.memory._dump_snapshot` wrote. Only plain containers, numbers
            and strings are read from it: no code of the file runs.
        device: the number of the device.

    Returns:
        A `Snapshot` (memopt.types).

    Raises:
        ValueError: the file is no snapshot, or has nothing of this device.
        OSError: it cannot be read.
    """
    snapshot = _loaded(as_path("anatomy.read_snapshot", path))
    segments = [s for s in snapshot["segments"] if s.get("device", 0) == device]
    traces = snapshot.get("device_traces", [])
    events = traces[device] if device < len(traces) else []
    if not segments and not events:
        raise ValueError(
            f"anatomy.read_snapshot: device must be one of the snapshot's, got {device}"
        )
    blocks = [block for segment in segments for block in segment["blocks"]]
    active = [block for block in blocks if block["state"].startswith("active")]
    free = [block["size"] for block in blocks if block["state"] == "inactive"]
    alive, peak, seen = _replayed(events, active)
    by_category, by_line = Counter[str](), Counter[tuple[str, str]]()
    for block in alive:
        by_category[block.settled] += block.nbytes
        by_line[block.line, block.settled] += block.nbytes
    largest = sorted(alive, key=lambda block: -block.nbytes)[:_MOST_LARGEST]
    return Snapshot(
        device=device,
        peak=peak,
        allocated=sum(block["size"] for block in active),
        reserved=sum(segment["total_size"] for segment in segments),
        largest_free=max(free, default=0),
        free_blocks=len(free),
        events=seen,
        by_category=dict(by_category.most_common()),
        by_line=tuple((*key, nbytes) for key, nbytes in by_line.most_common(_MOST_LARGEST)),
        largest=tuple(LargeBlock(b.nbytes, b.settled, b.line) for b in largest),
    )


def _replayed(
    events: Sequence[Mapping[str, Any]], active: Iterable[Mapping[str, Any]]
) -> tuple[list[_Block], int, int]:
    """The blocks that are alive at the peak, its bytes, and how many events there are.

    A block that is active at the end and that no event allocated was there before the first one;
    so was one that is freed and was never allocated.
    """
    made = {event["addr"] for event in events if event["action"] == "alloc"}
    live = {
        block["address"]: _block(block["size"], _frames_of(block))
        for block in active
        if block["address"] not in made
    }
    started: set[int] = set(live)
    for event in events:  # freed before anything allocated it here
        address = event["addr"]
        if event["action"] == "alloc":
            started.add(address)
        elif event["action"] in _ENDS and address not in started:
            started.add(address)
            live[address] = _block(event["size"], ())
    total = peak = sum(block.nbytes for block in live.values())
    at_peak, count = list(live.values()), 0
    for event in events:
        address = event["addr"]
        if event["action"] == "alloc":
            live[address] = _block(event["size"], event.get("frames", ()))
            total += event["size"]
        elif event["action"] in _ENDS and address in live:
            block = live.pop(address)
            block.ended_in = where(event.get("frames", ()))
            total -= block.nbytes
        else:
            continue
        count += 1
        if total > peak:
            peak, at_peak = total, list(live.values())
    return at_peak, peak, count


def _block(nbytes: int, frames: Sequence[Frame]) -> _Block:
    written = written_category(frames)
    return _Block(nbytes, written or where(frames), users_line(frames), bool(written))


def _frames_of(block: Mapping[str, Any]) -> Sequence[Frame]:
    """The frames of a block, which older versions of PyTorch keep in a history."""
    history = block.get("history") or [{}]
    frames: Sequence[Frame] = block.get("frames") or history[0].get("frames", ())
    return frames


class _Plain(pickle.Unpickler):
    """Reads containers, numbers and strings: a snapshot has nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _TYPES:
            return _TYPES[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _loaded(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = _Plain(file).load()
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"anatomy.read_snapshot: path must be a snapshot of PyTorch's, got {path}, "
            f"which is none: {error}"
        ) from error
    if not isinstance(found, dict) or "segments" not in found:
        raise ValueError(
            f"anatomy.read_snapshot: path must be a snapshot of PyTorch's, got {path}, "
            'which has no "segments"'
        )
    return found
