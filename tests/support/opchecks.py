"""PyTorch's own checks of an operator: schema, autograd, fake tensors, and a traced graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_OF_OPERATORS = ("test_schema", "test_autograd_registration", "test_faketensor")
_OF_GRAPHS = "test_aot_dispatch_dynamic"


def opcheck(op: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], random: bool) -> None:
    """All of them; but on a GPU a traced graph of a random op draws its state by an op of PyTorch's
    (csrc/autograd/random.h), so that it drops other elements than eager mode for one seed: there no
    values are compared.
    """
    on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in arguments)
    checks = _OF_OPERATORS if random and on_cuda else (*_OF_OPERATORS, _OF_GRAPHS)
    torch.library.opcheck(op, tuple(arguments), dict(keywords), test_utils=checks)
