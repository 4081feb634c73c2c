"""CUDA's behaviour, imitated where a step for CUDA is predicted on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memopt._compat import run_backward

_16_BITS = (torch.float16, torch.bfloat16)


class AsOnCuda(TorchFunctionMode):
    """Chooses on the CPU what PyTorch would choose on CUDA, where something else is saved.

    Dropout's mask is of bools (native_dropout); attention is flash attention, memory-efficient
    attention, cuDNN's (with a mask and fewer key heads) or plain operators, by the rules of
    ATen/native/transformers/cuda/sdp_utils.cpp; and autocast runs in float32 what its list for CUDA
    names (ATen/autocast_mode.h), which is longer than the CPU's.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and kwargs.get("gradient") is None:
            with self:  # here the mode is off, but in backward regions run forward again
                return run_backward(args[0])
        if func is nn.functional.dropout:
            return _dropout(*args, **kwargs)
        if func is torch.dropout:
            return _dropout(args[0], args[1], args[2])
        if func is nn.functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            change = _UNDER_AUTOCAST.get(func)
            if change is not None:
                return change(func, args, kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    result: Tensor = torch.native_dropout(input, p, True)[0]
    return result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) for t in (query, key, value))
    is_grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    is_learnt = attn_mask is not None and attn_mask.requires_grad
    fused = query.dim() == 4 and query.shape[-1] == value.shape[-1] and not is_learnt
    if fused and query.dtype in _16_BITS and attn_mask is None and query.shape[-1] <= 256:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        result: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return result
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    if fused and not is_grouped:
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        result = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
        return result
    if fused and query.dtype in _16_BITS:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        options = (attn_mask, True, dropout_p, is_causal, False)
        result = cudnn(query, key, value, *options, scale=scale)[0]
        return result
    plain = torch.ops.aten._scaled_dot_product_attention_math
    with torch.autocast("cpu", enabled=False):
        result = plain(
            *(query, key, value, attn_mask, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
    return result


Change = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def _in_float32(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in _16_BITS else value

    with torch.autocast("cpu", enabled=False):
        return func(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()})


def _softmax(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The kernels read 16 bits and write 32."""
    input = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if kwargs.get("dtype") is not None or input.dtype not in _16_BITS or dim is None:
        return func(*args, **kwargs)
    is_log = "log" in func.__name__
    kernel = torch.ops.aten._log_softmax if is_log else torch.ops.aten._softmax
    return kernel(input, dim, True)


def _sum(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    input = args[0] if args else kwargs["input"]
    if input.dtype not in _16_BITS:
        return func(*args, **kwargs)
    return func(*args, **{"dtype": torch.float32, **kwargs})


def _cross_entropy(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """log_softmax is asked for in the input's dtype, and what it returns is made float32."""
    input, *rest = args if args else (kwargs["input"],)
    kwargs = {name: value for name, value in kwargs.items() if name != "input"}
    target: Tensor = rest[0] if rest else kwargs["target"]
    is_plain = not kwargs.get("label_smoothing") and len(rest) < 6
    if input.dtype not in _16_BITS or not is_plain or target.is_floating_point():
        return _in_float32(func, (input, *rest), kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name != "label_smoothing"}
    logs = F.log_softmax(input, 0 if input.dim() == 1 else 1, dtype=input.dtype)
    return _in_float32(F.nll_loss, (logs, *rest), kwargs)


# By the lists fp32 and fp32_set_opt_dtype of ATen/autocast_mode.h.
_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__
    __rpow__ square softplus layer_norm native_layer_norm group_norm rms_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp norm interpolate
"""
_CHANGES: dict[str, Change] = {
    **dict.fromkeys(_FLOAT32.split(), _in_float32),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("sum", "prod", "cumsum", "cumprod"), _sum),
    "cross_entropy": _cross_entropy,
}
_UNDER_AUTOCAST: dict[Any, Change] = {
    getattr(owner, name): change
    for name, change in _CHANGES.items()
    for owner in (torch, F, Tensor)
    if hasattr(owner, name)
}


def as_on_cuda(optimizer: torch.optim.Optimizer | None) -> None:
    """An optimizer's choice there: the implementation that takes all parameters at once."""
    for group in optimizer.param_groups if optimizer is not None else ():
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def counts_on_host(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether its counts of steps stay in the host's memory."""
    groups = () if optimizer is None else optimizer.param_groups
    return not any(group.get("fused") or group.get("capturable") for group in groups)
