"""Proves: a model of transformers with use_cache=True trains in regions as it does without them,
in every bit and at fewer bytes, since the regions turn the cache off; where that would be another
computation, an error or a warning says what to do.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.checkpoint.support import assert_same_bits, step_results

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow  # for whichever test imports the library first

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2}
T5 = {"vocab_size": 50, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2}
IDS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))

CONFIGS = {
    "Llama": lambda: transformers.LlamaConfig(**SMALL, num_hidden_layers=2, intermediate_size=16),
    "GPT-2": lambda: transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2),
    "BLOOM": lambda: transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2),
    "Falcon": lambda: transformers.FalconConfig(**SMALL, num_hidden_layers=2),
    "Gemma 2": lambda: transformers.Gemma2Config(
        **SMALL, num_hidden_layers=2, intermediate_size=16, num_key_value_heads=2, head_dim=8
    ),
    "T5": lambda: transformers.T5Config(**T5, decoder_start_token_id=0, pad_token_id=0),
    "Jamba": lambda: transformers.JambaConfig(
        **SMALL,
        num_hidden_layers=4,
        intermediate_size=16,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
    ),
}

TURNED_OFF = "regions turn the cache of keys and values off in training"


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    assert config.use_cache
    kind = "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM"
    model: nn.Module = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    return model.train()


@pytest.mark.filterwarnings(f"ignore:checkpoint_wrapper. {TURNED_OFF}")
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_cache_is_turned_off_in_training(name: str, every: int) -> None:
    model = make(name)

    def loss() -> Tensor:
        return model(input_ids=IDS, labels=IDS).loss

    expected = step_results(loss, model.parameters())
    before = memopt.saved_bytes(loss)
    memopt.apply_checkpointing(model, every=every)
    assert_same_bits(step_results(loss, model.parameters()), expected)
    assert memopt.saved_bytes(loss) < before


def test_a_warning_and_the_report_say_so() -> None:
    model = make("BLOOM")
    report = memopt.convert(model, checkpoint=True)
    assert [note for note in report.notes if "use_cache=True" in note]
    with pytest.warns(UserWarning, match=f"{TURNED_OFF}.*use_cache=False"):
        model(input_ids=IDS)
    model.config.use_cache = False
    assert not [n for n in memopt.convert(model, checkpoint=True).notes if "use_cache" in n]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=IDS, labels=IDS).loss.backward()


def test_what_a_cache_holds_is_not_lost_silently() -> None:
    model = make("Llama")
    with torch.no_grad():
        prefix = model(input_ids=IDS).past_key_values
    memopt.apply_checkpointing(model)
    with pytest.raises(RuntimeError, match=r"layers\.0 .*must get an empty cache.*use_cache=False"):
        model(input_ids=IDS, past_key_values=prefix)


def test_modules_that_are_no_layers_of_transformers_name_the_setting() -> None:
    model = make("Llama")
    attention = type(model.model.layers[0].self_attn)
    memopt.apply_checkpointing(model, attention)
    with pytest.raises(RuntimeError, match=r"self_attn .*must not get a cache.*use_cache=False"):
        model(input_ids=IDS)
    model(input_ids=IDS, use_cache=False).logits.sum().backward()


def test_in_evaluation_the_cache_stays() -> None:
    model = make("BLOOM").eval()
    expected = step_results(lambda: model(input_ids=IDS).logits, model.parameters())
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    memopt.apply_checkpointing(model)
    with pytest.warns(UserWarning, match=r"h\.0 .*runs without a region.*use_cache=False"):
        output = model(input_ids=IDS)
    assert output.past_key_values.get_seq_length() == IDS.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(
            model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0), tokens
        )
        with memopt.disable_checkpointing():
            model(input_ids=IDS)
    model.config.use_cache = False
    got = step_results(lambda: model(input_ids=IDS).logits, model.parameters())
    assert_same_bits(got, expected)


class InRegion(nn.Module):
    """A layer as a model of one's own calls it."""

    def __init__(self, layer: nn.Module, method: bool) -> None:
        super().__init__()
        self.layer = layer
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fn = self.layer.forward if self.method else self.layer
        return memopt.checkpoint(fn, *args, **kwargs)


@pytest.mark.parametrize("method", [False, True])
def test_checkpoint_of_a_layer_turns_the_cache_off(method: bool) -> None:
    model = make("Llama")

    def loss() -> Tensor:
        return model(input_ids=IDS, labels=IDS).loss

    expected = step_results(loss, model.parameters())
    model.model.layers = nn.ModuleList(InRegion(layer, method) for layer in model.model.layers)
    with pytest.warns(UserWarning, match=f"^checkpoint: {TURNED_OFF}.*use_cache=False"):
        actual = step_results(loss, model.parameters())
    assert_same_bits(actual, expected)


def test_checkpoint_of_a_module_that_needs_its_cache_names_the_setting() -> None:
    model = make("Llama")
    for layer in model.model.layers:
        layer.self_attn = InRegion(layer.self_attn, method=False)
    with pytest.raises(RuntimeError, match=r"^checkpoint: .*must not get a cache.*use_cache=False"):
        model(input_ids=IDS)
    with torch.no_grad():
        model(input_ids=IDS)
    model(input_ids=IDS, use_cache=False).logits.sum().backward()
