"""checkpoint.buffers: the inputs of a model's regions, in memory that is allocated once.

The engine is C++ (csrc/saved/buffered.h). This file picks the modules, and reports the counts.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from memopt._checkpoint.wrapper import BUFFERS, Settings, region_settings_of, settings_of
from memopt._extension import _C
from memopt.memory.asked import check_module
from memopt.memory.batches import arguments_of
from memopt.memory.unchanged import unchanged

__all__ = ["CheckpointBuffers", "DeviceBuffers", "RunsSteps", "checkpoint_buffers"]


@runtime_checkable
class RunsSteps(Protocol):
    """An object that can run a step of the model by itself, as a `memopt.Plan` can."""

    def run_step(self) -> object:
        """Runs one forward and backward; nothing stays of it."""


@dataclass(frozen=True)
class DeviceBuffers:
    """The buffers of one device."""

    device: str
    slab_bytes: int
    """Bytes of the slab, which is allocated once."""
    in_use: int
    """Bytes of the slab that are in use now."""
    high_water: int
    """The most bytes of the slab that were in use at one time."""
    kept_bytes: int
    """Bytes of inputs kept as usual now: of the first step, and those that found no space."""
    steps: int
    copies: int
    copied_bytes: int
    fallbacks: int
    """Inputs that found no space in the slab, and were kept."""
    fallback_bytes: int
    relearned: int
    """How often another slab took the place of the first."""
    found_elsewhere_bytes: int
    """Bytes of wasted copies: something else held the input when backward wanted it."""
    fragmented_bytes: int | None
    """Bytes that the device's allocator in PyTorch has reserved beyond those it has allocated. None
    where it does not say, as on the CPU."""


class CheckpointBuffers:
    """The buffers that `checkpoint_buffers` has put on a model. As a context: until its end."""

    def __init__(self, buffers: _C.Buffers, modules: list[nn.Module]) -> None:
        self._buffers = buffers
        self._modules = [weakref.ref(module) for module in modules]

    def stats(self) -> tuple[DeviceBuffers, ...]:
        """One row for each device on which regions had inputs; none before the first step."""
        rows = self._buffers.stats()
        return tuple(
            DeviceBuffers(**row, fragmented_bytes=_fragmented(row["device"])) for row in rows
        )

    def remove(self) -> None:
        """Take the buffers off the model. Their memory is given back now, or when the last graph is
        gone that needs some of it.
        """
        for reference in self._modules:
            module = reference()
            attached = None if module is None else module.__dict__.get(BUFFERS)
            if attached is not None and attached.buffers is self._buffers:
                del module.__dict__[BUFFERS]
        self._buffers.remove()

    def __enter__(self) -> CheckpointBuffers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def checkpoint_buffers(model: nn.Module, batch: Any = None) -> CheckpointBuffers:
    """Keep the inputs of all wrapped modules of `model` in one piece of memory for each device.

        memopt.apply_activation_checkpointing(model)
        buffers = memopt.checkpoint.buffers(model)
        train(model)
        print(buffers.stats())

    The input of a checkpointed region lives from its forward until its backward, while everything
    around it comes and goes. With this it is copied into a slab that is allocated once and used
    again in every step: the device's allocator has nothing long-lived between what is short-lived,
    which is what fragments it. Results are those of the plain run in every bit.

    The first step keeps inputs as usual and learns when each comes and goes. The second begins with
    a slab of exactly the bytes that are needed at one time (each input rounded up to 512). An input
    that finds no space, since the step differs (a larger batch, more regions, another order, a
    second forward before the backward), is kept as usual, and the next step gets a slab for that
    one. After 16 steps in a row that need less there is a smaller one. A step ends when no graph
    holds an input any more; in a loop in which some graph is always alive, when four times as many
    inputs have come as were held at one time (at least 64). Nothing has to be reset.

    A piece of memory is used again only when nothing reads it any more: graphs that are retained or
    differentiated twice, or a user, may go on with what the recompute was given. Writing to that in
    place raises an error in a second backward, and writing to the input itself in the first, as
    without buffers. What several regions share is copied once. Parameters and other leaves that
    require a gradient, subclasses of Tensor, tensors that something else holds from step to step (a
    mask that is a buffer of a module), the inputs of regions inside regions, and those of modules
    wrapped with `offload`, stay where they are.

    It costs one copy of each region's input; for that moment both of them are allocated. It does
    not lower the count of allocated bytes. It helps where memory is fragmented, that is where
    `fragmented_bytes` is much, as with inputs whose lengths vary. A model whose input is
    held elsewhere until backward (by the training loop, by an op outside of the regions that saves
    it) has it twice; `found_elsewhere_bytes` says how much that is.

    Copies of the model (deepcopy, pickle) have no buffers. Under torch.compile it has no effect. A
    step that is captured in a CUDA graph must come after the slab was made, and all steps must
    have inputs of the same sizes in the same order.

    Args:
        model: modules in it are wrapped with `checkpoint_wrapper` or
            `apply_activation_checkpointing`.
        batch: to make the slab now, from a forward with this: a tensor, a tuple or list of
            positional arguments or a mapping of keyword arguments; or from a step of a
            `memopt.Plan` of this model. The model, its gradients and random numbers are afterwards
            as before. None: from the first step.

    Returns:
        The buffers: `stats()`, and `remove()`, which takes them off the model.

    Raises:
        TypeError: `model` is not an `nn.Module`.
        ValueError: no module of `model` is wrapped, or one has buffers already.

    Source: DeepSpeed's contiguous_memory_optimization (Rajbhandari et al., "ZeRO: Memory
    Optimizations Toward Training Trillion Parameter Models", 2020, section 6.3), which needs the
    number of regions and inputs of equal size.
    """
    check_module("checkpoint.buffers", model)
    wrapped = [module for module in model.modules() if settings_of(module) is not None]
    if not wrapped:
        raise ValueError(
            "checkpoint.buffers: model must have modules that are wrapped with "
            "memopt.checkpoint_wrapper or memopt.apply_activation_checkpointing, got "
            f"{type(model).__name__} without one"
        )
    if any(module.__dict__.get(BUFFERS) is not None for module in wrapped):
        raise ValueError(
            "checkpoint.buffers: model must not have buffers already, got "
            f"{type(model).__name__} with some; remove() them first"
        )
    engine = _C.Buffers()
    attached = _Attached(engine)
    for module in wrapped:
        module.__dict__[BUFFERS] = attached
    buffers = CheckpointBuffers(engine, wrapped)
    if batch is None:
        return buffers
    try:
        if isinstance(batch, RunsSteps):
            batch.run_step()
        else:
            _run(model, batch)
    except BaseException:
        buffers.remove()
        raise
    engine.settle([*model.parameters(), *model.buffers()])
    return buffers


class _Attached:
    """A wrapped module's link to its buffers; a copy of the module has none."""

    def __init__(self, buffers: _C.Buffers) -> None:
        self.buffers = buffers
        self._settings: dict[tuple[Settings, bool], _C.RegionSettings] = {}

    def region_settings(self, settings: Settings, check_partition: bool) -> _C.RegionSettings:
        """The region's settings for a module that is wrapped with `settings`."""
        made = self._settings.get((settings, check_partition))
        if made is None:
            made = region_settings_of(settings, check_partition, self.buffers)
            self._settings[settings, check_partition] = made
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    """Pickles contain this name."""
    return


def _run(model: nn.Module, batch: Any) -> None:
    args, kwargs = arguments_of(batch)
    with unchanged(model, args, kwargs), torch.enable_grad():
        model(*args, **kwargs)


def _fragmented(device: str) -> int | None:
    if torch.device(device).type == "cpu" or not torch.accelerator.is_available():
        return None
    try:
        reserved = torch.accelerator.memory_reserved(device)
        return int(reserved - torch.accelerator.memory_allocated(device))
    except (AttributeError, RuntimeError):  # an allocator that does not count
        return None
