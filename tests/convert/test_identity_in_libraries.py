"""Proves: what PyTorch, transformers and Lightning ask a model about itself has the same answers
when it is converted: fast paths, tables of classes, methods that look overridden, captured outputs.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._convert.recipes import has_recipes
from tests.convert.test_identity import WIDTH, Block, input, model


def test_data_parallel_s_replicas() -> None:
    m = model()
    memopt.convert(m, checkpoint=Block)
    for module in m.modules():
        replica = module._replicate_for_data_parallel()
        assert type(replica) is type(module)
        assert has_recipes(replica) == has_recipes(module)


def test_the_fast_path_of_transformer_encoders_stays() -> None:
    """It asks whether any module inside has hooks."""
    from torch.profiler import profile

    def is_fast(m: nn.Module) -> bool:
        with torch.no_grad(), profile() as events:
            m(input())
        return any("_transformer_encoder_layer_fwd" in e.key for e in events.key_averages())

    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    for m in (encoder, nn.Sequential(encoder), nn.Sequential(layer)):
        m.eval()
        assert is_fast(m)
        expected = m(input())
        memopt.convert(m)
        assert is_fast(m)
        torch.testing.assert_close(m(input()), expected)
        memopt.revert(m)


class TestTransformers:
    """Questions that transformers asks."""

    @pytest.fixture
    def llama(self) -> Any:
        pytest.importorskip("transformers")
        from tests.support.tiny_transformers import tiny

        return tiny("llama").make()

    def test_its_tables_of_classes(self) -> None:
        """A pipeline gives a model a vocoder if its class is among the values of such a table."""
        transformers = pytest.importorskip("transformers")
        table = transformers.MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING

        sizes = {"hidden_size": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 9}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        config = transformers.SpeechT5Config(**sizes, **heads)
        speech = transformers.SpeechT5ForTextToSpeech(config)
        assert memopt.convert(speech).swapped
        assert speech.__class__ in table.values()

    def test_no_method_looks_overridden(self, llama: Any) -> None:
        """Otherwise it takes another way, and warns."""
        memopt.convert(llama)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not llama._is_overridden("gradient_checkpointing_enable")
            llama.activation_checkpointing_enable()
            llama.activation_checkpointing_disable()

    @pytest.mark.parametrize("first", ["convert", "call"])
    def test_its_hooks_that_capture_outputs(self, llama: Any, first: str) -> None:
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
