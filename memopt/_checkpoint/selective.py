"""Operators whose outputs a selective checkpoint should keep rather than recompute."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

# Those that cost floating point operations in proportion to more than the bytes they write: matrix
# products, convolutions, attention. A communication is as dear, and must not run twice by accident.
_NAMES = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten.linear",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten.convolution",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_to_all_single",
    "_c10d_functional.reduce_scatter_tensor",
)


def ops_worth_saving() -> list[OpOverload]:
    """The operators that this PyTorch has whose outputs are worth their memory in a region.

    For `torch.utils.checkpoint.create_selective_checkpoint_contexts`::

        contexts = functools.partial(create_selective_checkpoint_contexts, ops_worth_saving())
        memopt.checkpoint(block, x, context_fn=contexts)

    memopt's own operators appear to a selective checkpoint by name (`memopt._norm_forward`, ...)
    and are not in the list: running one again costs a pass over its input, less than what keeping
    its output would save.
    """
    found = []
    for name in _NAMES:
        namespace, packet = name.split(".")
        overloads = getattr(getattr(torch.ops, namespace), packet, None)
        if overloads is not None:
            found.append(overloads.default)
    return found
