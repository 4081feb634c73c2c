"""Small models of transformers, each with a batch that has labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

NAMES = ("gpt2", "bert", "llama", "vit", "t5")


def tiny(name: str, rows: int = 4, length: int = 24) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 100, (rows, length))
    text = {"input_ids": ids, "labels": ids.clone()}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=3, n_embd=64, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    elif name == "bert":
        config = transformers.BertConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=256,
            vocab_size=100,
        )
        model = transformers.BertForMaskedLM(config)
    elif name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=160,
            vocab_size=100,
        )
        model = transformers.LlamaForCausalLM(config)
    elif name == "t5":
        config = transformers.T5Config(
            d_model=64,
            d_kv=16,
            num_layers=2,
            num_heads=4,
            d_ff=128,
            vocab_size=100,
            decoder_start_token_id=0,
        )
        model = transformers.T5ForConditionalGeneration(config)
    else:
        config = transformers.ViTConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=256,
            image_size=32,
            patch_size=8,
        )
        model = transformers.ViTForImageClassification(config)
        pixels = torch.randn(rows, 3, 32, 32)
        text = {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.long)}
    model.config.use_cache = False
    return model.train(), text


class Mlp(nn.Module):
    """Blocks in an nn.Sequential, which returns its loss."""

    def __init__(self, blocks: int = 9, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.act(self.up(self.norm(x)))))
