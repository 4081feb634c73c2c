"""Compiled ATen and other libraries' LayerNorm, as further variants where they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from benchmarks.inputs import EPS

LayerNorm = Callable[[Tensor, Tensor, Tensor], Tensor]
PACKAGES = {"compile": "torch", "liger": "liger_kernel", "apex": "apex", "flash_attn": "flash_attn"}


def missing(names: Iterable[str]) -> list[str]:
    """Those of `names` whose package is not installed."""
    return [name for name in names if importlib.util.find_spec(PACKAGES[name]) is None]


def compiled(names: Iterable[str], fn: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """`fn` through torch.compile, for the one shape that it will be called with, if asked for."""
    if "compile" not in names:
        return {}
    torch._dynamo.reset()  # or the shapes of earlier cases would count against its limit
    return {"compile": torch.compile(fn, dynamic=False, fullgraph=True)}


def layer_norms(names: Iterable[str]) -> dict[str, LayerNorm]:
    """Those of `names` that are installed, as functions of (x, weight, bias) over the last
    dimension.
    """
    names = list(names)
    left_out = missing(names)
    return {
        name: load()
        for name, load in {"liger": _liger, "apex": _apex, "flash_attn": _flash_attn}.items()
        if name in names and name not in left_out
    }


def _liger() -> LayerNorm:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _apex() -> LayerNorm:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return lambda x, weight, bias: fused_layer_norm_affine(x, weight, bias, weight.shape, EPS)


def _flash_attn() -> LayerNorm:
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    return lambda x, weight, bias: layer_norm_fn(x, weight, bias, eps=EPS)
