"""Lightning: convert in configure_model, so that training_step runs with recipes.

pip install lightning
python examples/lightning_module.py
"""

import lightning
import torch
from torch import nn

import memopt


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(32, 128)]
        for _ in range(4):
            layers += [nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128)]
        self.net = nn.Sequential(*layers, nn.Linear(128, 4))

    def configure_model(self) -> None:
        report = memopt.convert(self)  # training_step is one of the methods that enter the model
        self.print(f"{len(report.swapped)} modules are memopt's")

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, target = batch
        loss = nn.functional.cross_entropy(self.net(x), target)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(256, 32), torch.randint(4, (256,)))
    trainer = lightning.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=32))
    print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
