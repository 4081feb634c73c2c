"""Cross entropy and log-probabilities, of logits or of what a head makes them from."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._extension import ops
from memopt.functional.arguments import names_arguments

IGNORED = -100


@names_arguments
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: float | Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """cross_entropy(linear(input, linear_weight, linear_bias), target) in chunks of rows: neither
    the logits nor their gradient exist for more than one chunk.

    The names and meanings are those of torch.nn.functional.linear_cross_entropy. A row's logits l
    become z = logit_scale * l, or softcap * tanh(logit_scale * l / softcap); its loss is
    sum(q * (logsumexp(z) - z)) + z_loss * logsumexp(z)^2, with the target's distribution q.

    With reduction "mean" or "sum" forward makes the gradients that are asked for on the way, and
    backward scales them; saved for backward: these gradients alone, each of its tensor's size
    (float16: the weight's in float32). Nothing is computed for tensors without a gradient. With
    "none" backward computes the chunks again, for one more product; saved: input, the weight, and 4
    bytes a row. Only "none" supports create_graph=True.

    Temporary: one chunk's logits, and for a bfloat16 weight with a gradient a byte for each of its
    elements and a block of 2 MiB (64 on CUDA). Sums over rows go from the first chunk to the last,
    in float32 (float64 for float64; 24 bits for a bfloat16 weight's); the loss is their sum over
    all rows. Each chunk's own products, and their rounding to input's dtype, are PyTorch's.

    Where linear_weight has more than two dimensions (a K-dimensional loss) PyTorch's own linear and
    cross_entropy run, as in its function, and make all logits.

    Args:
        input: (*, features).
        linear_weight: (classes, features), of input's dtype.
        target: (*) int64 classes, or (*, classes) probabilities. It gets no gradient.
        linear_bias: (classes,), of input's dtype.
        weight: (classes,), the classes' weights, of input's dtype or float32.
        reduction: "mean" (over the classes' weights of the rows that are not ignored; over all rows
            for probabilities), "sum", or "none". Default "mean".
        ignore_index: rows of this class have no loss and no gradient. Default None: -100, and
            nothing for probabilities.
        label_smoothing: from 0 (default) to 1; as PyTorch's.
        softcap: positive; None (default): no cap.
        logit_scale: finite. Default 1.
        z_loss: the factor of the squared logsumexp (PaLM's), which is added to each row's loss.
            Default 0.
        num_items: what a mean divides the sum by in place of the above: the tokens of a whole
            batch, where this is a part of it. A number or a tensor of one.
        chunk: rows of a chunk, at least 1. Default: at least 128, and as many as 12 MiB of logits
            have; a sixteenth of the rows, at most 512; a quarter of them, as long as that takes no
            more than 1 KiB a class.

    Returns:
        The loss of input's dtype, under autocast float32; [] or with "none" (*). A mean of no rows
        is NaN.

    Raises:
        RuntimeError, ValueError: an argument breaks a rule above.
        IndexError: a class is out of range (on CUDA the stream stops with that message).
    """
    if linear_weight.dim() > 2:
        plain = softcap is None and logit_scale == 1.0 and z_loss == 0.0
        if not (plain and num_items is None and chunk is None):
            raise ValueError(
                "linear_cross_entropy: softcap, logit_scale, z_loss, num_items and chunk are for a "
                f"linear_weight with two dimensions, got shape {tuple(linear_weight.shape)}"
            )
        return _k_dimensional(
            input,
            linear_weight,
            target,
            linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=IGNORED if ignore_index is None else ignore_index,
            label_smoothing=label_smoothing,
        )
    if num_items is not None and not isinstance(num_items, Tensor):
        num_items = torch.full((), num_items, dtype=torch.float64, device=target.device)
    loss: Tensor = ops.linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
        num_items=num_items,
        chunk=chunk,
    )
    return loss


def _k_dimensional(
    input: Tensor, linear_weight: Tensor, target: Tensor, bias: Tensor | None, **settings: Any
) -> Tensor:
    """PyTorch's ops, for a weight (classes, *positions, features)."""
    bias = None if bias is None else bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias)
    logits = logits.unflatten(-1, linear_weight.shape[:-1])
    return F.cross_entropy(logits, target, **settings)


@names_arguments
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch.nn.functional.cross_entropy, whose log-probabilities are not kept.

    Saves for backward: input, and 4 bytes a row. The gradient is written over input where nobody
    else has it: where the call's caller keeps no reference to the logits, nor to a view of them.
    Under autocast 16-bit logits are read as they are, without PyTorch's copy in float32.

    A K-dimensional loss (an input of more than two dimensions) is PyTorch's own function.

    Args:
        input: (rows, classes) or (classes,) logits.
        target: (rows,) or () int64 classes, or input's shape for probabilities; gets no gradient.
        weight: (classes,), of input's dtype or float32.
        size_average, reduce: PyTorch's old names for reduction.
        ignore_index, reduction, label_smoothing: as for linear_cross_entropy. Rows are ignored for
            class indices alone.

    Returns:
        The loss of input's dtype, under autocast float32; [] or with reduction "none" (rows,).

    Raises:
        RuntimeError, ValueError: an argument breaks a rule above.
        IndexError: a class is out of range (on CUDA the stream stops with that message).
    """
    if size_average is not None or reduce is not None or input.dim() not in (1, 2):
        return F.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    single = input.dim() == 1
    if single:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    loss: Tensor = ops.cross_entropy(
        input,
        target,
        weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return loss.squeeze(0) if single and reduction == "none" else loss


@overload
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: Literal[False] = False,
    chunk: int | None = None,
) -> Tensor: ...
@overload
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: Literal[True],
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]: ...
@names_arguments
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    chunk: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log_softmax(linear(input, linear_weight, linear_bias)) at the target of each row, and on
    request the entropy of its softmax, in the chunks of linear_cross_entropy: for losses that are
    written by hand, such as DPO's, GRPO's or a distillation's.

    Saves for backward: input, the weight, and 4 bytes a row (8 with the entropy). Backward computes
    the chunks again, for one more product. Both results are differentiable, twice as well.

    Args:
        input, linear_weight, linear_bias, softcap, logit_scale, chunk: as for linear_cross_entropy.
        target: (*) int64 classes.
        ignore_index: rows of this class get 0, and no gradient. Default -100.
        entropy: return (log_probs, entropy). Default False.

    Returns:
        (*), float32 (float64 for float64 input).

    Raises:
        RuntimeError, ValueError: an argument breaks a rule above.
        IndexError: a class is out of range (on CUDA the stream stops with that message).
    """
    run = ops.linear_log_probs_and_entropy if entropy else ops.linear_log_probs
    results: Tensor | tuple[Tensor, Tensor] = run(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        chunk=chunk,
    )
    return results


@names_arguments
def linear_logsumexp(
    input: Tensor,
    linear_weight: Tensor,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """linear(input, linear_weight, linear_bias).logsumexp(-1), in the chunks of
    linear_cross_entropy: the partition function, for z-losses, energies and contrastive losses that
    are written by hand.

    Saves for backward: input, the weight, and 4 bytes a row. Backward computes the chunks again,
    for one more product. The result is differentiable, twice as well.

    Args:
        input, linear_weight, linear_bias, softcap, logit_scale, chunk: as for linear_cross_entropy.

    Returns:
        (*), float32 (float64 for float64 input).

    Raises:
        RuntimeError, ValueError: an argument breaks a rule above.
    """
    result: Tensor = ops.linear_logsumexp(
        input,
        linear_weight,
        linear_bias=linear_bias,
        softcap=softcap,
        logit_scale=logit_scale,
        chunk=chunk,
    )
    return result
