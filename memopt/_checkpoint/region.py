"""`checkpoint`: a call whose saved tensors are dropped, and recomputed in backward.

The engine is C++ (csrc/saved/region.h says how it works). Here are the options and what they mean
for it; settings.py holds what the engine calls in this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from memopt._arguments import check_flags
from memopt._checkpoint.caches import has_cache, may_have_caches, with_caches
from memopt._checkpoint.chunks import (
    CallRows,
    NotRows,
    StandIn,
    checked_chunks,
    run_in_chunks,
)
from memopt._checkpoint.debug import OperatorLogs
from memopt._checkpoint.decisions import decision_contexts
from memopt._checkpoint.naming import region_name
from memopt._checkpoint.partition import PartitionChoice, partition_of
from memopt._checkpoint.rows import check_rows
from memopt._checkpoint.settings import fate_of_arguments, region_settings
from memopt._checkpoint.uncompiled import say_without_effect
from memopt._compat import checkpoint_options_set_globally, in_jit_trace, in_transform
from memopt._errors import warn
from memopt._extension import _C
from memopt.place import Place

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

_no_contexts = torch_checkpoint.noop_context_fn
_DEFAULT_SETTINGS = region_settings()
_DETERMINISM_CHECKS = ("default", "none")


def checkpoint(
    fn: Callable[..., Any],
    /,
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = _no_contexts,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    offload: Place | None = None,
    partition: PartitionChoice = None,
    chunks: int | None = None,
    keep_decisions: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `fn(*args, **kwargs)` and drop what it saves for backward, which calls it again.

    Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
    Memory falls to the tensors among the arguments; the cost is one more forward of `fn`. Losses
    and gradients are those of the plain call. The options are those of
    `torch.utils.checkpoint.checkpoint(use_reentrant=False)`, for which this can stand in; that
    module's `set_checkpoint_early_stop`, `set_checkpoint_debug_enabled` and `GraphExecGroup` are
    heeded, and its selective checkpoint contexts work as `context_fn`.

    Arguments and results may be of any kind. Tensors in lists, dicts, tuples and whatever else is
    registered with `torch.utils._pytree` are tracked, and so are attributes of other objects (a
    dataclass, say) that are tensors themselves: the recompute gets the object, or a shallow copy of
    it where its tensors were exchanged since. What lies deeper is kept with its object. Results are
    the very objects that `fn` returned. Random numbers (of the CPU, of the devices of the arguments
    and of the current accelerator), autocast, the default dtype and the default device are in the
    recompute what they were in forward; statistics of batch norm layers move in forward only.

    With gradients disabled, inside `disable_checkpointing`, inside a transform of `torch.func`, and
    while `torch.jit.trace` looks on, this is the plain call. Under `torch.compile` it is
    `torch.utils.checkpoint.checkpoint(use_reentrant=False)`.

    `fn` must do the same in both calls as far as autograd can see, and must not write to its
    arguments in place. A tensor that `fn` closes over must not be written between forward and
    backward either; that is not checked.

    A cache of keys and values of transformers among the arguments grows in forward; the recompute
    gets a copy of it as it was before. The region keeps what its layers found in the cache.

    Args:
        fn: any callable.
        *args: for `fn`.
        use_reentrant: for code that passes it to PyTorch's; there is only the non-reentrant kind.
        preserve_rng_state: draw the same random numbers in the recompute. Costs well below a
            microsecond; a generator that `fn` does not use is left alone in any case.
        context_fn: called once per call; returns two context managers, the first to run forward
            in, the second for each recompute. They must not end exceptions.
        determinism_check: "default": shape, dtype and device of each tensor saved in the recompute
            must be what they were in forward. "none": only their number must.
        debug: keep a log of the operators that forward runs, so that the error of a recompute that
            differs names the first one that does; with `partition`, compare the ranks' arguments in
            every call. Slow. Excludes `context_fn`.
        early_stop: end the recompute as soon as it has made the last tensor that backward wants.
        offload: "cpu", "disk" or a directory (a `pathlib.Path`): the tensors among the arguments
            wait there for the recompute, in (pinned) host memory or in a file, and come back before
            it begins; see `memopt.offload`. Left alone are what it leaves alone, apart from small
            tensors. None: they are kept. No effect under `torch.compile`.
        partition: a process group (`torch.distributed.ProcessGroup`), a `DeviceMesh` of one dim, or
            True for the default group. Its N ranks hold identical tensors among the arguments, as
            with tensor parallelism. Each keeps 1/N of their bytes (rounded up to 16), and backward
            gathers them: one all-gather per region, begun when the region after it starts its
            backward. With `offload` the parts wait there. Tensors that differ are kept whole; see
            docs/partition.md for what is taken, its cost, and what all ranks have to do equally.
            A group of one rank has no effect, and nothing has under `torch.compile`.
        chunks: run `fn` in that many chunks of rows, at least 1, each a region of its own, also
            without gradients: forward and backward hold the inner tensors of one chunk at a time.
            Rows are the places of all dims but the last of the first tensor among the arguments
            ([batch, sequence, features] has batch * sequence). Tensors that begin with the same
            dims are cut with it, all else goes whole to each chunk. The first rows % chunks chunks
            have a row more than the others; fewer rows give a chunk each. `fn` has to work on each
            row alone, as an MLP does, a norm with its MLP, a head: a probe on six rows finds out at
            the first call, and names what it refuses. Each chunk draws random numbers (dropout) of
            its own. Gradients with respect to what is not cut, parameters say, are summed in place
            from the last chunk to the first: in float32 where they are float16 or bfloat16, then
            rounded once. Hooks get the sum. Under autocast each chunk casts the weights. No effect
            under `torch.compile`.
        keep_decisions: keep from forward what `fn` chooses by values, and use it in the recompute:
            experts, samples, sizes. See `memopt.checkpoint.decision_contexts` for what is kept. The
            operators of `fn` then run through Python. A region inside this one that chooses needs
            the option itself. No effect under `torch.compile`.
        **kwargs: for `fn`.

    Raises:
        TypeError: `fn` is not callable, a flag is neither True nor False, `partition` is not a
            group, a mesh or True, or `chunks` is no int.
        ValueError: an unknown `determinism_check` or `offload`, `use_reentrant=True`, or `debug`
            (also by `set_checkpoint_debug_enabled`) with a `context_fn`; a `partition` of several
            dims, without an initialized process group or without this rank; `chunks` below 1, or of
            a call that does not work on each row alone.
        RuntimeError: a context of `context_fn` ended an exception. In backward, if an argument was
            written in place or the recompute saved other tensors (in number, shape, dtype or
            device) than forward.
    """
    if not callable(fn):
        raise TypeError(f"checkpoint: fn must be callable, got {type(fn).__name__}")
    if torch.compiler.is_compiling():
        _check_options(use_reentrant, context_fn, determinism_check, debug)
        check_flags(
            "checkpoint",
            preserve_rng_state=preserve_rng_state,
            early_stop=early_stop,
            keep_decisions=keep_decisions,
        )
        say_without_effect(
            "checkpoint",
            debug=debug,
            offload=offload,
            partition=partition,
            chunks=chunks,
            keep_decisions=keep_decisions,
        )
        options: dict[str, Any] = {
            "preserve_rng_state": preserve_rng_state,
            "determinism_check": determinism_check,
            "early_stop": early_stop,
        }
        if context_fn is not _no_contexts:
            options["context_fn"] = context_fn
        return compiled_region(fn, args, kwargs, **options)
    count = checked_chunks("checkpoint", chunks)
    if count is not None:
        _check_options(use_reentrant, context_fn, determinism_check, debug)
        of_chunk = partial(
            checkpoint,
            fn,
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            offload=offload,
            partition=partition,
            keep_decisions=keep_decisions,
        )
        return run_chunks("checkpoint", fn, args, kwargs, count, of_chunk)
    if (
        preserve_rng_state is True
        and early_stop is True
        and context_fn is _no_contexts
        and determinism_check == "default"
        and debug is False
        and (use_reentrant is False or use_reentrant is None)
        and offload is None
        and partition is None
        and keep_decisions is False
        and not checkpoint_options_set_globally()[1]
    ):
        return run_region(fn, args, kwargs)
    check_flags(
        "checkpoint",
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
        debug=debug,
        keep_decisions=keep_decisions,
    )
    global_debug = checkpoint_options_set_globally()[1]
    debug = debug if global_debug is None else global_debug
    _check_options(use_reentrant, context_fn, determinism_check, debug)
    contexts = [] if context_fn is _no_contexts else [context_fn]
    diagnose = None
    if debug:
        logs = OperatorLogs()
        contexts, diagnose = [logs.contexts], logs.first_difference
    if keep_decisions:
        contexts.append(decision_contexts)
    settings = region_settings(
        arguments=fate_of_arguments("checkpoint: offload", offload),
        partition=partition_of("checkpoint", partition),
        check_partition=debug,
        preserve_rng_state=preserve_rng_state,
        check_metadata=determinism_check == "default",
        early_stop=early_stop,
        diagnose=diagnose,
    )
    return run_inside(contexts, fn, args, kwargs, settings)


