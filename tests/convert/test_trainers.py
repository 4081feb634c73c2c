"""Proves: training loops that know nothing of memopt train a converted model to the losses of the
unconverted one: transformers' Trainer, accelerate, Lightning; and Trainer's gradient checkpointing
runs as many forwards as of the unconverted model, and holds no more bytes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import memopt
from benchmarks.convert_models.models import MODELS, WORDS
from memopt.memory.allocator import LiveBytes

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow  # for whichever test imports a library first

STEPS = 3


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index % 2)
        ids = torch.randint(3, WORDS, (12,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def model(convert: bool) -> nn.Module:
    module = MODELS["Llama"].make()
    module.config.use_cache = False
    if convert:
        assert memopt.convert(module).swapped
    return module


def assert_trained_alike(ours: nn.Module, theirs: nn.Module, losses: Any, expected: Any) -> None:
    assert len(losses) == STEPS
    assert expected[0] > expected[-1] + 1e-3  # it learns
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=0)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # Adam divides by the gradient's size: where that is rounding alone, a step's sign is.
        distance = (mine - other).detach().abs().mean()
        assert distance < 1e-4, f"{name}: {distance}"


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_transformers_trainer(checkpointing: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")

    def train(convert: bool) -> tuple[nn.Module, list[float]]:
        module = model(convert)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(convert)),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="steps",
            save_steps=STEPS,
            gradient_checkpointing=checkpointing,
            report_to=[],
            use_cpu=True,
            seed=0,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model=module, args=arguments, train_dataset=Sentences())
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return module, losses

    (ours, losses), (theirs, expected) = train(True), train(False)
    assert_trained_alike(ours, theirs, losses, expected)
    saved = type(theirs).from_pretrained(tmp_path / "True" / f"checkpoint-{STEPS}")
    for mine, loaded in zip(ours.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, loaded)
    memopt.revert(ours)
    assert type(ours) is type(theirs)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_transformers_trainer_checkpoints_as_often(
    use_reentrant: bool | None, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")

    class Counted(transformers.Trainer):  # type: ignore[misc,name-defined]
        """Bytes that are held between forward and backward of its steps."""

        def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with LiveBytes() as live:
                loss = super().compute_loss(model, *args, **kwargs)
            self.held.append(live.left)
            return loss

    def train(convert: bool, checkpointing: bool = True) -> tuple[dict[str, int], list[int]]:
        module = model(convert)
        forwards: Counter[str] = Counter()
        for name, inner in module.named_modules():
            if name.endswith("q_proj"):
                inner.register_forward_pre_hook(lambda *_, name=name: forwards.update([name]))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            save_strategy="no",
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs=(
                None if use_reentrant is None else {"use_reentrant": use_reentrant}
            ),
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Counted(model=module, args=arguments, train_dataset=Sentences())
        trainer.held = []
        trainer.train()
        return forwards, trainer.held

    (forwards, held), (expected, most) = train(True), train(False)
    assert set(expected.values()) == {2 * STEPS}
    assert forwards == expected
    assert len(held) == STEPS
    assert all(ours <= theirs for ours, theirs in zip(held, most, strict=True))
    without, more = train(True, checkpointing=False)
    assert set(without.values()) == {STEPS}
    assert min(more) > max(most)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("first", ["convert", "prepare"])
def test_accelerate(precision: str, first: str) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(convert: bool) -> tuple[nn.Module, list[float]]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        plain = model(convert and first == "convert")
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        loader = DataLoader(Sentences(), batch_size=2)
        prepared, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
        if convert and first == "prepare":
            assert memopt.convert(prepared).swapped
        losses = []
        for batch in loader:
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return plain, losses

    (ours, losses), (theirs, expected) = train(True), train(False)
    if precision == "bf16":
        torch.testing.assert_close(losses, expected, rtol=1e-2, atol=0)
    else:
        assert_trained_alike(ours, theirs, losses, expected)
    memopt.revert(ours)
    ours(**{name: value[None] for name, value in Sentences()[0].items()}).loss.backward()


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, convert: bool) -> None:
            super().__init__()
            self.model = model(convert)
            self.losses: list[float] = []

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train(convert: bool) -> tuple[nn.Module, list[float]]:
        task = Task(convert)
        trainer = lightning.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(task, DataLoader(Sentences(), batch_size=2))
        trainer.save_checkpoint(tmp_path / f"{convert}.ckpt")
        return task.model, task.losses

    (ours, losses), (theirs, expected) = train(True), train(False)
    assert_trained_alike(ours, theirs, losses, expected)
    saved = torch.load(tmp_path / "True.ckpt", weights_only=False)["state_dict"]
    theirs.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
