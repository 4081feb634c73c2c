"""add_layer_norm and add_rms_norm."""

from __future__ import annotations

from . import layer_norm
from .norm import backward, forward

__all__ = ["TENSORS", "backward", "forward"]

TENSORS = (*layer_norm.TENSORS, "residual", "sum", "dsum")
