"""A model's modules whose calls Python sees."""

from __future__ import annotations

import torch
from torch import nn


def seen_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by path, each once, without those of TorchScript: these run without
    Python, and take no hooks.
    """
    named = model.named_modules()
    return {path: one for path, one in named if not isinstance(one, torch.jit.ScriptModule)}
