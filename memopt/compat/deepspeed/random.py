"""Random numbers that differ between the ranks of a model-parallel group, and those that do not.

The generator of the current accelerator (of the CPU, without one) draws the same numbers on all
ranks of a group; in `fork()` it draws from a state of its own, which differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MODEL_PARALLEL = "model-parallel-rng"
"""The name of the state that differs between ranks."""


class CudaRNGStatesTracker:
    """States of the generator, by name. (DeepSpeed's name for it; any device has one.)"""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """The states as they are now. A state is never written, but exchanged for the next one."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Put back what `get_states` gave."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state, as after `manual_seed(seed)`. The generator stays as it is.

        Raises:
            ValueError: there is a state of this name, or one with this seed.
        """
        if seed in self.seeds_:
            raise ValueError(f"CudaRNGStatesTracker.add: seed must be a new one, got {seed}")
        if name in self.states_:
            raise ValueError(f"CudaRNGStatesTracker.add: name must be a new one, got {name!r}")
        before = _numbers().get_rng_state()
        seed_generator(seed)
        self.states_[name] = _numbers().get_rng_state()
        self.seeds_.add(seed)
        _numbers().set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, the generator draws from the state of this name; that goes on where it ends.

        Raises:
            ValueError: there is no such state.
        """
        if name not in self.states_:
            known = ", ".join(map(repr, self.states_)) or "none"
            raise ValueError(
                f"CudaRNGStatesTracker.fork: name must be one that was added ({known}), got "
                f"{name!r}"
            )
        before = _numbers().get_rng_state()
        _numbers().set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _numbers().get_rng_state()
            _numbers().set_rng_state(before)


def seed_generator(seed: int) -> None:
    """Seeds the generator of the current accelerator, or of the CPU without one; not of both."""
    generator = _numbers() if torch.accelerator.is_available() else torch.default_generator
    generator.manual_seed(seed)


def _numbers() -> Any:
    """The module with the state of that generator."""
    if torch.accelerator.is_available():
        return torch.get_device_module(torch.accelerator.current_accelerator())
    return torch.random
