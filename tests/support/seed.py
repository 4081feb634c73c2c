"""The seed of PyTorch's random numbers, set in a microsecond."""

from __future__ import annotations

import torch


def seed(value: int) -> None:
    """As torch.manual_seed. For each kind of device that is not there that one keeps the whole
    stack as text, for an error that does not come: half a millisecond inside pytest.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)
