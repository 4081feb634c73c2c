"""patch_functional: calls of torch.nn.functional go to memopt's ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from memopt import functional
from memopt.convert.supported import supports


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if not supports(input, weight, bias):
        return NotImplemented
    return functional.layer_norm(input, normalized_shape, weight, bias, eps)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if not supports(input, weight):
        return NotImplemented
    return functional.rms_norm(input, normalized_shape, weight, eps)


def _gelu(input: Tensor, *, approximate: str = "none") -> Any:
    return functional.gelu(input, approximate) if supports(input) else NotImplemented


def _silu(input: Tensor, inplace: bool = False) -> Any:
    return functional.silu(input) if supports(input) and not inplace else NotImplemented


def _relu(input: Tensor, inplace: bool = False) -> Any:
    return functional.relu(input) if supports(input) and not inplace else NotImplemented


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not supports(input) or inplace:
        return NotImplemented
    return functional.dropout(input, p, training)


_PATCHES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.gelu: _gelu,
    F.silu: _silu,
    F.relu: _relu,
    F.dropout: _dropout,
}


class _Patched(TorchFunctionMode):
    """Sees each call of a function of PyTorch's that this thread makes from Python."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        patch = _PATCHES.get(func)
        if patch is not None:
            try:
                output = patch(*args, **kwargs)
            except TypeError:  # PyTorch's function raises for these arguments too
                output = NotImplemented
            if output is not NotImplemented:
                return output
        return func(*args, **kwargs)


@contextmanager
def patch_functional() -> Iterator[None]:
    """In this scope and thread, torch.nn.functional's layer_norm, rms_norm, gelu, silu, relu and
    dropout are memopt's.

    For forwards that call the functions and have no modules to `convert`. Calls that memopt's ops
    do not support (`inplace=True`, integers, other devices, sparse, nested or distributed tensors)
    go to PyTorch as before. The scope applies to this thread only, and ends on exceptions too.

    relu saves its input, where PyTorch's saves its output: a gain only with recipes on
    (`memopt.recompute`). For the same reason `torch.sigmoid` and tensor methods stay PyTorch's.

    A checkpointed region must run with the same functions again in backward, where no mode is on
    (PyTorch turns them off while it handles `backward` itself): enter the scope inside the region.
    The fast path of nn.TransformerEncoder in evaluation, which calls none of these functions, is
    not taken inside the scope, as under every TorchFunctionMode.
    """
    with _Patched():
        yield
