"""Norms over channels: of groups of them, of each, and of each over the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt._extension import ops
from memopt.functional.arguments import names_arguments


@names_arguments
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    activation_scalar: float | None = None,
) -> Tensor:
    """Normalisation of groups of channels of each sample.

    y = (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance, centred before it is
    squared. Saves for backward: input, and mean and 1 / sqrt(var + eps) in float32 (8 bytes a group
    of a sample). Inside memopt.recipes() what reads the output need not save it: it is written
    again from these, in the same bits. Contiguous and channels-last inputs are read as they lie.
    Source: Wu and He, arXiv:1803.08494.

    Args:
        input: (N, C, *).
        num_groups: divides C.
        weight: (C), or None for 1.
        bias: (C), or None for 0; weight's dtype if both are given.
        eps: added to the variance; finite and not negative. Default 1e-5.
        activation: the name of an activation behind the norm, as `activation` has it, in the same
            kernels: act(y) is returned, with the bits of the two ops one after the other, and
            still the norm's input and statistics alone are saved. Default None.
        activation_scalar: of an activation that takes one.

    Returns:
        A tensor of input's shape and dtype; contiguous, or in channels-last if input is, as
        PyTorch has it on the CPU.

    Raises:
        RuntimeError: an argument breaks a rule above, or there is one value to a group; the message
            names it and what was got.
    """
    output: Tensor = ops.group_norm(
        input,
        num_groups,
        weight,
        bias,
        eps,
        activation=activation,
        activation_scalar=activation_scalar,
    )
    return output


@names_arguments
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str | None = None,
    activation_scalar: float | None = None,
) -> Tensor:
    """Normalisation of each channel of each sample.

    What is computed and saved is group_norm's with as many groups as channels. With running
    statistics, or without use_input_stats, this is torch.nn.functional.instance_norm.
    Source: Ulyanov, Vedaldi and Lempitsky, arXiv:1607.08022.

    Args:
        input: (N, C, *).
        running_mean, running_var, momentum: as torch.nn.functional.instance_norm has them.
        weight, bias, eps, activation, activation_scalar: as for group_norm.
        use_input_stats: whether the statistics are input's own. Default True.

    Returns:
        A contiguous tensor of input's shape and dtype, as PyTorch has it: a channels-last input is
        copied for the kernel.

    Raises:
        RuntimeError: as for group_norm, or there is one value to a channel of a sample.
    """
    if not use_input_stats or running_mean is not None or running_var is not None:
        output: Tensor = torch.nn.functional.instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
        if activation is not None or activation_scalar is not None:
            output = ops.activation(output, activation, activation_scalar)
        return output
    output = ops.instance_norm(
        input,
        weight,
        bias,
        eps,
        activation=activation,
        activation_scalar=activation_scalar,
    )
    return output


@names_arguments
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str | None = None,
    activation_scalar: float | None = None,
) -> Tensor:
    """Normalisation of each channel over all samples.

    In training by input's own statistics, towards which the running ones move once, in forward
    (running = running + momentum (own - running), the variance without bias); otherwise by the
    running ones, of which backward has copies. Formula, layout and what is saved for backward are
    group_norm's, with one mean and 1 / sqrt(var + eps) a channel. Source: Ioffe and Szegedy,
    arXiv:1502.03167.

    Args:
        input: (N, C) or (N, C, *).
        running_mean, running_var: (C), of input's dtype or float32; None in training for none.
        weight, bias, eps, activation, activation_scalar: as for group_norm.
        training: whether the statistics are input's own. Default False, as PyTorch has it.
        momentum: the weight of input's own statistics among the running ones. Default 0.1.

    Returns:
        A tensor of input's shape and dtype; contiguous, or in channels-last if input is.

    Raises:
        RuntimeError: an argument breaks a rule above, or in training there is one value to a
            channel; the message names it and what was got.
    """
    output: Tensor = ops.batch_norm(
        input,
        running_mean,
        running_var,
        weight,
        bias,
        training,
        momentum,
        eps,
        activation=activation,
        activation_scalar=activation_scalar,
    )
    return output
