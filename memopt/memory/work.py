"""An operator's work: its kind, its floating-point operations and the bytes that it moves.

Ivanov et al., "Data Movement Is All You Need" (2021), name the kinds: tensor contractions are bound
by arithmetic, statistical normalisations (which reduce and then map) and element-wise operators by
memory. Operations are counted for contractions, a multiply-add as two, with the formulas of
torch.utils.flop_counter; the others' are few. Bytes are those of the tensors read and written, each
once: what a kernel that does one operator cannot avoid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

KINDS = ("contraction", "normalisation", "element-wise")
CONTRACTION, NORMALISATION, ELEMENTWISE = KINDS

_NORMALISES = ("norm", "softmax", "nll_loss", "cross_entropy", "var", "mean", "sum", "logsumexp")
_NO_WORK = ("empty", "detach", "_local_scalar_dense", "lift_fresh", "alias", "set_")


class Work(NamedTuple):
    """The work of one call of an operator."""

    kind: str
    op: str
    flops: int
    nbytes: int
    module: str = ""
    phase: str = ""


def work_of(
    func: Any, args: Any, kwargs: dict[str, Any], result: object, tensors: Sequence[Tensor]
) -> Work | None:
    """The work of one call; None where no bytes are moved: for views, and for tensors whose memory
    is only allocated.

    Args:
        tensors: the tensors among the arguments and results.
    """
    name, kind = _name_and_kind(func)
    if not kind:
        return None
    flops = _flops(func.overloadpacket, name, args, kwargs, result)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return Work(CONTRACTION if flops else kind, name, flops, nbytes)


@lru_cache(maxsize=4096)
def _name_and_kind(func: Any) -> tuple[str, str]:
    """An operator's name, and its kind unless a formula counts it: empty where it does no work."""
    name: str = func.overloadpacket.__name__
    is_view = func.is_view or torch.Tag.inplace_view in func.tags
    if name.startswith(_NO_WORK) or is_view or name == "_unsafe_view":
        return name, ""
    return name, NORMALISATION if _normalises(name, name.strip("_").split("_")) else ELEMENTWISE


def _normalises(name: str, words: list[str]) -> bool:
    return any(part in name if len(part) > 4 else part in words for part in _NORMALISES)


def _flops(packet: Any, name: str, args: Any, kwargs: dict[str, Any], result: object) -> int:
    if name.startswith("_scaled_dot_product") and "math" not in name:
        backward = name.endswith("backward")
        query, key, value = args[1:4] if backward else args[:3]
        return _attention_flops(query.shape, key.shape, value.shape, backward)
    if name == "_linear_cross_entropy":
        return _head_flops(args[0], args[1], result)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    # That of the shapes, without the function around it, whose walk of pytree takes ten times as
    # long as the formula.
    of_shapes = getattr(formula, "__wrapped__", None)
    if of_shapes is None:
        return int(formula(*args, **kwargs, out_val=result))
    return int(of_shapes(*_shapes(args), **_shapes(kwargs), out_shape=_shapes(result)))


def _shapes(value: Any) -> Any:
    """The value, with shapes in place of tensors."""
    if isinstance(value, Tensor):
        return value.shape
    if type(value) is dict:
        return {key: _shapes(entry) for key, entry in value.items()}
    return type(value)(map(_shapes, value)) if type(value) in (tuple, list) else value


def _head_flops(input: Any, weight: Any, result: Any) -> int:
    """The product of the logits, and one for each gradient."""
    gradients = sum(each is not None and each.dim() == 2 for each in result[4:6])
    return int(2 * input.shape[0] * weight.numel() * (1 + gradients))


def _attention_flops(query: Any, key: Any, value: Any, backward: bool) -> int:
    """Two products forward; in backward the scores again and four more. Whether half of them is
    masked is not asked, as in torch.utils.flop_counter, which refuses fewer key heads than query
    heads.
    """
    pairs = math.prod(query[:-1]) * key[-2]
    inner: int = 2 * pairs * query[-1]
    outer: int = 2 * pairs * value[-1]
    return 3 * inner + 2 * outer if backward else inner + outer
