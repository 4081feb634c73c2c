"""Proves: MemoptLightningCallback and apply_memopt plan (or convert) the model of a Lightning
module and of a loop around an Accelerator: losses are those of the plain run (but for the rounding
of recipes' kernels), blocks run again, what is logged is there, and what the module logs while it
is planned is not.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memopt
from tests.support.residual import ResidualBlock

WIDTH, ROWS, STEPS = 32, 64, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualBlock(WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 1)
        self.frozen = nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(self.blocks(x)), y)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(STEPS * ROWS, WIDTH, generator=generator),
        torch.randn(STEPS * ROWS, 1, generator=generator),
    )
    return DataLoader(data, batch_size=ROWS, shuffle=True)


def forwards_of(model: Net, counts: Counter[int]) -> None:
    for number, block in enumerate(model.blocks):
        block.norm.register_forward_pre_hook(lambda *_, n=number: counts.update([n]))


def budget() -> int:
    """A little above the least without chunks, so that blocks must be regions."""
    found = memopt.plan(net(), next(iter(loader())), "64MiB", measure=False, chunks=False)
    return found.pareto().plans[0].peak * 102 // 100


def with_lightning(
    folder: Path, *callbacks: Any
) -> tuple[list[float], Counter[int], list[dict[str, Any]]]:
    lightning = pytest.importorskip("lightning.pytorch")
    counts: Counter[int] = Counter()
    rows: list[dict[str, Any]] = []

    class Logger(lightning.loggers.logger.DummyLogger):  # type: ignore[misc, name-defined]
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            rows.append(dict(metrics))

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.seen: list[float] = []

        def on_train_start(self) -> None:
            self.net.frozen.eval()  # as users do with a backbone that is not trained

        def training_step(self, batch: Any, index: int) -> Tensor:
            assert not self.net.frozen.training
            loss = self.net(*batch)
            self.log("loss", loss)
            self.seen.append(loss.item() if not self.trainer.sanity_checking else 0)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    module = Module()
    forwards_of(module.net, counts)
    torch.manual_seed(1)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=Logger(),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )
    trainer.fit(module, loader())
    return module.seen, counts, rows


def with_accelerate(accumulation: int = 1, **options: Any) -> tuple[list[float], Counter[int]]:
    """Train; with options of apply_memopt, if there are any."""
    accelerate = pytest.importorskip("accelerate")
    from memopt.integrations.accelerate import apply_memopt

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, counts, losses = net(), Counter[int](), []
    forwards_of(model, counts)
    torch.manual_seed(1)
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), loader()
    )
    if options:
        effect = apply_memopt(accelerator, model, optimizer, batches, **options)
        limit = options.get("budget")
        assert limit is None or effect.metrics["memopt/peak_bytes"] <= limit
        counts.clear()
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(*batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, counts


def test_lightning_with_a_budget(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from memopt.integrations.lightning import MemoptLightningCallback

    losses, plain, logged = with_lightning(tmp_path)
    callback = MemoptLightningCallback(budget=budget(), measure=False)
    found, counts, rows = with_lightning(tmp_path, callback)
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=0)
    assert set(plain.values()) == {STEPS}
    assert set(counts.values()) == {STEPS, 2 * STEPS}
    first, *between, last = rows
    assert between == logged
    assert first == last
    assert (
        first["memopt/peak_bytes"]
        <= first["memopt/budget_bytes"]
        < first["memopt/plain_peak_bytes"]
    )
    assert callback.effect is not None
    assert "Module within" in callback.effect.text
    assert "\nnet.blocks.0" in callback.effect.text
    callback.effect.undo()


def test_lightning_converted_with_regions(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from memopt.integrations.lightning import MemoptLightningCallback

    losses, _, _ = with_lightning(tmp_path)
    callback = MemoptLightningCallback(convert=True, checkpoint=True)
    found, counts, rows = with_lightning(tmp_path, callback)
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=0)
    assert set(counts.values()) == {2 * STEPS}
    assert rows[0]["memopt/kept_bytes"] < rows[0]["memopt/plain_kept_bytes"] / 4


def test_lightning_with_manual_optimization_is_refused() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from memopt.integrations.lightning import MemoptLightningCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        automatic_optimization = False

    callback = MemoptLightningCallback(budget="1GiB")
    with pytest.raises(ValueError, match=r"needs automatic optimization, got Module"):
        callback.on_train_batch_start(None, Module(), (), 0)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerate(accumulation: int) -> None:
    losses, plain = with_accelerate(accumulation)
    gradients = sum(p.nbytes for p in net().parameters())
    limit = budget() + (accumulation > 1) * gradients
    found, counts = with_accelerate(accumulation, budget=limit, measure=False)
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=0)
    assert set(plain.values()) == {STEPS}
    assert max(counts.values()) == 2 * STEPS


def test_accelerate_with_a_plan_s_file_and_a_place(tmp_path: Path) -> None:
    """The first run writes the plan, the second reads it; a place for regions' inputs is used."""
    pytest.importorskip("accelerate")
    losses, _ = with_accelerate()
    file = tmp_path / "plan.json"
    written, counts = with_accelerate(budget=budget(), plan=file, measure=False)
    assert file.exists()
    read, again = with_accelerate(plan=file)
    assert (read, again) == (written, counts)
    torch.testing.assert_close(read, losses, rtol=1e-4, atol=0)
    memopt.offload.stats(reset=True)
    options = {"convert": True, "checkpoint": True, "offload": tmp_path}
    away, counts = with_accelerate(**options)
    assert set(counts.values()) == {2 * STEPS}
    assert sum(place.out.bytes for place in memopt.offload.stats(wait=True).places) > 0
    torch.testing.assert_close(away, losses, rtol=1e-4, atol=0)


def test_weights_that_accelerate_took_away_are_named() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, batch = accelerate.cpu_offload(net(), "cpu"), next(iter(loader()))
    with pytest.raises(ValueError, match=r"cpu_offload .* leave parameters on meta: ask first"):
        memopt.plan(model, batch, "1MB", measure=False)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert memopt.plan(model, batch, "64MB", measure=False).peak > 0


def test_a_library_that_is_missing_is_named() -> None:
    """In a process of its own: memopt imports none of them, and each module says what it needs."""
    program = """
import sys
import memopt
assert not {"transformers", "lightning", "accelerate"} & set(sys.modules)
for name in ("transformers", "lightning", "accelerate"):
    for hidden in (name, "lightning.pytorch", "pytorch_lightning"):
        sys.modules[hidden] = None
    try:
        __import__(f"memopt.integrations.{name}")
    except ImportError as error:
        assert f"memopt.integrations.{name} needs" in str(error), error
        assert "pip install" in str(error)
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
