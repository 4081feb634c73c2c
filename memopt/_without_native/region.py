"""Regions without the native engine: they are PyTorch's own non-reentrant checkpoint.

Losses, gradients and what is kept for backward are the same. Host time is PyTorch's, and arguments
cannot be offloaded or partitioned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint as torch_checkpoint

from memopt._compat import tracing_state
from memopt._without_native.flags import Flags, flags, set_flags
from memopt._without_native.missing import NativeLibraryMissing
from memopt._without_native.modules_reached import modules_reached

# What ends a recompute as soon as it can.
Stop = torch_checkpoint._StopRecomputationError


@dataclass(frozen=True)
class RegionSettings:
    """How a region runs; memopt/_checkpoint/settings.py says what each means."""

    call_uncompiled: Callable[..., Any]
    region_name: Callable[[object], str]
    hold_statistics: Callable[[list[nn.Module]], Callable[[], None]]
    preserve_rng_state: bool = True
    check_metadata: bool = True
    early_stop: bool = True
    arguments: object = "keep"
    partition: None = None
    check_partition: bool = False
    on_pass: Callable[[nn.Module | None, int], None] | None = None
    on_saved: Callable[[Tensor], None] | None = None
    again: Callable[..., Any] | None = None
    diagnose: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        if self.diagnose is not None:
            raise NativeLibraryMissing("checkpoint(debug=True)")
        if self.on_saved is not None:
            raise NativeLibraryMissing("checkpoint_sequential(segments='optimal')")

    def with_early_stop(self, early_stop: bool, /) -> RegionSettings:
        """Settings equal to these but for whether a recompute ends as soon as it can."""
        return replace(self, early_stop=early_stop)

    def with_again(self, again: Callable[..., Any] | None, /) -> RegionSettings:
        """Settings equal to these but for what a recompute calls in place of the function."""
        return replace(self, again=again)


def run_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: RegionSettings,
    owner: nn.Module | None,
    /,
) -> Any:
    """Call `fn` as a region: what it saves is dropped, and recomputed in backward."""
    if _is_plain_call():
        return fn(*args, **kwargs)
    first = not flags().recomputing
    passes = [fn]

    def count(step: int) -> None:
        if first and settings.on_pass is not None:
            settings.on_pass(owner, step)

    @contextmanager
    def forward() -> Iterator[None]:
        count(+1)
        try:
            with _with_flags(Flags(checkpointing=first, recomputing=not first)):
                yield
        except BaseException:
            count(-1)
            raise

    @contextmanager
    def recompute() -> Iterator[None]:
        passes.append(settings.again or fn)
        count(-1)
        give_back = settings.hold_statistics(_norm_layers(fn, args, kwargs))
        try:
            with _with_flags(Flags(recomputing=True)):
                yield
        finally:
            give_back()

    return torch_checkpoint.checkpoint(
        lambda *args, **kwargs: passes[-1](*args, **kwargs),
        *args,
        use_reentrant=False,
        preserve_rng_state=settings.preserve_rng_state,
        context_fn=lambda: (forward(), _EnteredAgain(recompute)),
        determinism_check="default" if settings.check_metadata else "none",
        early_stop=settings.early_stop,
        **kwargs,
    )


class _EnteredAgain:
    """A context that is made anew each time: a graph that is retained recomputes several times."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._context = context
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._context())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def refuses_hooks(error: BaseException, /) -> bool:
    """Whether this is PyTorch's error for a transform of torch.func inside saved-tensor hooks."""
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and "torch.func" in text
        and "saved tensor hooks" in text
        and "memopt" not in text
    )


def _is_plain_call() -> bool:
    """Whether nothing would be saved, or what is saved cannot be exchanged."""
    transform = torch._C._functorch.maybe_current_level()
    return (
        flags().disabled
        or not torch.is_grad_enabled()
        or tracing_state() is not None
        or transform is not None
    )


@contextmanager
def _with_flags(set: Flags) -> Iterator[None]:
    before = set_flags(replace(set, disabled=False))
    try:
        yield
    finally:
        set_flags(before)


def _norm_layers(*roots: object) -> list[nn.Module]:
    """Layers in training that have running statistics."""
    return [
        module
        for module in modules_reached(*roots)
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None
    ]
