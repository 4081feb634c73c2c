"""The seven ways to train one model, each made from the same eager GPT by changing it from outside.

| mode | LayerNorm and GELU, with the Linear behind | blocks | losses must equal, to the last bit |
|---|---|---|---|
| eager | torch | kept | |
| torch-checkpoint | torch | torch.utils.checkpoint | eager |
| fused | memopt | kept | (eager, up to rounding) |
| convert | memopt: the model's code as it is | kept | (eager, up to rounding) |
| checkpoint | torch | memopt.checkpoint_wrapper | eager |
| fused+checkpoint | memopt | memopt.checkpoint_wrapper | fused |
| fused+checkpoint+offload | memopt | the same, its inputs in host memory | fused |
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.demo.model import GPT
from memopt.nn import GELULinear, LayerNormGELU, LayerNormLinear


@dataclass(frozen=True)
class Mode:
    name: str
    fused: bool = False
    convert: bool = False
    checkpoint: Literal["torch", "memopt"] | None = None
    offload: bool = False

    @property
    def reference(self) -> str | None:
        """The mode with the same kernels that keeps everything: the losses must equal its own.

        `convert` has none. It computes what fused ops do except in the head, where it rounds once
        more: PyTorch's functions that are called there are memopt's one by one.
        """
        if self.checkpoint is None:
            return None
        return "fused" if self.fused else "eager"


MODES = {
    mode.name: mode
    for mode in (
        Mode("eager"),
        Mode("torch-checkpoint", checkpoint="torch"),
        Mode("fused", fused=True),
        Mode("convert", convert=True),
        Mode("checkpoint", checkpoint="memopt"),
        Mode("fused+checkpoint", fused=True, checkpoint="memopt"),
        Mode("fused+checkpoint+offload", fused=True, checkpoint="memopt", offload=True),
    )
}


def apply_mode(model: GPT, mode: Mode, batch: Any = None) -> GPT:
    """Changes an eager model in place; its parameters stay the same objects, in the same order.

    Args:
        batch: shows `convert` the head, whose logits it then makes in chunks; None: recipes alone.
    """
    if mode.fused:
        swap_in_fused_ops(model)
    if mode.convert:
        memopt.convert(model, batch)
    for block in model.blocks:
        if mode.checkpoint == "torch":
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        elif mode.checkpoint == "memopt":
            memopt.checkpoint_wrapper(block, offload_to_cpu=mode.offload)
    return model


def swap_in_fused_ops(model: GPT) -> None:
    """Puts memopt's modules in the places of the Linears behind a LayerNorm or GELU, which are done
    there too and are the identity where they stood.
    """
    block: Any
    for block in model.blocks:
        block.attention.qkv = LayerNormLinear.from_modules(block.norm1, block.attention.qkv)
        block.fc = LayerNormLinear.from_modules(block.norm2, block.fc)
        block.proj = GELULinear.from_modules(block.act, block.proj)
        block.norm1, block.norm2, block.act = (nn.Identity() for _ in range(3))
    head: Any = model.head
    norm = head.norm_act
    head.norm_act = LayerNormGELU(list(norm.normalized_shape), norm.eps, approximate="tanh")
    head.norm_act.weight, head.norm_act.bias = norm.weight, norm.bias
