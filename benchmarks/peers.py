"""Compiled ATen and other libraries' kernels, as further variants where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.inputs import EPS

LayerNorm = Callable[[Tensor, Tensor, Tensor], Tensor]
PACKAGES = {"compile": "torch", "liger": "liger_kernel", "apex": "apex", "flash_attn": "flash_attn"}


def missing(names: Iterable[str]) -> list[str]:
    """The ones of `names` whose package is not installed."""
    return [name for name in names if find_spec(PACKAGES[name]) is None]


def compiled(names: Iterable[str], fn: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """`fn` through torch.compile, for the one shape that it will be called with, if asked for."""
    if "compile" not in names:
        return {}
    torch._dynamo.reset()  # or the shapes of earlier cases would count against its limit
    return {"compile": torch.compile(fn, dynamic=False, fullgraph=True)}


def layer_norms(names: Iterable[str]) -> dict[str, LayerNorm]:
    """The ones of `names` that are installed, as functions of (x, weight, bias) over the last
    dimension.
    """
    names = list(names)
    left_out = missing(names)
    return {
        name: load()
        for name, load in {"liger": _liger, "apex": _apex, "flash_attn": _flash_attn}.items()
        if name in names and name not in left_out
    }


def rms_norms(names: Iterable[str]) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Liger's RMSNorm as a function of (x, weight), of Llama's kind."""
    if "liger" not in names or missing(["liger"]):
        return {}
    function = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return {"liger": lambda x, weight: function.apply(x, weight, EPS, 0.0, "llama", False)}


def gated_units(names: Iterable[str], unit: str) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Liger's unit of (gate, up), of "swiglu" or "geglu". Its backward writes over both."""
    classes = {"swiglu": "LigerSiLUMulFunction", "geglu": "LigerGELUMulFunction"}
    if "liger" not in names or missing(["liger"]) or unit not in classes:
        return {}
    return {"liger": getattr(import_module(f"liger_kernel.ops.{unit}"), classes[unit]).apply}


def _liger() -> LayerNorm:
    function = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    return lambda x, weight, bias: function.apply(x, weight, bias, EPS)


def _apex() -> LayerNorm:
    function = import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine
    return lambda x, weight, bias: function(x, weight, bias, weight.shape, EPS)


def _flash_attn() -> LayerNorm:
    function = import_module("flash_attn.ops.triton.layer_norm").layer_norm_fn
    return lambda x, weight, bias: function(x, weight, bias, eps=EPS)
