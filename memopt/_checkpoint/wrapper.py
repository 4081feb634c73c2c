"""checkpoint_wrapper: a module whose every forward is a checkpointed region.

The module stays the object that it is, with its class, methods and attributes
(memopt/_forwards.py says how).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from memopt._arguments import check_flags
from memopt._checkpoint.chunks import checked_chunks
from memopt._checkpoint.decisions import decision_contexts
from memopt._checkpoint.joined import Joined
from memopt._checkpoint.partition import Partition, PartitionChoice, partition_of
from memopt._checkpoint.region import compiled_region, run_chunks, run_inside
from memopt._checkpoint.settings import fate_of_arguments, region_settings
from memopt._checkpoint.uncompiled import say_without_effect
from memopt._class_patch import check_can_patch
from memopt._compat import checkpoint_options_set_globally
from memopt._extension import _C
from memopt._forwards import around_forward, put_around_forward, take_from_forward
from memopt.memory.modules import seen_modules
from memopt.memory.parallel import gathers_parameters
from memopt.place import Place

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# Where a wrapped module keeps what checkpoint_buffers has put on it.
BUFFERS = "_memopt_checkpoint_buffers"
# FairScale's name for it, since code outside reads it.
_COUNTER = "_checkpoint_fwd_counter"


@dataclass(frozen=True)
class Settings:
    """The options with which a wrapped module runs its region."""

    offload: Place | None
    """The place where the region's inputs wait for the recompute; None: where they are."""

    maintain_forward_counter: bool
    """Count forwards that wait for their recompute on every submodule."""

    partition: Partition | None = None
    """The ranks that keep a part each of these tensors; None: this one keeps them whole."""

    preserve_rng_state: bool = True
    """Draw the same random numbers in the recompute."""

    early_stop: bool = True
    """End the recompute as soon as the last tensor that backward wants is there."""

    chunks: int | None = None
    """The number of chunks of rows that each call runs in; None: it runs whole."""

    or_whole: bool = False
    """A call that cannot run in chunks runs whole, with a warning: a plan chose them, not a user.
    """

    keep_decisions: bool = False
    """Keep from forward what the module chooses by values."""

    joined: Joined | None = None
    """The region that the module shares with others, which has the settings of its first one; where
    FSDP gathers parameters for one module at a time, it is a region of its own."""

    number: int = 0
    """The module's number among these."""

    alone: bool = True
    """Whether the module is a region of its own; with `joined`, inside the shared one."""


def checkpoint_wrapper(
    module: ModuleT,
    offload_to_cpu: bool = False,
    maintain_forward_counter: bool = False,
    *,
    offload: Place | None = None,
    partition: PartitionChoice = None,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    chunks: int | None = None,
    keep_decisions: bool = False,
) -> ModuleT:
    """Make every forward of `module` a checkpointed region (see `memopt.checkpoint`).

    Wrapping a module again replaces its settings; `unwrap` undoes the wrapping. Its class, methods
    and attributes stay what they are (docs/checkpointing.md says how). The module may be copied,
    pickled and saved like any other; a pickle of it needs memopt to load. What PyTorch copies by
    its graph alone, a torch.fx.GraphModule, has copies that are not wrapped.

    A cache of keys and values of transformers is that of the plain call, see `memopt.checkpoint`.

    Args:
        module: changed in place. A `forward` set on the instance is kept: the region runs it.
        offload_to_cpu: FairScale's name for offload="cpu". Any object is taken by its truth value.
        maintain_forward_counter: keep an integer `_checkpoint_fwd_counter` on every submodule, +1
            with each forward of `module` and -1 with each recompute, for code that must know
            whether a forward is the last. Not kept under `torch.compile`.
        offload: "cpu", "disk" or a directory (a `pathlib.Path`): the tensors among the arguments
            wait there for the recompute, see `memopt.checkpoint`. What host memory holds already
            stays with "cpu". No effect under `torch.compile`.
        partition: a process group (`torch.distributed.ProcessGroup`), a `DeviceMesh` of one dim, or
            True for the default group. Its N ranks hold identical tensors among the arguments, as
            with tensor parallelism. Each keeps 1/N of their bytes (rounded up to 16), and backward
            gathers them: one all-gather per region, begun when the region after it starts its
            backward. With `offload` the parts wait there. Tensors that differ are kept whole; see
            docs/partition.md for what is taken, its cost, and what all ranks have to do equally.
            A pickle of the module finds the group of the same name again. A group of one rank has
            no effect, and nothing has under `torch.compile`.
        preserve_rng_state: draw the same random numbers in the recompute. While a CUDA graph is
            captured the generator's state cannot be read: False, for modules that draw none.
        early_stop: end the recompute as soon as it has made the last tensor that backward wants;
            as everywhere, `torch.utils.checkpoint.set_checkpoint_early_stop` goes before it. Has no
            effect where the module holds one of TorchScript.
        chunks: run each call in that many chunks of rows, also without gradients, see
            `memopt.checkpoint`. The module's own hooks see the whole call, those of modules inside
            see the chunks. Whether the module works on each row alone is known at its first call.
            No effect under `torch.compile`.
        keep_decisions: keep from forward which experts, samples or sizes the module chooses, and
            use them in the recompute, see `memopt.checkpoint`. No effect under `torch.compile`.

    Returns:
        `module`, the same object.

    Raises:
        TypeError: `module` is no `nn.Module`, is a ScriptModule, or has no forward
            (nn.ModuleList); a flag is neither True nor False; `partition` is no group, mesh or
            True; `chunks` is no int.
        ValueError: `chunks` is below 1; `offload` names no place, or not the one that
            `offload_to_cpu` does; `partition` has several dims, there is no process group, or this
            rank is not in it.
        OSError: no file can be made in the directory.
    """
    check_can_patch("checkpoint_wrapper", "module", module)
    check_flags(
        "checkpoint_wrapper",
        maintain_forward_counter=maintain_forward_counter,
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
        keep_decisions=keep_decisions,
    )
    if offload_to_cpu and offload not in (None, "cpu"):
        raise ValueError(
            f"checkpoint_wrapper: offload must be 'cpu' with offload_to_cpu=True, got {offload!r}"
        )
    place = "cpu" if offload_to_cpu else offload
    fate_of_arguments("checkpoint_wrapper: offload", place)
    ranks = partition_of("checkpoint_wrapper", partition)
    count = checked_chunks("checkpoint_wrapper", chunks)
    if not has_forward(module):
        raise TypeError(
            "checkpoint_wrapper: module must have a forward, which is what runs as a region, got "
            f"{type(module).__name__}, which is never called itself; wrap the modules in it"
        )
    set_settings(
        module,
        Settings(
            place,
            maintain_forward_counter,
            ranks,
            preserve_rng_state,
            early_stop,
            count,
            keep_decisions=keep_decisions,
        ),
    )
    return module


