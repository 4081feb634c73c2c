"""What a result depends on besides arguments: random generators, autocast, default device.

A region takes a snapshot when its forward begins and replays it around the recompute.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class AutocastState(NamedTuple):
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @classmethod
    def current(cls, device_type: str) -> AutocastState:
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )


@dataclass
class AmbientState:
    generators: dict[torch.device, Tensor]
    """State of each random generator at the beginning of forward."""
    autocast: list[AutocastState]
    default_device: torch.device
    """Where factory functions allocate; PyTorch keeps it per thread, so backward's may differ."""

    @classmethod
    def capture(cls, devices: Iterable[torch.device]) -> AmbientState:
        """Snapshot for the CPU, `devices`, and the current device of the accelerator in use."""
        involved = {torch.device("cpu"), *devices, *_accelerator_in_use()}
        return cls(
            {device: _generator_state(device) for device in involved if _has_generator(device)},
            [
                AutocastState.current(device_type)
                for device_type in sorted({device.type for device in involved})
                if torch.amp.is_autocast_available(device_type)
            ],
            torch.get_default_device(),
        )

    def keep_generators_that_moved(self) -> None:
        """Forget the generators that forward did not use, so that replaying leaves them alone.

        Besides the time, this keeps recomputes that draw nothing out of each other's way when
        several threads run backward at once.
        """
        self.generators = {
            device: state
            for device, state in self.generators.items()
            if _bits(state) != _bits(_generator_state(device))
        }

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run a scope in this state; afterwards everything is as it was before the scope."""
        with ExitStack() as scope:
            # In one order for all threads, since each generator is locked while it is replayed.
            for device in sorted(self.generators, key=str):
                scope.enter_context(_generator_replayed(device, self.generators[device]))
            for state in self.autocast:
                if state != AutocastState.current(state.device_type):
                    scope.enter_context(_autocast(state))
            if self.default_device != torch.get_default_device():
                scope.enter_context(self.default_device)
            yield


def _autocast(state: AutocastState) -> torch.autocast:
    return torch.autocast(
        state.device_type,
        dtype=state.dtype,
        enabled=state.enabled,
        cache_enabled=state.cache_enabled,
    )


# A generator is shared by the process. Two threads that replay it at once would draw each other's
# numbers, so they take turns.
_generator_locks: dict[torch.device, threading.RLock] = {}


@contextmanager
def _generator_replayed(device: torch.device, state: Tensor) -> Iterator[None]:
    with _generator_locks.setdefault(device, threading.RLock()):
        before = _generator_state(device)
        _set_generator_state(device, state)
        try:
            yield
        finally:
            _set_generator_state(device, before)


def _has_generator(device: torch.device) -> bool:
    """False for devices that hold no data, such as meta."""
    module = torch if device.type == "cpu" else getattr(torch, device.type, None)
    return hasattr(module, "get_rng_state")


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    # torch.mps has one device and its functions take none.
    state: Tensor = module.get_rng_state(*(() if device.type == "mps" else (device,)))
    return state


def _bits(state: Tensor) -> bytes:
    """Past the dispatcher, where a mode (fake tensors, a logger of operators) could interfere."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        module = torch.get_device_module(device)
        module.set_rng_state(state, *(() if device.type == "mps" else (device,)))


def _accelerator_in_use() -> list[torch.device]:
    """The current accelerator device, unless asking would start an accelerator nobody uses."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_initialized is not None and not is_initialized():
        return []
    return [torch.device(accelerator.type, torch.accelerator.current_device_index())]
