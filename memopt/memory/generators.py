"""Random numbers."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from memopt.memory.containers import Restore


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return what reads and what sets the state of a generator of PyTorch, Python or NumPy; None
    for any other object, and for one without a state.
    """
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        is_of_system = isinstance(value, random.SystemRandom)
        return None if is_of_system else (value.getstate, value.setstate)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        return partial(value.get_state, legacy=False), value.set_state
    bits = value.bit_generator if isinstance(value, numpy.Generator) else value
    if isinstance(bits, numpy.BitGenerator):
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


def kept_generator(value: object) -> Restore | None:
    """Restores a generator; None for any other object."""
    access = _access(value)
    if access is None:
        return None
    read, write = access
    return _set(write, read())


def generator_state(value: object) -> object:
    """The state of a generator, to be compared; None for any other object."""
    access = _access(value)
    if access is None:
        return None
    state = access[0]()
    return pickle.dumps(state) if isinstance(state, dict) else state  # NumPy's, of arrays


def state_for_all() -> dict[str, object]:
    """The states of the generators that Python and NumPy have for all, by name."""
    found: dict[str, object] = {"the state of Python's random": random.getstate()}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        found["the state of numpy.random"] = pickle.dumps(numpy.get_state(legacy=False))
    return found


def kept_random(devices: Iterable[torch.device]) -> list[Restore]:
    """The generators that all share: of PyTorch's CPU and of `devices`, of Python and of NumPy."""
    found: list[Restore] = [
        _kept_numbers_of_cpu(),
        partial(random.setstate, random.getstate()),
    ]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append(partial(numpy.set_state, numpy.get_state()))
    for device in {torch.device(d.type, d.index or 0) for d in devices if _has_generator(d)}:
        module = torch.get_device_module(device)
        found.append(partial(module.set_rng_state, module.get_rng_state(device), device))
    return found


def _kept_numbers_of_cpu() -> Restore:
    """Restores the CPU generator, from Python's memory: meanwhile that of tensors is measured."""
    state = bytes(torch.get_rng_state().tolist())
    return lambda: torch.set_rng_state(torch.tensor(list(state), dtype=torch.uint8, device="cpu"))


def _has_generator(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return False
    try:
        return hasattr(torch.get_device_module(device), "get_rng_state")
    except RuntimeError:  # a kind of device without a module
        return False


def _set(function: Callable[[Any], object], state: Any) -> Restore:
    return lambda: (function(state), None)[1]