def is_region() -> bool:
    """Whether what is called here as a region is one, and no plain call."""
    return torch.is_grad_enabled() and not _C.flags().disabled


def run_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: _C.RegionSettings = _DEFAULT_SETTINGS,
    owner: nn.Module | None = None,
) -> Any:
    """`checkpoint` with settings made before. `owner`: the module whose forward `fn` is."""
    if torch.compiler.is_compiling():
        return compiled_region(fn, args, kwargs)
    if may_have_caches() and has_cache(args, kwargs) and is_region():
        fn, args, kwargs = with_caches(fn, args, kwargs, owner)
    early_stop = checkpoint_options_set_globally()[0]
    if early_stop is not None:
        settings = settings.with_early_stop(early_stop)
    try:
        return _C.run_region(fn, args, kwargs, settings, owner)
    except RuntimeError as error:
        if not _C.refuses_hooks(error):
            raise
        raise RuntimeError(
            f"checkpoint: memopt's region {region_name(fn if owner is None else owner)} must not "
            "call torch.func.grad, vjp, jacrev or hessian, since PyTorch allows no saved tensor "
            "hooks around them; make no region of it"
        ) from error


def run_chunks(
    who: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chunks: int,
    region: Callable[..., Any],
    owner: nn.Module | None = None,
    or_whole: bool = False,
) -> Any:
    """Calls a region in chunks of rows, once it is known that this can be.

    Args:
        who: the function that the user called, for messages.
        region: calls `fn` as a region, with the arguments of one chunk.
        owner: the module whose forward `fn` is.
        or_whole: run whole, with a warning, where that cannot be.

    Raises:
        ValueError: `fn` does not work on each row alone.
    """
    if _C.flags().disabled or in_transform() or in_jit_trace():
        return fn(*args, **kwargs)
    subject = fn if owner is None else owner
    try:
        rows = CallRows(who, args, kwargs)
        chunks = min(chunks, rows.count)
        in_chunks = chunks > 1 and check_rows(who, fn, rows, owner, chunks, or_whole)
    except StandIn:
        return fn(*args, **kwargs)
    except NotRows as error:
        if not or_whole:
            raise
        warn(
            f"Plan.apply: {type(subject).__name__}, planned in chunks of rows, runs whole, so that "
            f"a step may take more than the budget: {error.why}"
        )
        in_chunks = False
    if not in_chunks:
        return region(*args, **kwargs)
    return run_in_chunks(who, subject, rows, chunks, region)


