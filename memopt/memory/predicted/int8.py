"""Meta kernels for bitsandbytes' operators on 8 bits (LLM.int8), whose own ask for values.

Columns of the input with an element above a threshold are outliers, and are multiplied in 16 bits.
A prediction has no values and assumes that there are none. Dettmers et al., arXiv:2208.07339, find
0.1 % of the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _int8_rows(a: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    rows = a.numel() // a.shape[-1]
    outliers = a.new_empty(0, dtype=torch.int64) if threshold else None
    return torch.empty_like(a, dtype=torch.int8), a.new_empty(rows, dtype=torch.float32), outliers


def _int8_product(
    a: Tensor,
    ca: Tensor,
    cb: Tensor,
    sca: Tensor,
    scb: Tensor,
    outlier_cols: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return a.new_empty((*ca.shape[:-1], cb.shape[0])), a.new_empty(0)


INT8_KERNELS: Mapping[str, Callable[..., Any]] = {
    "bitsandbytes::int8_vectorwise_quant": _int8_rows,
    "bitsandbytes::int8_mixed_scaled_mm": _int8_product,
}
"""Functions of meta tensors, by the operator's name."""
