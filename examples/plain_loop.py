"""A plain training loop: recipes with one line, peak and time before and after.

python examples/plain_loop.py
"""

import torch
from step_cost import compared, step_cost
from torch import nn

import memopt


class Block(nn.Module):
    """A pre-LN transformer block in PyTorch's own modules."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(128, 10)).to(device)
    x = torch.randn(8, 128, 128, device=device)
    target = torch.randint(10, (8, 128), device=device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    before = step_cost(model, lambda: loss_of(model(x)).backward())
    print(memopt.convert(model, x))  # in place; memopt.revert(model) undoes it
    print(compared(before, step_cost(model, lambda: loss_of(model(x)).backward())))

    for step in range(10):
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
