"""A transformer's MLP as one op, with a choice of what backward recomputes."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt._extension import ops
from memopt.functional.arguments import names_arguments


@names_arguments
def mlp(
    input: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    *,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    activation: str = "gelu",
    norm: str = "none",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = None,
    zero_centered_weight: bool = False,
    activation_dropout: float = 0.0,
    dropout: float = 0.0,
    training: bool = True,
    residual: bool = False,
    recompute: str = "activations",
    activation_scalar: float | None = None,
) -> Tensor:
    """norm, linear, activation (or gated unit), linear, dropout, + input: one graph node.

    With n = norm(input), up = n up_weight^T + up_bias, gate likewise if there is a gate_weight:
    dropout(f(up) down_weight^T + down_bias) + input, or with f(gate) up for f(up).

    What it saves for backward depends on `recompute`; gradients do not: they have the same bits at
    every level, for contiguous input those of memopt's ops called one after another. In bfloat16,
    with `features` and `hidden` for the sizes and g = 2 with a gate, else 1, in addition to the
    norm's statistics (8 bytes a row for layer_norm, 4 for rms_norm) and 16 bytes for each dropout:

        "none"         4 features + 2 (g + 1) hidden bytes a row: everything, as eager PyTorch does
        "activations"  2 features + 2 g hidden: the norm's and the activation's outputs are
                       recomputed by backward's own kernels, at the cost of one write each
        "all"          2 features: the first linears are recomputed in backward

    (2 features for input, which without a norm is what the first linears save.) Nothing is saved
    or computed for gradients that are not asked for. Where weights are frozen and there is no norm,
    input is not saved, and create_graph=True raises an error that says so. Levels: Karpathy's llm.c
    (-r), Dao's FusedMLP in flash-attention (checkpoint_lvl).

    Args:
        input: (*, features).
        up_weight, up_bias: (hidden, features), and (hidden,) or None.
        down_weight, down_bias: (out, hidden), and (out,) or None. Default None.
        gate_weight, gate_bias: as up's; a gated unit if there is a gate_weight. Default None.
        activation: as for memopt.functional.activation. Default "gelu".
        norm: "none" (default), "layer_norm" or "rms_norm", over the last dimension.
        norm_weight, norm_bias: (features,), of input's dtype or float32; None for 1 and 0. No bias
            with rms_norm.
        eps: of the norm. Default None: 1e-5 for layer_norm, the machine epsilon for rms_norm.
        zero_centered_weight: rms_norm alone: its scale is 1 + norm_weight. Default False.
        activation_dropout, dropout: the probability of zeroing an element behind the activation,
            and behind the second linear. Default 0.
        training: False leaves both dropouts out. Default True.
        residual: whether input is added at the end; out must be features. Under autocast the sum
            is in input's dtype where that is the wider one. Default False.
        recompute: "none", "activations" (default) or "all".
        activation_scalar: as for memopt.functional.activation. Default None.

    Returns:
        (*, out).

    Raises:
        ValueError: a dropout is not between 0 and 1.
        RuntimeError: an argument breaks a rule above; the message names it and what was got.
    """
    for name, p in (("activation_dropout", activation_dropout), ("dropout", dropout)):
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"mlp: {name} must be between 0 and 1, got {p}")
    # Autocast casts the op's input, and a float32 residual stream is to stay float32.
    adds_input = residual and _is_cast(input)
    output: Tensor = ops.mlp(
        input,
        up_weight,
        up_bias,
        down_weight,
        down_bias,
        gate_weight,
        gate_bias,
        norm_weight,
        norm_bias,
        activation=activation,
        norm=norm,
        eps=eps,
        zero_centered_weight=zero_centered_weight,
        activation_dropout=activation_dropout if training else 0.0,
        dropout=dropout if training else 0.0,
        residual=residual and not adds_input,
        recompute=recompute,
        activation_scalar=activation_scalar,
    )
    return output + input if adds_input else output


def _is_cast(input: Tensor) -> bool:
    """Whether autocast takes digits from it."""
    device = input.device.type
    return input.dtype == torch.float32 and torch.is_autocast_enabled(device)
