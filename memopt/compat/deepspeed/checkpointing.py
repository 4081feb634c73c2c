"""`deepspeed.checkpointing` on memopt's regions.

A region here is what `memopt.checkpoint` makes of a call, with all that it promises: any arguments
and results, `autograd.grad`, several backwards, autocast, statistics of batch norm, errors for what
was written in place. `docs/compat.md` says what differs from DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from memopt._arguments import check_count
from memopt._checkpoint.partition import partition_of
from memopt._checkpoint.region import is_region, run_region
from memopt._checkpoint.settings import fate_of_arguments, region_settings
from memopt._extension import _C
from memopt.compat.deepspeed.options import WHO, Options, options_of
from memopt.compat.deepspeed.random import MODEL_PARALLEL, CudaRNGStatesTracker, seed_generator
from memopt.compat.deepspeed.timings import Clock, Pass, Timings, synchronized

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "Timings",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
    "timings",
]

# DeepSpeed's distance between the seed that a group shares and those of its ranks.
_SEED_DISTANCE = 2718


class _Checkpointing:
    """All state of this module."""

    def __init__(self) -> None:
        self.is_configured = False
        self.mpu: Any = None
        self.tracker = CudaRNGStatesTracker()
        self.clock = Clock()
        self.options = Options()
        self.buffers: _C.Buffers | None = None
        self.settings = region_settings()

    def configure(self, mpu: Any, options: Options) -> None:
        """Raises before anything has changed."""
        group = _group_of(mpu) if options.partition_activations else None
        partition = partition_of(WHO, group)
        place = fate_of_arguments(WHO, "cpu" if options.checkpoint_in_cpu else None)
        # Host memory is allocated once and used again anyway (memopt.offload's pool).
        is_buffered = options.contiguous_checkpointing and not options.checkpoint_in_cpu
        buffers = (self.buffers or _C.Buffers()) if is_buffered else None
        self.settings = region_settings(
            arguments=place if buffers is None else buffers, partition=partition
        )
        if self.buffers is not None and buffers is None:
            self.buffers.remove()
        self.mpu, self.options, self.buffers = mpu, options, buffers

    def reset(self) -> None:
        if self.buffers is not None:
            self.buffers.remove()
            self.buffers = None
            self.configure(self.mpu, self.options)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not callable(function):
            raise TypeError(
                "deepspeed.checkpointing.checkpoint: function must be callable, got "
                f"{type(function).__name__}"
            )
        options = self.options
        if is_region() and (self.tracker.states_ or options.synchronize or options.profile):
            function = _Passes(function, self)
        return run_region(function, args, kwargs, self.settings)


class _Passes:
    """A function as a region calls it: in forward, and then in each recompute, which finds the
    states of the tracker as they were in forward and leaves them as they are.
    """

    def __init__(self, function: Callable[..., Any], state: _Checkpointing) -> None:
        self.__wrapped__ = function
        self._tracker = state.tracker
        self._clock = state.clock if state.options.profile else None
        self._synchronize = state.options.synchronize
        self._states: dict[str, Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self._tracker.get_states()
        if self._states is None:
            self._states = before
            return self._run("forward", args, kwargs)
        self._tracker.set_states(self._states)
        try:
            return self._run("recompute", args, kwargs)
        finally:
            self._tracker.set_states(before)

    def _run(self, name: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ExitStack() as around:
            if self._synchronize:
                around.enter_context(synchronized())
            if self._clock is not None:
                around.enter_context(self._clock.time(name))
            return self.__wrapped__(*args, **kwargs)


_state = _Checkpointing()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how the regions that are called from now on run. An argument that is None is that of
    `deepspeed_config`, or the default. After an error everything is as it was.

    Args:
        mpu_: an object with `get_model_parallel_rank` and `get_model_parallel_group` (or
            `get_tensor_model_parallel_rank` and so on), as Megatron's. None: the one before.
        deepspeed_config: a dict, or the path of a JSON file, with a section
            "activation_checkpointing": partition_activations, contiguous_memory_optimization,
            number_checkpoints, cpu_checkpointing, synchronize_checkpoint_boundary, profile.
        partition_activations: each rank of the model-parallel group keeps its part of a region's
            inputs, see `partition` of `memopt.checkpoint`. Without `mpu_` or with a group of one
            rank there is nothing to part.
        contiguous_checkpointing: inputs (or their parts) are copied into memory that is allocated
            once, see `memopt.checkpoint.buffers`. Needs no other option; sizes may differ.
        num_checkpoints: taken and not needed: the first step says how many there are.
        checkpoint_in_cpu: inputs (or their parts) wait in host memory, see `memopt.offload`.
        synchronize: wait for the device at the beginning and end of each region's forward and
            recompute.
        profile: time each region's forward and recompute: `timings()`, and the logger
            "memopt.compat.deepspeed" at level INFO.

    Raises:
        TypeError: an argument, or a value of the configuration, is of the wrong type.
        ValueError: `num_checkpoints` is less than 1, an unknown key, or an unusable group.
        OSError: the configuration cannot be read.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    options = options_of(deepspeed_config, given)
    _state.configure(_state.mpu if mpu_ is None else mpu_, options)
    _state.is_configured = True


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _state.is_configured


def checkpoint(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function` as a checkpointed region; returns the very object that it returns.

    (DeepSpeed returns a tuple for a list, and its element for a tuple of one.)
    """
    return _state.run(function, args, kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], /, *args: Any) -> Any:
    """Checkpoints a call as `checkpoint` does: every region here is non-reentrant."""
    return _state.run(function, args, {})


