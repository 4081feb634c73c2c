"""Measures scratch: one call on zeros of the same sizes and strides, once for each of them.

For kernels whose blocks and buffers no formula knows: oneDNN's convolutions, its products of 16
bits and its LSTMs, and memopt's own. A call runs in a thread of its own, where no mode, hook,
transform or profiler of the caller's sees it. What would take long has a bound instead, and what
would use up random numbers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt._extension import HAS_NATIVE
from memopt.memory.allocator import LiveBytes
from memopt.memory.scratch.size import elements_of

_QUICK = 1e10
"""Operations of a call that is measured, a multiply-add being two: .2 s on a core."""
_SMALL = 256 << 20
"""Bytes of the tensors of one that is measured."""


def is_quick(
    func: Any, args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> bool:
    """Whether an operator's calls are measured, and this one takes little time and memory.

    Args:
        args: the positional arguments; `given`: the tensors among all of them.
    """
    if sum(t.nbytes for t in (*given, *results)) > _SMALL:
        return False
    work = _WORK.get(func.overloadpacket.__name__)
    if work is not None:
        return work(args, results[0]) <= _QUICK
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return func.namespace == "memopt" and not draws


def _of_convolution(source: Tensor, weight: Tensor, result: Tensor, transposed: bool) -> int:
    positions = math.prod((source if transposed else result).shape[2:])
    return 2 * source.shape[0] * weight.numel() * positions


def _of_lstm(source: Tensor, to_gates: Tensor, between: Tensor) -> int:
    return 2 * math.prod(source.shape[:2]) * (to_gates.numel() + between.numel())


_WORK: dict[str, Callable[[Sequence[Any], Tensor], int]] = {
    "_linear_cross_entropy": lambda args, _: 6 * args[0].shape[0] * args[1].numel(),
    "convolution": lambda args, result: _of_convolution(args[0], args[1], result, args[6]),
    "convolution_backward": lambda args, _: _of_convolution(args[1], args[2], args[0], args[7]),
    **dict.fromkeys(("mm", "bmm"), lambda args, result: 2 * result.numel() * args[0].shape[-1]),
    **dict.fromkeys(
        ("addmm", "baddbmm"), lambda args, result: 2 * result.numel() * args[1].shape[-1]
    ),
    **dict.fromkeys(
        ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), lambda args, _: _of_lstm(*args[:3])
    ),
}


class _Sizes(NamedTuple):
    """The sizes that a tensor of zeros is made with."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def measured(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> int | None:
    """The most bytes that one call allocates beyond its results; None where it cannot be counted.

    Args:
        func: an operator.
        args, kwargs: its arguments: tensors, of which only sizes are read, and what can be a key.
    """
    if not HAS_NATIVE:
        return None
    named = tuple((name, _key(value)) for name, value in (kwargs or {}).items())
    return _measured(func, tuple(map(_key, args)), named, _settings())


def _key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _Sizes(tuple(value.shape), value.stride(), value.dtype)
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else value


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


_Named = tuple[tuple[str, Hashable], ...]


@lru_cache(maxsize=4096)
def _measured(
    func: Any, keys: tuple[Hashable, ...], named: _Named, settings: Hashable
) -> int | None:
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(_count(func, keys, named)))
    thread.start()
    thread.join()
    return found[0]


def _count(func: Any, keys: Sequence[Hashable], named: _Named) -> int | None:
    torch.get_num_threads()  # takes over in this thread what torch.set_num_threads set in another
    try:
        args = [_twin(key) for key in keys]
        kwargs = {name: _twin(key) for name, key in named}
        with torch.no_grad(), LiveBytes() as live:
            results = func(*args, **kwargs)
    except Exception:  # no memory for it, a profiler that sees all threads: there is a bound
        return None
    each = results if isinstance(results, (list, tuple)) else (results,)
    return live.most_with_scratch - sum(elements_of(t) for t in each if t is not None)


def _twin(key: Any) -> Any:
    if not isinstance(key, _Sizes):
        return key
    return torch.empty_strided(key.shape, key.stride, dtype=key.dtype, device="cpu").zero_()
