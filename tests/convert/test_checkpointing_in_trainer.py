"""Proves: transformers' Trainer, told to checkpoint gradients, runs each layer of a converted model
as often as a layer of the plain one and holds no more bytes for backward, for a model of each kind,
whether convert comes before Trainer turns checkpointing on or after.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from memopt.memory.allocator import LiveBytes
from tests.convert.checkpointed import checkpoint, convert, counted_forwards
from tests.support.families import QUICK
from tests.support.tiny_transformers import Tiny, loss_of, tiny

transformers: Any = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow

STEPS = 2


class OnBegin(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Converts when Trainer has turned checkpointing on."""

    def on_train_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        assert model.is_gradient_checkpointing
        convert(model)


class Counted(transformers.Trainer):  # type: ignore[misc,name-defined]
    """Notes the bytes that are held between forward and backward of its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: list[int] = []

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        with LiveBytes() as live:
            loss = loss_of(model(**inputs))
        self.held.append(live.left)
        return loss


def train(family: Tiny, order: str, path: Path) -> tuple[Counter[str], list[int]]:
    """order: of these, in which they are done: enable, convert, Trainer; after Trainer, convert is
    called when training begins.
    """
    model = family.make()
    steps = {"enable": checkpoint, "convert": convert}
    earlier, _, later = order.partition("Trainer")
    for step in earlier.split():
        steps[step](model)
    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        max_steps=STEPS,
        save_strategy="no",
        learning_rate=1e-5,
        gradient_checkpointing=True,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Counted(
        model=model,
        args=arguments,
        train_dataset=[{}] * 8,
        data_collator=lambda _: family.inputs(),
        callbacks=[OnBegin()] if later else [],
    )
    with counted_forwards(model) as forwards:
        trainer.train()
    return forwards, trainer.held


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", QUICK)
def test_it_checkpoints_as_often_and_holds_no_more(name: str, tmp_path: Path) -> None:
    family = tiny(name)
    forwards, held = train(family, "Trainer", tmp_path)
    assert set(forwards.values()) == {2 * STEPS}
    for order in ("convert Trainer", "enable convert Trainer", "Trainer convert"):
        found, ours = train(family, order, tmp_path)
        assert found == forwards
        assert len(ours) == STEPS
        assert all(mine <= theirs for mine, theirs in zip(ours, held, strict=True))