class CheckpointFunction:
    """A stand-in for DeepSpeed's autograd function, for code that calls that itself."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Adds what the region returns to `all_outputs`, and returns its tensors: one as it is,
        several as a tuple.
        """
        outputs = _state.run(run_function, args, {})
        if isinstance(outputs, Tensor):
            all_outputs.append(outputs)
            return outputs
        all_outputs.extend(outputs)
        return tuple(output for output in outputs if isinstance(output, Tensor))


def reset() -> None:
    """Give the memory of `contiguous_checkpointing` back; the next step learns again. Never needed:
    not after an evaluation either.
    """
    _state.reset()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """`configure(partition_activations=)`, and nothing else changes."""
    _state.configure(
        _state.mpu, replace(_state.options, partition_activations=partition_activation)
    )


def set_num_layers(nlayers: int | None) -> None:
    """`configure(num_checkpoints=)`, and nothing else changes."""
    if nlayers is not None:
        check_count("deepspeed.checkpointing.set_num_layers", "nlayers", nlayers)
    _state.configure(_state.mpu, replace(_state.options, num_checkpoints=nlayers))


def timings(*, reset: bool = False) -> Timings:
    """Return how often regions ran, and how long, in seconds, with `configure(profile=True)`.

    Args:
        reset: set all counts to zero after this.
    """
    return _state.clock.read(reset)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The states of the random numbers that differ between ranks. In a region's recompute they are
    what they were in its forward.
    """
    return _state.tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generator with `seed`, and the state of `get_cuda_rng_tracker().fork()` with
    `seed + 2718 +` the rank in the model-parallel group of `configure(mpu_)`, 0 without one.
    """
    _state.tracker.reset()
    seed_generator(seed)
    _state.tracker.add(MODEL_PARALLEL, seed + _SEED_DISTANCE + _model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the state of `fork()` alone, as `model_parallel_cuda_manual_seed` does among others.

    Raises:
        ValueError: there is no such state yet.
    """
    with _state.tracker.fork():
        seed_generator(seed + _SEED_DISTANCE + _model_parallel_rank())


def _model_parallel_rank() -> int:
    mpu = _state.mpu
    if mpu is None:
        return 0
    if hasattr(mpu, "get_tensor_model_parallel_rank"):
        return int(mpu.get_tensor_model_parallel_rank())
    return int(mpu.get_model_parallel_rank())


def _group_of(mpu: Any) -> Any:
    """The process group whose ranks hold identical inputs of a region; None where there is none."""
    if mpu is None:
        return None
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    raise TypeError(
        f"{WHO}: mpu_ must have get_model_parallel_group with partition_activations=True, got "
        f"{type(mpu).__name__}"
    )
