"""dropout_add_layer_norm and dropout_add_rms_norm."""

from __future__ import annotations

from . import add_norm
from .norm import backward, forward, forward_with_state

__all__ = ["TENSORS", "backward", "forward", "forward_with_state"]

TENSORS = (*add_norm.TENSORS, "dx_dropped")
