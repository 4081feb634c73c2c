"""Settings of the demo: two presets, and the command line's arguments, checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import memopt
from memopt._errors import UsageError
from memopt.demo.model import VOCABULARY, ModelSize
from memopt.demo.modes import MODES, Mode


@dataclass(frozen=True)
class Preset:
    size: ModelSize
    batch: int
    """Sequences per step."""
    steps: int
    learning_rate: float
    dtype: str


DEVICE_PRESETS = {
    # Half a minute to a minute for all seven modes on two cores.
    "cpu": Preset(
        size=ModelSize(layers=4, width=128, heads=4, context=128),
        batch=8,
        steps=60,
        learning_rate=3e-3,
        dtype="float32",
    ),
    # The shape of GPT-2 medium: 302 million parameters, 17 TFLOP a step.
    "cuda": Preset(
        size=ModelSize(layers=24, width=1024, heads=16, context=1024),
        batch=8,
        steps=80,
        learning_rate=3e-4,
        dtype="bfloat16",
    ),
}


@dataclass(frozen=True)
class DemoSettings:
    preset: Preset
    text: Path | None
    modes: tuple[Mode, ...]
    device: torch.device
    dtype: torch.dtype
    steps: int
    seed: int
    out: Path

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def settings_from(args: argparse.Namespace) -> DemoSettings:
    """Checks the arguments of `python -m memopt demo`. Raises UsageError."""
    device = _device(args.device)
    preset = DEVICE_PRESETS[device.type]
    steps = preset.steps if args.steps is None else args.steps
    if steps < 1:
        raise UsageError(f"--steps: must be at least 1, got {steps}")
    if args.vocab < VOCABULARY:
        raise UsageError(f"--vocab: must be at least {VOCABULARY}, one a byte, got {args.vocab}")
    preset = replace(preset, size=replace(preset.size, vocabulary=args.vocab))
    return DemoSettings(
        preset=preset,
        text=args.text,
        modes=_modes(args.modes),
        device=device,
        dtype=getattr(torch, args.dtype or preset.dtype),
        steps=steps,
        seed=args.seed,
        out=args.out,
    )


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if _cuda_problem() is None else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device: unknown device, got {name}") from None
    if device.type not in DEVICE_PRESETS:
        raise UsageError(f"--device: must be {' or '.join(DEVICE_PRESETS)}, got {name}")
    if device.type == "cuda":
        problem = _cuda_problem()
        if problem is not None:
            raise UsageError(f"--device: {problem}, got {name}")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise UsageError(f"--device: there are {torch.cuda.device_count()} GPUs, got {name}")
    return device


def _cuda_problem() -> str | None:
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA GPU here"
    if not memopt.build_info()["cuda"]:
        return "memopt was built without CUDA kernels"
    return None


def _modes(names: str | None) -> tuple[Mode, ...]:
    """The chosen modes, in the order of MODES."""
    if names is None:
        return tuple(MODES.values())
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in MODES:
            raise UsageError(f"--modes: must be among {', '.join(MODES)}, got {name!r}")
    return tuple(mode for name, mode in MODES.items() if name in chosen)
