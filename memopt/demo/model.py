"""The model that the demo trains: a pre-LN GPT-2 over bytes, written with torch.nn alone.

Nothing in this file knows memopt: modes.py swaps its pieces in from outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""The tokens of the text: its bytes."""


@dataclass(frozen=True)
class ModelSize:
    layers: int
    width: int
    heads: int
    context: int
    """Longest sequence, in tokens (bytes)."""
    vocabulary: int = VOCABULARY
    """The number of tokens that the model knows. More than there are make its logits as wide as
    those of a language model."""


class LayerNormThenGELU(nn.LayerNorm):
    """Two operations in one module, whose parameters are named as those of the fused one."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(super().forward(input), approximate="tanh")


class Attention(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, time, 3 width] -> three of [batch, heads, time, width / heads]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.fc = nn.Linear(size.width, 4 * size.width)
        self.act = nn.GELU(approximate="tanh")
        self.proj = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.proj(self.act(self.fc(self.norm2(x))))
        return x


class Head(nn.Module):
    """Logits through a transform, as in BERT's head; its LayerNorm serves as the final one too."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.transform = nn.Linear(size.width, size.width)
        self.norm_act = LayerNormThenGELU(size.width)
        self.logits = nn.Linear(size.width, size.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm_act(self.transform(x)))
        return logits


class GPT(nn.Module):
    """forward(tokens, targets), both int64 [batch, time]: the mean cross entropy, in nats."""

    def __init__(self, size: ModelSize, generator: torch.Generator) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.head = Head(size)
        self._initialize(size, generator)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits = self.head(self.blocks(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _initialize(self, size: ModelSize, generator: torch.Generator) -> None:
        """GPT-2's, whose deviation of 0.02 at width 768 is scaled to this width."""
        std = 0.02 * math.sqrt(768 / size.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith("proj.weight")
                shrink = math.sqrt(2 * size.layers) if into_residual else 1.0
                nn.init.normal_(parameter, std=std / shrink, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
