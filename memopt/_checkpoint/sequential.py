"""checkpoint_sequential: a chain of stages whose segments are checkpointed regions."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt._arguments import check_flags
from memopt._checkpoint.flags import is_checkpointing, is_recomputing
from memopt._checkpoint.region import run_region
from memopt._checkpoint.segments import equal_segments, sqrt_segments
from memopt._checkpoint.settings import region_settings
from memopt._checkpoint.stage_bytes import SavedInStage
from memopt._extension import _C

StageCall = Callable[..., Any]

_SETTINGS = {keep: region_settings(preserve_rng_state=keep) for keep in (True, False)}


def checkpoint_sequential(
    functions: nn.Sequential | nn.ModuleList | Sequence[StageCall],
    segments: int | str | Sequence[int],
    *inputs: Any,
    unpack_outputs: bool = False,
    preserve_rng_state: bool = True,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """Run `functions` one after another in contiguous segments, each but the last a region.

    A region is what `memopt.checkpoint` makes of a call, with the same promises: gradients of the
    plain run to the last bit, arguments and results of any kind. Between forward and backward it
    keeps its inputs only. The last segment runs plainly, since backward would need its saved
    tensors at once. With gradients disabled everything does.

    `segments="optimal"` measures first. A call with new functions, or with inputs of which a shape,
    dtype, device or requires_grad is new, runs every stage as a region of its own and counts what
    each saves: storages, whole and once in each segment, without the parameters and buffers of the
    modules among the functions. No stage runs more often for it. Later calls use the partition with
    the least peak of (inputs kept so far + saved tensors of one segment), see
    `memopt._checkpoint.segments.least_peak_segments`. A stage that is checkpointed itself counts
    with what it keeps. The last 64 partitions are remembered, without keeping the functions alive,
    and only where the functions are the same objects (methods: of the same object) in each call;
    with functions that allow no weak reference or no hash every call measures. Inside another
    region and under `torch.compile` "optimal" is "sqrt", because a recompute must cut where its
    forward did. Inside a region of `torch.utils.checkpoint`, which cannot be seen from here, give
    the lengths instead.

    Args:
        functions: the stages. The first is called with `*inputs` and `**kwargs`, each other with
            the result of the one before as its only argument, as `nn.Sequential` does. Hooks of an
            `nn.Sequential` itself do not run.
        segments: how many segments, from 1 to the number of functions, equal in length but for one
            stage, the longer ones first; or "sqrt" for round(sqrt(number of functions)) of them; or
            "optimal"; or the length of each segment.
        unpack_outputs: a result that is a tuple becomes the positional arguments of the next stage.
        preserve_rng_state: draw the same random numbers in recomputes as in forward.
        use_reentrant: must be false, as there is no reentrant kind.

    Returns:
        The result of the last function, the very object.

    Raises:
        TypeError: `functions` is no such container or holds something not callable, `segments` is
            of another type, a flag is neither True nor False, or there is no input.
        ValueError: `functions` is empty, `segments` does not fit, or `use_reentrant` is true.
    """
    stages = _stages(functions)
    check_flags(
        "checkpoint_sequential",
        unpack_outputs=unpack_outputs,
        preserve_rng_state=preserve_rng_state,
        use_reentrant=use_reentrant is not None and use_reentrant,
    )
    if use_reentrant:
        raise ValueError(
            "checkpoint_sequential: use_reentrant must be False, since every region is "
            f"non-reentrant, got {use_reentrant!r}"
        )
    if not inputs and not kwargs:
        raise TypeError("checkpoint_sequential: the first function must get an input, got none")
    if isinstance(segments, str) and segments == "optimal":
        return _run_optimal(stages, inputs, kwargs, unpack_outputs, preserve_rng_state)
    lengths = _lengths(segments, len(stages))
    return _run(stages, lengths, inputs, kwargs, unpack_outputs, preserve_rng_state)


def run_segment(stages: tuple[StageCall, ...], unpack: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Run `stages` in turn; what the regions of checkpoint_sequential do, so errors name it."""
    for number, stage in enumerate(stages, 1):
        result = stage(*args, **kwargs)
        if number < len(stages):
            args, kwargs = _as_arguments(result, unpack), {}
    return result


def _as_arguments(result: Any, unpack: bool) -> tuple[Any, ...]:
    return tuple(result) if unpack and isinstance(result, tuple) else (result,)


