"""PyTorch's private names that memopt's Python uses, all in this one place.

A new version of PyTorch may rename or drop any of them; then this file is what has to change. What
the C++ side looks up by name stands in csrc/python/compat.h.
"""

from __future__ import annotations

from torch.utils import checkpoint as _checkpoint

__all__ = ["checkpoint_options_set_globally"]


def checkpoint_options_set_globally() -> tuple[bool | None, bool | None]:
    """What `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled` of
    torch.utils.checkpoint have set: (early_stop, debug), each None where nothing was set.
    """
    return _checkpoint._enable_checkpoint_early_stop, _checkpoint._checkpoint_debug_enabled
