"""Proves: what transformers and Lightning ask of a model's classes and methods has the same answer
once it is converted.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
from tests.convert.test_identity import model


@pytest.fixture
def llama() -> Any:
    pytest.importorskip("transformers")
    from tests.support.tiny_transformers import tiny

    return tiny("llama").make()


def test_its_tables_of_classes() -> None:
    """A pipeline gives a model a vocoder if its class is among the values of such a table."""
    transformers = pytest.importorskip("transformers")
    table = transformers.MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING

    sizes = {"hidden_size": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 9}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.SpeechT5Config(**sizes, **heads)
    speech = transformers.SpeechT5ForTextToSpeech(config)
    assert memopt.convert(speech).swapped
    assert speech.__class__ in table.values()


def test_no_method_looks_overridden(llama: Any) -> None:
    """Otherwise it takes another way, and warns."""
    memopt.convert(llama)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not llama._is_overridden("gradient_checkpointing_enable")
        llama.activation_checkpointing_enable()
        llama.activation_checkpointing_disable()


@pytest.mark.parametrize("first", ["convert", "call"])
def test_its_hooks_that_capture_outputs(llama: Any, first: str) -> None:
    """They are put on the modules at the first call."""
    llama.set_attn_implementation("eager")
    ids = torch.arange(3, 9)[None]

    def captured() -> Any:
        return llama(input_ids=ids, output_hidden_states=True, output_attentions=True)

    expected = captured() if first == "call" else None
    memopt.convert(llama)
    got = captured()
    memopt.revert(llama)
    again = captured()
    for other in filter(None, (expected, again)):
        for kind in ("hidden_states", "attentions"):
            assert len(got[kind]) == len(other[kind]) == 2 + (kind == "hidden_states")
            for ours, theirs in zip(got[kind], other[kind], strict=True):
                torch.testing.assert_close(ours, theirs)


def test_lightning_s_questions_whether_hooks_are_overridden() -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.utilities.model_helpers import is_overridden

    class Task(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return F.mse_loss(self.model(batch), batch)

    names = [name for name in dir(lightning.LightningModule) if not name.startswith("_")]
    task = Task()

    def overridden() -> list[str]:
        parent = lightning.LightningModule
        return [n for n in names if callable(getattr(parent, n)) and is_overridden(n, task, parent)]

    before = overridden()
    assert "training_step" in before
    memopt.convert(task)
    assert overridden() == before
