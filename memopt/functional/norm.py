"""Norms over the last dimensions, with an activation behind or a residual in front."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memopt._extension import ops
from memopt.functional.arguments import as_ints, names_arguments


@names_arguments
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation over the last dimensions.

    y = (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance, centred before it is
    squared. Saves for backward: input, and mean and 1 / sqrt(var + eps) in float32 (8 bytes a row).
    Source: Ba, Kiros and Hinton, arXiv:1607.06450.

    Args:
        input: (*, *normalized_shape).
        normalized_shape: the last dimensions of input, at least one, none of them zero.
        weight: normalized_shape, or None for 1.
        bias: normalized_shape, or None for 0; weight's dtype if both are given.
        eps: added to the variance; finite and not negative. Default 1e-5.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it and what was got.
    """
    output: Tensor = ops.layer_norm(input, as_ints(normalized_shape), weight, bias, eps)
    return output


@names_arguments
def layer_norm_gelu(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    approximate: str = "none",
) -> Tensor:
    """gelu(layer_norm(input)) in one kernel each way: the normalised tensor never exists in memory.

    Saves for backward what layer_norm saves: input, and 8 bytes a row. The two ops apart save the
    normalised tensor too.

    Args:
        input, normalized_shape, weight, bias, eps: as for layer_norm.
        approximate: as for gelu.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        RuntimeError: an argument breaks a rule of layer_norm or gelu; the message names it and what
        was got.
    """
    output: Tensor = ops.layer_norm_gelu(
        input, as_ints(normalized_shape), weight, bias, eps, approximate=approximate
    )
    return output


@names_arguments
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
) -> Tensor:
    """Root mean square normalisation over the last dimensions.

    y = x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight). Saves for backward: input, and
    1 / sqrt(mean(x^2) + eps) in float32 (4 bytes a row). Source: Zhang and Sennrich,
    arXiv:1910.07467.

    Args:
        input: (*, *normalized_shape).
        normalized_shape: the last dimensions of input, at least one, none of them zero.
        weight: normalized_shape, or None for a scale of 1.
        eps: added to the mean square; finite and not negative. None (default): the machine epsilon
            of the type that is computed in, as torch.nn.functional.rms_norm has it: 1.2e-7
            (float32), 2.2e-16 for float64.
        zero_centered_weight: the scale is 1 + weight (Gemma's form), added in float32. Without a
            weight the scale is 1 either way.

    Returns:
        A tensor of input's shape and dtype; contiguous, or in channels-last if input is, as
        PyTorch has it.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it and what was got.
    """
    output: Tensor = ops.rms_norm(
        input, as_ints(normalized_shape), weight, eps, zero_centered_weight=zero_centered_weight
    )
    return output


@names_arguments
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """input + residual, and its layer_norm, in one kernel each way.

    Both results have the bits of the two steps apart; in backward the gradient of the sum is added
    inside the norm's kernel, before rounding. Saves for backward: the sum, which is returned (so it
    must not change in place before backward), and 8 bytes a row.

    Under autocast the two may differ in dtype; the sum has the wider one. So a float32 residual
    stream stays float32.

    Args:
        input: (*, *normalized_shape).
        residual: input's shape and dtype.
        normalized_shape, weight, bias, eps: as for layer_norm.

    Returns:
        (output, sum): the normalised sum, and the sum, of input's shape and dtype. The sum has the
        strides of input + residual, the output those that the norm alone gives it.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it and what was got.
    """
    output, sum = ops.add_layer_norm(input, residual, as_ints(normalized_shape), weight, bias, eps)
    return output, sum


@names_arguments
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """input + residual, and its rms_norm, in one kernel each way: add_layer_norm with rms_norm.

    Saves for backward: the sum, which is returned, and 4 bytes a row.

    Args:
        input: (*, *normalized_shape).
        residual: input's shape and dtype.
        normalized_shape, weight, eps, zero_centered_weight: as for rms_norm.

    Returns:
        (output, sum): the normalised sum, and the sum, of input's shape and dtype. The sum has the
        strides of input + residual, the output those that the norm alone gives it.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it and what was got.
    """
    output, sum = ops.add_rms_norm(
        input,
        residual,
        as_ints(normalized_shape),
        weight,
        eps,
        zero_centered_weight=zero_centered_weight,
    )
    return output, sum
