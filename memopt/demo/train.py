"""Trains every mode on the same batches from the same weights."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from memopt.demo.data import Batches
from memopt.demo.memory import profile_memory
from memopt.demo.model import GPT, VOCABULARY
from memopt.demo.modes import apply_mode
from memopt.demo.results import Result
from memopt.demo.settings import DemoSettings


class Trainer:
    """One mode's model and optimizer; what they give goes into `result`."""

    def __init__(
        self, settings: DemoSettings, initial: GPT, result: Result, batch: Any = None
    ) -> None:
        self.result = result
        self._settings = settings
        self._model = apply_mode(copy.deepcopy(initial).to(settings.device), result.mode, batch)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def measure_memory(self, tokens: Tensor, targets: Tensor) -> None:
        """Runs forward and backward without updates, first for what only a first use allocates.

        Of three measurements, all with the same bytes, the fastest is kept, as the least disturbed.
        """
        tokens, targets = tokens.to(self._settings.device), targets.to(self._settings.device)
        self._loss(tokens, targets).backward()
        profiles = []
        for _ in range(3):
            self._optimizer.zero_grad(set_to_none=True)
            gc.collect()
            profiles.append(
                profile_memory(lambda: self._loss(tokens, targets), self._settings.device)
            )
        self.result.memory = min(profiles, key=lambda profile: profile.ms[-1])

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        tokens, targets = tokens.to(self._settings.device), targets.to(self._settings.device)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(len(self.result.losses))
        start = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(tokens, targets)
        loss.backward()
        self._optimizer.step()
        value = loss.item()  # waits for the device
        self.result.step_ms.append((time.perf_counter() - start) * 1e3)
        self.result.losses.append(value)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        dtype = self._settings.dtype
        with torch.autocast(self._settings.device.type, dtype, enabled=dtype != torch.float32):
            loss: Tensor = self._model(tokens, targets)
            return loss

    def _learning_rate(self, step: int) -> float:
        """Rises over the first tenth of the steps, then falls linearly to a tenth of its height."""
        steps = self._settings.steps
        rise = max(1, steps // 10)
        fall = (step + 1 - rise) / max(1, steps - rise)
        return self._settings.preset.learning_rate * min((step + 1) / rise, 1 - 0.9 * fall)


def train(
    settings: DemoSettings,
    batches: Batches,
    results: list[Result],
    on_step: Callable[[Result], None],
) -> None:
    """Fills `results`, one per mode, and calls on_step(result) after each training step.

    On the CPU the modes take turns, a step each, so that whatever else the machine does falls on
    all alike. On a GPU each has the memory for itself, and one that does not fit has failed.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    initial = GPT(settings.preset.size, generator)
    turns = [results] if settings.device.type == "cpu" else [[result] for result in results]
    with _deterministic(settings.device):
        for together in turns:
            try:
                _train_together(settings, batches, initial, together, on_step)
            except torch.OutOfMemoryError:
                for result in together:
                    result.failure = "out of memory"
            if settings.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()


def _train_together(
    settings: DemoSettings,
    batches: Batches,
    initial: GPT,
    results: list[Result],
    on_step: Callable[[Result], None],
) -> None:
    wide = settings.preset.size.vocabulary > VOCABULARY  # logits are then worth making in chunks
    batch = tuple(each.to(settings.device) for each in batches[0]) if wide else None
    trainers = [Trainer(settings, initial, result, batch) for result in results]
    for trainer in trainers:
        trainer.measure_memory(*batches[0])
    for step in range(settings.steps):
        for trainer in trainers:
            trainer.step(*batches[step])
            on_step(trainer.result)


@contextlib.contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Equal runs give equal bits on the CPU anyhow; on CUDA attention's backward has to be told."""
    if device.type == "cpu":
        yield
        return
    # cuBLAS reads this when it starts, and PyTorch's deterministic mode insists on it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    flags: Any = torch.utils.deterministic
    were = torch.are_deterministic_algorithms_enabled(), flags.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    flags.fill_uninitialized_memory = False  # a debugging aid that costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(were[0])
        flags.fill_uninitialized_memory = were[1]
