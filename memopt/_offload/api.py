"""`memopt.offload`: a context in which what autograd saves leaves the device."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from memopt._arguments import check_count, check_flags
from memopt._extension import _C
from memopt.memory.sizes import as_bytes
from memopt.place import Place, checked_directory, directory_of

# A copy of less costs more time than its memory is worth.
MIN_BYTES = 64 * 1024


def offload(
    to: Place = "cpu",
    *,
    directory: str | os.PathLike[str] | None = None,
    min_bytes: int | str = MIN_BYTES,
    fraction: float = 1.0,
    max_bytes: int | str | None = None,
    keep_last: int = 1,
) -> AbstractContextManager[None]:
    """Offload what autograd saves inside this context, and have it back before backward asks.

    The copies overlap the computation: on a device's own streams to pinned host memory, or by
    I/O threads to a file. The device's memory is given back when a copy is done. Backward begins
    the copies back of what was saved just before the tensor that it asks for, as far ahead as the
    measured times call for. Results are those of the plain run in every bit.

        with memopt.offload():
            loss = model(input)
        loss.backward()

    A storage is copied once, whole, however many ops save it and whichever views of it. Left alone
    are parameters and other leaves that require a gradient, subclasses of Tensor, sparse and
    quantized tensors, and storages of fewer than `min_bytes`. A storage that something else holds
    all the time, such as a module's buffer, is found out when it comes back, and is left alone from
    then on. With to="cpu", tensors in host memory stay as well: without an accelerator nothing is
    moved, and only to="disk" frees memory.

    Inside it, converted models and `memopt.recipes()` recompute their own outputs, and checkpointed
    regions drop their saved tensors: only the rest is copied. Contexts and saved-tensor hooks
    around it get what it leaves. A tensor that is written in place between forward and backward
    makes backward raise, as autograd does by itself. Where the host's memory or the disk has no
    space left, or a copy out fails, tensors stay on the device; that warns once. If backward never
    comes, everything is given back when the graph goes. Under torch.compile the context does
    nothing.

    Whether it pays: a block hides its copies if its computation takes longer than they do. For the
    input of a checkpointed transformer block of width h and sequence length s, in 16 bits, that is
    12 h + s >= F / B, with F the device's operations and B the link's bytes a second: about 9,000
    on an H100 with PCIe 5. `memopt.offload.stats()` says what came of it, and what to change.

    Args:
        to: "cpu": pinned host memory. "disk": a file in `directory` without a name, which is gone
            with the process, however that ends. A `pathlib.Path`: such a file in that directory.
        directory: on a disk with space for the tensors; None: the one that was given to
            `configure_offload`. Reads and writes go past the page cache where the file system can.
        min_bytes: storages of fewer stay. Sizes are bytes or strings, such as "64KiB".
        fraction: of the bytes offered, the share that is offloaded, from 0 to 1. For a link that
            hides only a part.
        max_bytes: the most bytes of this context that are offloaded at one time; None: no limit.
        keep_last: how many of the storages offered last stay on the device. Backward begins with
            them; copies of them would come back as soon as they have left.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of its range.
        OSError: no file can be made in `directory`.
        RuntimeError: in backward, if a copy could not be read back.

    Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks" (2016), for copies that overlap the
    computation; here for any eager module.
    """
    who = "offload"
    where = directory_of(f"{who}: to", to, directory)
    options = _C.Offload(
        directory=where,
        min_bytes=max(_size(who, "min_bytes", min_bytes), 1),
        fraction=_share(who, fraction),
        max_bytes=None if max_bytes is None else _size(who, "max_bytes", max_bytes),
        keep_last=min(check_count(who, "keep_last", keep_last, least=0), sys.maxsize),
    )
    return nullcontext() if torch.compiler.is_compiling() else _C.SavedTensors(options)


def configure_offload(
    *,
    directory: str | os.PathLike[str] | None = None,
    max_host_bytes: int | str | None = None,
    copies_in_flight: int = 4,
    checksums: bool = False,
) -> None:
    """Set the limits of offloading, for the whole process.

    They hold from the next use on where nothing is offloaded; tensors that are offloaded now keep
    the old ones.

    Args:
        directory: for "disk" where no other one is named.
        max_host_bytes: what the pool of pinned host memory may grow to, for each device: bytes or a
            string, such as "40GiB"; None: what the host has. Tensors that find no
            space stay on the device.
        copies_in_flight: how many copies may be under way in each direction, at least 1. What is
            leaving and what has come back early takes at most this many tensors' memory on the
            device.
        checksums: compare what is read from disk with what was written. For debugging.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of its range.
        OSError: no file can be made in `directory`.
    """
    who = "offload.configure"
    copies = check_count(who, "copies_in_flight", copies_in_flight)
    check_flags(who, checksums=checksums)
    cap = None if max_host_bytes is None else _size(who, "max_host_bytes", max_host_bytes)
    _C.set_offload_limits(
        copies_in_flight=copies,
        most_host_bytes=cap,
        checksums=checksums,
        directory="" if directory is None else checked_directory(who, directory),
    )


def empty_offload_cache() -> int:
    """Give pinned memory and files that hold nothing back to the system, as
    `torch.cuda.empty_cache` does for the device. The next step allocates them again.

    Returns:
        How many bytes were given back.
    """
    return _C.empty_offload_cache()


def _size(who: str, name: str, value: object) -> int:
    """Bytes; an int may be 0. No storage has more than the most that is returned."""
    if isinstance(value, str):
        return min(as_bytes(f"{who}: {name}", value), sys.maxsize)
    return min(check_count(who, name, value, least=0), sys.maxsize)


def _share(who: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{who}: fraction must be a number, got {type(value).__name__}")
    if not 0 <= value <= 1:
        raise ValueError(f"{who}: fraction must be from 0 to 1, got {value}")
    return float(value)