def _run(
    stages: tuple[StageCall, ...],
    lengths: list[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unpack: bool,
    preserve_rng_state: bool,
) -> Any:
    settings = _SETTINGS[preserve_rng_state]
    start = 0
    for length in lengths[:-1]:
        segment = functools.partial(run_segment, stages[start : start + length], unpack)
        args = _as_arguments(run_region(segment, args, kwargs, settings), unpack)
        kwargs = {}
        start += length
    return run_segment(stages[start:], unpack, *args, **kwargs)


# By functions and inputs, the newest last.
_partitions: OrderedDict[Hashable, list[int]] = OrderedDict()
_MOST_PARTITIONS = 64
_partitions_lock = threading.Lock()


def _run_optimal(
    stages: tuple[StageCall, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unpack: bool,
    preserve_rng_state: bool,
) -> Any:
    if torch.compiler.is_compiling() or _in_region() or not torch.is_grad_enabled():
        return _run(stages, sqrt_segments(len(stages)), args, kwargs, unpack, preserve_rng_state)
    key = _key(stages, (args, kwargs), unpack)
    with _partitions_lock:
        lengths = _partitions.get(key)
        if lengths is not None:
            _partitions.move_to_end(key)
    if lengths is not None:
        return _run(stages, lengths, args, kwargs, unpack, preserve_rng_state)

    stage_bytes = SavedInStage(stages)
    settings = region_settings(
        preserve_rng_state=bool(preserve_rng_state), on_saved=stage_bytes.add_saved
    )
    result = _run_measured(stages, args, kwargs, unpack, stage_bytes, settings)
    # Nothing is saved either where no region is made, as inside disable_checkpointing.
    lengths = stage_bytes.least_peak_segments()
    if key is not None and lengths is not None:
        with _partitions_lock:
            _partitions[key] = lengths
            if len(_partitions) > _MOST_PARTITIONS:
                _partitions.popitem(last=False)
    return result


def _in_region() -> bool:
    return is_checkpointing() or is_recomputing()


def _run_measured(
    stages: tuple[StageCall, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unpack: bool,
    stage_bytes: SavedInStage,
    settings: _C.RegionSettings,
) -> Any:
    for stage in stages:
        stage_bytes.begin_stage(args, kwargs)
        segment = functools.partial(run_segment, (stage,), unpack)
        result = run_region(segment, args, kwargs, settings)
        args, kwargs = _as_arguments(result, unpack), {}
    return result


def _key(stages: tuple[StageCall, ...], inputs: Any, unpack: bool) -> Hashable:
    """A key for the partition of these stages; None if a stage could be recognised only by keeping
    it alive.

    Weak references are equal while their objects live and are equal, and then only to themselves.
    """
    leaves, _ = pytree.tree_flatten(inputs)
    tensors = tuple(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
        for leaf in leaves
        if isinstance(leaf, Tensor)
    )
    try:
        key = tuple(_weakly(stage) for stage in stages), tensors, unpack
        hash(key)
    except TypeError:
        return None
    return key


def _weakly(stage: StageCall) -> Hashable:
    if isinstance(stage, types.MethodType):  # which is a new object each time it is asked for
        return weakref.WeakMethod(stage)
    return weakref.ref(stage)


def _stages(functions: object) -> tuple[StageCall, ...]:
    if not isinstance(functions, (nn.Sequential, nn.ModuleList, Sequence)):
        raise TypeError(
            "checkpoint_sequential: functions must be an nn.Sequential, an nn.ModuleList or a "
            f"sequence of callables, got {type(functions).__name__}"
        )
    stages = tuple(functions)
    if not stages:
        raise ValueError("checkpoint_sequential: functions must not be empty, got none")
    for number, stage in enumerate(stages):
        if not callable(stage):
            raise TypeError(
                "checkpoint_sequential: functions must be callable, got "
                f"{type(stage).__name__} as function {number}"
            )
    return stages


def _lengths(segments: object, stages: int) -> list[int]:
    """The length of each segment, as `segments` wants it."""
    if isinstance(segments, str) and segments == "sqrt":
        return sqrt_segments(stages)
    if _is_int(segments) and 1 <= segments <= stages:
        return equal_segments(stages, segments)
    if isinstance(segments, Sequence) and not isinstance(segments, str):
        if not all(_is_int(length) and length >= 1 for length in segments):
            raise ValueError(
                "checkpoint_sequential: segments must have lengths that are ints of at least 1, "
                f"got {segments!r}"
            )
        if sum(segments) != stages:
            raise ValueError(
                "checkpoint_sequential: segments must have lengths that sum to the number of "
                f"functions, {stages}, got {segments!r}"
            )
        return list(segments)
    error = ValueError if _is_int(segments) or isinstance(segments, str) else TypeError
    raise error(
        f"checkpoint_sequential: segments must be an int from 1 to {stages} (the number of "
        'functions), "sqrt", "optimal" or the length of each segment, got '
        f"{segments!r}"
    )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
