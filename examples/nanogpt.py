"""A loop as in nanoGPT: classes of its own, a loss of its own, and one line of memopt.

python examples/nanogpt.py
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from step_cost import compared, step_cost
from torch import Tensor, nn

import memopt


@dataclass
class GPTConfig:
    block_size: int = 128
    vocab_size: int = 4096
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 64


class LayerNorm(nn.Module):
    """A layer norm with an optional bias."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.ln_1, self.ln_2 = LayerNorm(width, bias=False), LayerNorm(width, bias=False)
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.n_head, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, bias=False)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPTConfig()
    data = torch.randint(config.vocab_size, (20_000,))  # your train.bin

    def get_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - config.block_size, (8,))
        x = torch.stack([data[i : i + config.block_size] for i in starts])
        y = torch.stack([data[i + 1 : i + 1 + config.block_size] for i in starts])
        return x.to(device), y.to(device)

    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    before = step_cost(model, lambda: model(*get_batch())[1].backward())
    print(memopt.convert(model, get_batch()))  # norms, GELU, and the logits in chunks
    print(compared(before, step_cost(model, lambda: model(*get_batch())[1].backward())))

    for step in range(5):
        _, loss = model(*get_batch())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
