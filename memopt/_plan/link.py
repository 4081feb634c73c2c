"""How fast activations leave a device, and come back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from memopt._offload import offload, offload_stats
from memopt.memory.speed import Speed
from memopt.place import Place, directory_of

# What is copied to find out, in parts: as much as a block of a large model keeps.
_BYTES = 64 << 20
_PARTS = 4

# Where nothing can be measured: a link to the host as fast as a PCIe 5 one, a fast disk.
_DISK = 3e9


class Speeds(NamedTuple):
    """Bytes a second."""

    out: float
    back: float


def speeds_to(place: Place, device: torch.device, runs: bool) -> Speeds:
    """Return the speeds of copies to a place, measured by making some; estimated where nothing
    runs.
    """
    if not runs:
        return Speeds(Speed(1).link, Speed(1).link) if place == "cpu" else Speeds(_DISK, _DISK)
    before = _timed(place, device)
    weight = torch.ones((), device=device, requires_grad=True)
    with offload(place, keep_last=0):
        outputs = [
            (torch.zeros(_BYTES // _PARTS // 4, device=device) * weight).sum()
            for _ in range(_PARTS)
        ]
    offload_stats(wait=True)
    torch.stack(outputs).sum().backward()
    after = _timed(place, device)
    return Speeds(*(_rate(*ways) for ways in zip(before, after, strict=True)))


def _timed(place: Place, device: torch.device) -> list[tuple[int, float]]:
    """Bytes and seconds, out and back, until now."""
    directory = directory_of("plan: offload", place)
    for row in offload_stats(wait=True).places:
        if row.directory == directory and torch.device(row.device).type == device.type:
            return [(way.bytes_timed, way.busy_seconds) for way in (row.out, row.back)]
    return [(0, 0.0), (0, 0.0)]


def _rate(before: tuple[int, float], after: tuple[int, float]) -> float:
    return max(1.0, (after[0] - before[0]) / max(1e-9, after[1] - before[1]))
