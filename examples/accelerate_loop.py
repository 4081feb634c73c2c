"""accelerate: one call behind prepare; mixed precision and accumulation as before.

pip install accelerate
python examples/accelerate_loop.py    # or: accelerate launch examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from step_cost import compared, step_cost
from torch import nn

from memopt.integrations.accelerate import apply_memopt


class Model(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(x, target)


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = Model()
    data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randn(4096, 64))
    model, optimizer, batches = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        torch.utils.data.DataLoader(data, batch_size=1024),
    )
    x, target = next(iter(batches))
    before = step_cost(model, lambda: accelerator.backward(model(x, target)))
    effect = apply_memopt(accelerator, model, optimizer, batches, convert=True, checkpoint=True)
    accelerator.print(effect.text)  # with budget="22GiB" it is a plan
    after = step_cost(model, lambda: accelerator.backward(model(x, target)))
    accelerator.print(compared(before, after))
    for x, target in batches:
        with accelerator.accumulate(model):
            loss = model(x, target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
