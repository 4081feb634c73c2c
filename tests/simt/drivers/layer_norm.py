"""layer_norm and layer_norm_gelu."""

from __future__ import annotations

from .norm import backward, forward

__all__ = ["TENSORS", "backward", "forward"]

TENSORS = ("x", "y", "dy", "dx", "gamma", "beta", "dgamma", "dbeta", "partials")
