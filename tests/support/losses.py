"""Losses and their gradients, and the oracle's rule for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.functional import linear_cross_entropy

Loss = Callable[..., Tensor]


def head(
    rows: int,
    features: int,
    classes: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """input, weight and bias of a head, which require gradients."""
    torch.manual_seed(seed)
    shapes = {"input": (rows, features), "weight": (classes, features), "bias": (classes,)}
    return {
        name: (torch.randn(shape) * 0.5).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def classes_of(
    rows: int, classes: int, device: torch.device | str = "cpu", ignored: int = 7
) -> Tensor:
    """A class for each row; every so-manieth is -100."""
    target = torch.arange(rows) * 31 % classes
    target[ignored - 1 :: ignored] = -100
    return target.to(device)


def eager(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    **settings: Any,
) -> Tensor:
    """What a model without memopt writes; its linear in chunks of rows, if that is given."""
    parts = [input] if chunk is None else input.split(chunk)
    z = torch.cat([F.linear(part, weight, bias) for part in parts]) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, target, class_weight, reduction=reduction, **settings)
    if z_loss:
        counts = torch.ones_like(z[:, 0]) if target.dim() == 2 else (target != -100).to(z.dtype)
        squares = z_loss * z.logsumexp(1).square() * counts
        divisor: Any = 1
        if reduction == "mean":
            divisor = counts.sum()
            if class_weight is not None and target.dim() == 1:
                divisor = (class_weight[target.clamp_min(0)] * counts).sum()
        loss = loss + (squares if reduction == "none" else squares.sum() / divisor)
    return loss


def ours(
    tensors: dict[str, Tensor],
    target: Tensor,
    class_weight: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """memopt's, of the tensors of head()."""
    return linear_cross_entropy(
        tensors["input"],
        tensors["weight"],
        target,
        linear_bias=tensors["bias"],
        weight=class_weight,
        **settings,
    )


def with_gradients(
    loss: Callable[[], Tensor], wanted: Sequence[Tensor], upstream: Tensor | None = None
) -> list[Tensor]:
    value = loss()
    if upstream is not None:
        upstream = upstream.to(value.dtype)
    return [value.detach(), *torch.autograd.grad(value, list(wanted), upstream)]


def pytorchs(
    tensors: Mapping[str, Tensor],
    target: Tensor,
    upstream: Tensor | None,
    chunk: int | None,
    **settings: Any,
) -> list[Tensor]:
    """The loss and the gradients by PyTorch: the input's by products of as many rows as a chunk of
    memopt's, since some processors sum one row's products in another order, with larger errors. The
    others' by one product, which is more accurate than a sum over chunks.
    """
    wanted = list(tensors.values())
    found = with_gradients(lambda: eager(**tensors, target=target, **settings), wanted, upstream)
    if chunk is not None:
        chunked = partial(eager, **tensors, target=target, chunk=chunk, **settings)
        found[1:2] = with_gradients(chunked, wanted[:1], upstream)[1:]
    return found


def exactly(
    tensors: Mapping[str, Tensor], target: Tensor, upstream: Tensor | None = None, **settings: Any
) -> list[Tensor]:
    """eager() in float64 on the CPU."""

    def wide(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value.cpu() if isinstance(value, Tensor) else value
        return value.detach().cpu().double()

    doubles = {name: wide(tensor).requires_grad_() for name, tensor in tensors.items()}
    settings = {name: wide(value) for name, value in settings.items()}
    return with_gradients(
        lambda: eager(**doubles, target=wide(target), **settings),
        list(doubles.values()),
        None if upstream is None else wide(upstream),
    )


def error(value: Tensor, exact: Tensor) -> float:
    """Root of the mean square, over that of the exact one."""
    difference = (value.detach().cpu().double() - exact).square().mean().sqrt()
    return float(difference / exact.square().mean().sqrt().clamp_min(1e-300))


def limit_of(torchs: float, dtype: torch.dtype) -> float:
    """PyTorch's error and two roundings of the dtype (of which both have made many, at other
    places: neither is always the nearer one), or where that is less the error of few roundings: two
    where products are rounded to 16 bits, sixteen where they are sums of float32. For float64 twice
    as many: what they are compared with is of float64 itself. (Against products in 80 bits, sums of
    4,099 on an EPYC without AVX-512: PyTorch's are up to 12.4 eps off, memopt's 13.8.)
    """
    eps = torch.finfo(dtype).eps
    few = {2: 1, 4: 8, 8: 16}[dtype.itemsize]
    return max(torchs + eps, eps * few)


def assert_as_right_as_pytorch(
    ours: Sequence[Tensor],
    torchs: Sequence[Tensor],
    exact: Sequence[Tensor],
    products: torch.dtype | None = None,
) -> None:
    """No error is beyond limit_of(PyTorch's). products: their dtype, if it is not the results'."""
    for number, (mine, theirs, reference) in enumerate(zip(ours, torchs, exact, strict=True)):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        limit = limit_of(error(theirs, reference), products or mine.dtype)
        assert error(mine, reference) <= limit, (number, error(mine, reference), limit)
