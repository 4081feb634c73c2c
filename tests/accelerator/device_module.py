"""torch.sim: what PyTorch looks for in the module of a device type."""

from __future__ import annotations

import ctypes
from types import TracebackType

import torch

library: ctypes.CDLL = None  # type: ignore[assignment]  # sim.load() sets it

DEVICES = 2  # kDevices of backend/streams.h

_Device = int | str | torch.device


def _index(device: _Device | None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


_initialized = True  # torch.utils.checkpoint asks


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return DEVICES


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_index(device))


class device:
    """Makes a device the current one in a context."""

    def __init__(self, device: _Device) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        set_device(self.before)


def current_stream(device: _Device | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def synchronize(device: _Device | None = None) -> None:
    torch.accelerator.synchronize(_index(device))


def manual_seed(seed: int) -> None:
    _set_state(current_device(), seed, 0)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _set_state(index, seed, 0)


def get_rng_state(device: _Device | None = None) -> torch.Tensor:
    words = (ctypes.c_uint64 * 2)()
    library.sim_generator_state(_index(device), words)
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: _Device | None = None) -> None:
    seed, offset = state.view(torch.int64).tolist()
    _set_state(_index(device), seed, offset)


def _set_state(index: int, seed: int, offset: int) -> None:
    library.sim_set_generator_state(index, ctypes.c_uint64(seed), ctypes.c_uint64(offset))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