def compiled_region(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> Any:
    """Calls a region under torch.compile: it becomes the operator of PyTorch's own checkpoint.

    The operator must not write to a cache. With a cache this is the plain call, which the
    compiler's partitioner cuts. So it is in torch.export, whose programs have no backward and whose
    strict mode cannot run the operator.
    """
    if torch.compiler.is_exporting():
        return fn(*args, **kwargs)
    if may_have_caches() and has_cache(args, kwargs):
        return fn(*args, **kwargs)
    return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **options, **kwargs)


def _check_options(
    use_reentrant: bool | None, context_fn: ContextFn, determinism_check: str, debug: bool
) -> None:
    check_flags("checkpoint", use_reentrant=use_reentrant is not None and use_reentrant)
    if use_reentrant:
        raise ValueError(
            "checkpoint: use_reentrant must be False (memopt's regions are never reentrant), got "
            f"{use_reentrant}"
        )
    if determinism_check not in _DETERMINISM_CHECKS:
        raise ValueError(
            f"checkpoint: determinism_check must be one of {_DETERMINISM_CHECKS}, got "
            f"{determinism_check!r}"
        )
    if debug and context_fn is not _no_contexts:
        raise ValueError(
            f"checkpoint: debug must not be combined with a context_fn, got {context_fn}"
        )


def run_inside(
    contexts: Sequence[ContextFn],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: _C.RegionSettings,
    owner: nn.Module | None = None,
) -> Any:
    """`run_region`, with forward and recompute in contexts, the first ones outermost."""
    if may_have_caches() and has_cache(args, kwargs) and is_region():
        fn, args, kwargs = with_caches(fn, args, kwargs, owner)
    forward, again = fn, fn
    for make in reversed(contexts):
        in_forward, in_recompute = make()
        if is_region():
            forward, again = _inside(in_forward, forward), _inside(in_recompute, again)
    if again is not fn:
        settings = settings.with_again(again)
    return run_region(forward, args, kwargs, settings, owner)


def _inside(context: AbstractContextManager[Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` in a context, which may see an exception and must not end it: there is no result."""

    scope = cast("AbstractContextManager[Any, bool]", context)

    def call(*args: Any, **kwargs: Any) -> Any:
        ended: BaseException | None = None
        try:
            with scope:
                try:
                    return fn(*args, **kwargs)
                except BaseException as error:
                    ended = error
                    raise
            if isinstance(ended, _C.Stop):
                raise ended
            raise RuntimeError(
                "checkpoint: a context of context_fn must not end an exception, since a region "
                f"that failed has no result, got {type(context).__name__}, which ended {ended!r}"
            ) from ended
        finally:
            ended = None  # whose traceback holds this frame

    call.__wrapped__ = fn  # type: ignore[attr-defined]
    return call
