"""accelerate: convert, then prepare; mixed precision and accumulation as before.

pip install accelerate
python examples/accelerate_loop.py    # or: accelerate launch examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn

import memopt


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)]
    model = nn.Sequential(*layers)
    memopt.convert(model)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 64))
    model, optimizer, batches = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        torch.utils.data.DataLoader(data, batch_size=16),
    )
    for x, target in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
