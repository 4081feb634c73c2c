"""rms_norm."""

from __future__ import annotations

from .norm import backward, forward

__all__ = ["TENSORS", "backward", "forward"]

TENSORS = ("x", "y", "dy", "dx", "gamma", "dgamma", "partials")