def unwrap(module: ModuleT) -> ModuleT:
    """Undo `checkpoint_wrapper` on `module` and on all of its submodules.

    Modules that are not wrapped are left as they are.

    Returns:
        `module`, the same object.

    Raises:
        TypeError: `module` is not an `nn.Module`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"unwrap: module must be an nn.Module, got {type(module).__name__}")
    for submodule in module.modules():
        if settings_of(submodule) is not None:
            unwrap_itself(submodule)
    return module


def unwrap_itself(module: nn.Module) -> None:
    """`unwrap`, of this module alone, which is wrapped."""
    set_settings(module, None)
    module.__dict__.pop(BUFFERS, None)


def settings_of(module: nn.Module) -> Settings | None:
    """The settings with which `module` is wrapped; None if it is not."""
    around = around_forward(module)
    return None if around is None else around.settings


def has_forward(module: nn.Module) -> bool:
    """Whether Python calls a forward of `module`: nn.ModuleList, nn.ModuleDict and nn.ParameterList
    have none, and TorchScript's runs without Python.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    forward = inspect.getattr_static(type(module), "forward")
    return forward is not nn.Module.forward or "forward" in module.__dict__


def _region(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A wrapped module's forward. Pickles contain this name."""
    settings = settings_of(module)
    assert settings is not None
    if torch.compiler.is_compiling():
        say_without_effect(
            "checkpoint_wrapper",
            offload=settings.offload,
            partition=settings.partition,
            chunks=settings.chunks,
            keep_decisions=settings.keep_decisions,
        )
        return compiled_region(forward, args, kwargs)
    joined = settings.joined
    if joined is not None and not gathers_parameters(module):
        run = functools.partial(_alone, module, forward, settings) if settings.alone else forward
        shared = replace(settings, joined=None, number=0, maintain_forward_counter=False)
        options = _region_settings(shared, False)
        return joined.call(settings.number, module, run, args, kwargs, options)
    return _alone(module, forward, settings, *args, **kwargs)


def _alone(
    module: nn.Module, forward: Callable[..., Any], settings: Settings, /, *args: Any, **kwargs: Any
) -> Any:
    settings = settings if settings.joined is None else replace(settings, joined=None, number=0)
    check_partition = settings.partition is not None and bool(checkpoint_options_set_globally()[1])
    buffers = module.__dict__.get(BUFFERS)
    options_of = _region_settings if buffers is None else buffers.region_settings
    options = options_of(settings, check_partition)

    def region(*args: Any, **kwargs: Any) -> Any:
        contexts = [decision_contexts] if settings.keep_decisions else []
        return run_inside(contexts, forward, args, kwargs, options, module)

    if settings.chunks is None:
        return region(*args, **kwargs)
    chunks, who = settings.chunks, "checkpoint_wrapper"
    return run_chunks(who, forward, args, kwargs, chunks, region, module, settings.or_whole)


def region_settings_of(
    settings: Settings, check_partition: bool, buffers: _C.Buffers | None = None
) -> _C.RegionSettings:
    """The settings for the engine. `buffers` take the arguments, or this rank's parts of them, that
    do not leave the device.
    """
    place = fate_of_arguments("checkpoint_wrapper: offload", settings.offload)
    return region_settings(
        arguments=buffers if place == "keep" and buffers is not None else place,
        preserve_rng_state=settings.preserve_rng_state,
        early_stop=settings.early_stop,
        partition=settings.partition,
        check_partition=check_partition,
        on_pass=_count if settings.maintain_forward_counter else None,
    )


_region_settings = functools.cache(region_settings_of)


def set_settings(module: nn.Module, settings: Settings | None) -> None:
    """Wrap `module` with these settings, which were checked; None: unwrap it."""
    before = settings_of(module)
    if settings is None:
        take_from_forward(module)
    else:
        if len(seen_modules(module)) < len(list(module.modules())):
            # What ends a recompute early does not pass through TorchScript.
            settings = replace(settings, early_stop=False)
        put_around_forward(module, _region, settings)
    if settings is not None and settings.maintain_forward_counter:
        _count(module, 0)
    elif before is not None and before.maintain_forward_counter:
        for submodule in module.modules():
            submodule.__dict__.pop(_COUNTER, None)


def _count(module: nn.Module | None, step: int) -> None:
    assert module is not None
    for submodule in module.modules():
        submodule.__dict__[_COUNTER] = submodule.__dict__.get(_COUNTER, 0) + step
