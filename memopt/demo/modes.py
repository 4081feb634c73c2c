"""The six ways to train one model, each made from the same eager GPT by changing it from outside.

| mode | LayerNorm and GELU | blocks | losses must equal, to the last bit |
|---|---|---|---|
| eager | torch | kept | |
| torch-checkpoint | torch | torch.utils.checkpoint | eager |
| fused | memopt | kept | (eager, up to rounding) |
| checkpoint | torch | memopt.checkpoint_wrapper | eager |
| fused+checkpoint | memopt | memopt.checkpoint_wrapper | fused |
| fused+checkpoint+offload | memopt | the same, its inputs in host memory | fused |
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
import memopt.nn
from memopt.demo.model import GPT, LayerNormThenGELU


@dataclass(frozen=True)
class Mode:
    name: str
    fused: bool = False
    checkpoint: Literal["torch", "memopt"] | None = None
    offload: bool = False

    @property
    def reference(self) -> str | None:
        """The mode with the same kernels that keeps everything: the losses must equal its own."""
        if self.checkpoint is None:
            return None
        return "fused" if self.fused else "eager"


MODES = {
    mode.name: mode
    for mode in (
        Mode("eager"),
        Mode("torch-checkpoint", checkpoint="torch"),
        Mode("fused", fused=True),
        Mode("checkpoint", checkpoint="memopt"),
        Mode("fused+checkpoint", fused=True, checkpoint="memopt"),
        Mode("fused+checkpoint+offload", fused=True, checkpoint="memopt", offload=True),
    )
}


def apply_mode(model: GPT, mode: Mode) -> GPT:
    """Changes an eager model in place; its parameters stay the same objects with the same names."""
    if mode.fused:
        swap_in_fused_ops(model)
    for block in model.blocks:
        if mode.checkpoint == "torch":
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        elif mode.checkpoint == "memopt":
            memopt.checkpoint_wrapper(block, offload_to_cpu=mode.offload)
    return model


def swap_in_fused_ops(module: nn.Module) -> None:
    """Replaces LayerNorm, GELU and the pair of them, in all submodules, by memopt's modules."""
    for name, child in module.named_children():
        replacement = _fused(child)
        if replacement is None:
            swap_in_fused_ops(child)
        else:
            setattr(module, name, replacement)


def _fused(module: nn.Module) -> nn.Module | None:
    fused: nn.Module
    if isinstance(module, LayerNormThenGELU):
        fused = memopt.nn.LayerNormGELU(
            list(module.normalized_shape), module.eps, approximate="tanh"
        )
    elif isinstance(module, nn.LayerNorm):
        fused = memopt.nn.LayerNorm(list(module.normalized_shape), module.eps)
    elif isinstance(module, nn.GELU):
        return memopt.nn.GELU(module.approximate)
    else:
        return None
    fused.weight, fused.bias = module.weight, module.bias
    return fused
