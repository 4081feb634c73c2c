"""Measures scratch: one call on zeros of the same sizes and strides, once for each of them.

For kernels whose choice of blocks and buffers no formula knows (oneDNN's convolutions). The call
runs in a thread of its own, where no mode, hook, transform or profiler of the caller's sees it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt._extension import HAS_NATIVE
from memopt.memory.allocator import LiveBytes
from memopt.memory.scratch.size import elements_of


class _Sizes(NamedTuple):
    """The sizes that a tensor of zeros is made with."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def measured(func: Any, args: Sequence[Any]) -> int | None:
    """The most bytes that one call allocates beyond its results; None where it cannot be counted.

    Args:
        func: an operator of PyTorch's.
        args: its arguments: tensors, of which only sizes are read, and what can be a key.
    """
    if not HAS_NATIVE:
        return None
    return _measured(func, tuple(map(_key, args)), _settings())


def _key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _Sizes(tuple(value.shape), value.stride(), value.dtype)
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _settings() -> Hashable:
    """Settings by which kernels are chosen, beside their arguments."""
    onednn: Any = torch.backends.mkldnn
    return (
        torch.get_num_threads(),
        onednn.enabled,
        onednn.deterministic,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


@lru_cache(maxsize=4096)
def _measured(func: Any, keys: tuple[Hashable, ...], settings: Hashable) -> int | None:
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(_count(func, keys)))
    thread.start()
    thread.join()
    return found[0]


def _count(func: Any, keys: Sequence[Hashable]) -> int | None:
    torch.get_num_threads()  # takes over in this thread what torch.set_num_threads set in another
    try:
        args = [_twin(key) if isinstance(key, _Sizes) else key for key in keys]
        with torch.no_grad(), LiveBytes() as live:
            results = func(*args)
    except RuntimeError:  # no memory for it, or a profiler that sees all threads
        return None
    each = results if isinstance(results, (list, tuple)) else (results,)
    return live.most_with_scratch - sum(elements_of(t) for t in each if t is not None)


def _twin(sizes: _Sizes) -> Tensor:
    return torch.empty_strided(sizes.shape, sizes.stride, dtype=sizes.dtype).zero_()
