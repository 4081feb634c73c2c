"""Proves: MemoptCallback serves TRL's trainers, whose loss is not what the model returns: in real
runs of SFTTrainer and DPOTrainer losses are those of the plain run but for the rounding of recipes'
kernels, peaks by the allocator fall by what the report says, gradient checkpointing (TRL's default)
is left on by `convert` and replaced by a plan, and a plan that cannot know the trainer's loss says
how it is made known.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.16")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers", minversion="5.23")

from memopt.integrations.transformers import MemoptCallback  # noqa: E402
from tests.integrations.test_transformers import Peaks, base, llama  # noqa: E402

pytestmark = pytest.mark.slow

ROWS, STEPS = 4, 3
KINDS = ("sft", "dpo")


def tokenizer() -> Any:
    """A word each for the model's 64 classes."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def text(length: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(61, (length,), generator=generator).tolist())


def trainer_of(kind: str, folder: Path, **options: Any) -> Any:
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": ROWS, "logging_steps": 1, "seed": 3,
        "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "bf16": False, "max_length": 64, **options,
    }  # fmt: skip
    if kind == "sft":
        rows = [{"text": text(40, i)} for i in range(ROWS * STEPS)]
        make, arguments, more = trl.SFTTrainer, trl.SFTConfig(folder, **settings), {}
    else:
        rows = [
            {"prompt": text(9, i), "chosen": text(30, 99 + i), "rejected": text(30, 199 + i)}
            for i in range(ROWS * STEPS)
        ]
        make, arguments = trl.DPOTrainer, trl.DPOConfig(folder, **settings)
        more = {"ref_model": llama()}
    data = datasets.Dataset.from_list(rows)
    return make(llama(), args=arguments, train_dataset=data, processing_class=tokenizer(), **more)


def trained(trainer: Any, callback: MemoptCallback | None = None) -> tuple[list[float], Peaks]:
    peaks = Peaks()
    for one in (callback, peaks):
        if one is not None:
            trainer.add_callback(one)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], peaks


@pytest.fixture(scope="module", params=KINDS)
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[float], Peaks]:
    folder = tmp_path_factory.mktemp("plain")
    trainer = trainer_of(request.param, folder, gradient_checkpointing=False)
    return (request.param, *trained(trainer))


def test_convert(plain: tuple[str, list[float], Peaks], tmp_path: Path) -> None:
    kind, losses, peaks = plain
    callback = MemoptCallback(convert=True)
    found, converted = trained(trainer_of(kind, tmp_path, gradient_checkpointing=False), callback)
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=0)
    assert callback.effect is not None
    metrics = callback.effect.metrics
    less = metrics["memopt/plain_kept_bytes"] - metrics["memopt/kept_bytes"]
    # Not all of it: hooks that count forwards have the activations in MLPs called as modules.
    assert max(peaks.most) - max(converted.most) > 0.6 * less
    assert set(converted.forwards.values()) == {1}


def test_convert_leaves_trl_s_gradient_checkpointing_on(
    plain: tuple[str, list[float], Peaks], tmp_path: Path
) -> None:
    kind, losses, peaks = plain
    found, converted = trained(trainer_of(kind, tmp_path), MemoptCallback(convert=True))
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=0)
    assert set(converted.forwards.values()) == {2}
    assert max(converted.most) < max(peaks.most)


def test_a_plan_of_the_trainer_s_own_step(
    plain: tuple[str, list[float], Peaks], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its budget is below what recipes everywhere take, so that blocks are recomputed."""
    kind, losses, _ = plain
    plain_trainer = trainer_of(kind, tmp_path, gradient_checkpointing=False)
    _, converted = trained(plain_trainer, MemoptCallback(convert=True))
    budget = base(llama()) + max(converted.most) - 100_000
    trainer = trainer_of(kind, tmp_path)
    callback = MemoptCallback(budget=budget, measure=False, trainer=trainer)
    with caplog.at_level(logging.WARNING, "memopt"):
        found, planned = trained(trainer, callback)
    assert "takes the place of the gradient checkpointing" in caplog.text
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=0)
    assert base(trainer.model) + max(planned.most) <= budget
    assert 2 in planned.forwards.values()
    metrics = next(r for r in trainer.state.log_history if "memopt/peak_bytes" in r)
    assert metrics["memopt/peak_bytes"] <= budget < metrics["memopt/plain_peak_bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_does_not_know_the_trainer_says_so(kind: str, tmp_path: Path) -> None:
    trainer = trainer_of(kind, tmp_path)
    with pytest.raises((TypeError, ValueError)) as caught:
        trained(trainer, MemoptCallback(budget="64MB", measure=False))
    assert "MemoptCallback(..., trainer=trainer)" in "".join(caught.value.__notes__)
