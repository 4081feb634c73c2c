"""The category of an allocation, as far as the frames of its stack tell.

An allocator does not know what a tensor is for. The stack says where it was made: by an optimizer,
while modules ran forward, inside backward, when parameters were made or moved. What forward made
and backward still found is an activation, the rest of it was temporary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memopt.memory.pieces import (
    ACTIVATIONS,
    CATEGORIES,
    FUNCTIONALITY,
    GRADIENTS,
    STATES,
    TEMPORARY,
    WEIGHTS,
)

Frame = dict[str, Any]
UNKNOWN = "not known"
FORWARD = "forward"

_OPTIMIZERS = ("torch/optim/", "bitsandbytes/optim", "apex/optimizers", "torchao/optim")
_BACKWARD = ("torch/autograd/", "torch::autograd::Engine", "autograd/engine.cpp")
_MAKES_PARAMETERS = ("__init__", "reset_parameters", "_apply", "from_pretrained", "load_state_dict")
_LIBRARIES = ("/torch/", "torch\\", "<frozen", "/contextlib.py", "/memopt/")


def written_category(frames: Sequence[Frame]) -> str:
    """The category that `write_snapshot` wrote; empty for the frames of an allocator's snapshot."""
    first = frames[0]["name"].partition(":")[0] if frames else ""
    return first if first in CATEGORIES else ""


def where(frames: Sequence[Frame]) -> str:
    """The category of an allocation with these frames, the innermost first; FORWARD where only its
    end tells whether it was an activation; UNKNOWN where there are none, or none that tells.
    """
    for frame in frames:
        name, file = frame["name"], frame["filename"]
        if any(part in file for part in _OPTIMIZERS):
            return STATES
        if any(part in file or part in name for part in _BACKWARD):
            return GRADIENTS
        if name in _MAKES_PARAMETERS:
            return WEIGHTS
        if name == "forward" or "_call_impl" in name:
            return FORWARD
        if name in ("to", "cuda", "pin_memory") or "dataloader" in file.lower():
            return FUNCTIONALITY
    return UNKNOWN


def users_line(frames: Sequence[Frame]) -> str:
    """The innermost line outside of libraries, "model.py:12"; empty where there is none."""
    for frame in frames:
        file = frame["filename"]
        if file.endswith(".py") and not any(part in file for part in _LIBRARIES):
            return f"{file.rpartition('/')[2]}:{frame['line']}"
    return ""


def settled(category: str, phase_it_ended_in: str | None) -> str:
    """The category when the end of an allocation is known: FORWARD becomes activations or temporary
    buffers, and a gradient that backward freed was temporary. None: it was alive at the end.
    """
    if category == FORWARD:
        return TEMPORARY if phase_it_ended_in == FORWARD else ACTIVATIONS
    if category == GRADIENTS and phase_it_ended_in == GRADIENTS:
        return TEMPORARY
    if category == STATES and phase_it_ended_in is not None:
        return TEMPORARY
    return category
