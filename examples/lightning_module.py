"""Lightning: one callback.

pip install lightning
python examples/lightning_module.py
"""

import lightning
import torch
from step_cost import compared, step_cost
from torch import nn

from memopt.integrations.lightning import MemoptLightningCallback


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(32, 128)]
        for _ in range(4):
            layers += [nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128)]
        self.net = nn.Sequential(*layers, nn.Linear(128, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, target = batch
        loss = nn.functional.cross_entropy(self.net(x), target)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(2048, 32), torch.randint(4, (2048,)))
    memory = MemoptLightningCallback(convert=True)  # or budget="22GiB"
    trainer = lightning.Trainer(
        max_epochs=1,
        callbacks=[memory],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    x, target = data[:256]

    def step() -> None:
        nn.functional.cross_entropy(model.net(x), target).backward()

    before = step_cost(model, step)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=256))
    print(memory.effect.text)
    print(compared(before, step_cost(model, step)))
    print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
