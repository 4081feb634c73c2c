"""Proves: torch.nn's transformer layers are converted, their activation function included, and keep
their fast path in evaluation.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from tests.convert.support import memopt_ops, one_step, state
from tests.support.record_ops import RecordOps


def encoder(activation: object = "gelu", layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, activation=activation, batch_first=True
    )
    return nn.TransformerEncoder(layer, layers)


@pytest.mark.parametrize("activation", ["gelu", "relu", nn.GELU("tanh")], ids=str)
def test_training_goes_through_memopt(activation) -> None:
    plain = encoder(activation)
    converted = copy.deepcopy(plain)
    report = memopt.convert(converted)
    if isinstance(activation, str):
        path = "layers.0.activation"
        (entry,) = (e for e in report.swapped if e.path == path)
        assert entry == (
            path,
            f"torch.nn.functional.{activation}",
            f"memopt.functional.{activation}",
        )
    x = torch.randn(2, 5, 16, requires_grad=True)
    ops = memopt_ops(lambda: converted(x))
    assert ops.count("memopt::_norm_forward") == 4
    # A linear's output is kept by nobody else: ReLU is PyTorch's, which keeps its own output.
    assert ops.count("memopt::_activation_forward") == (0 if activation == "relu" else 2)
    for ours, theirs in zip(
        one_step(lambda: converted(x), x, *converted.parameters()),
        one_step(lambda: plain(x), x, *plain.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_fast_path_is_taken_as_before(activation: str, nested: bool) -> None:
    model = encoder(activation).eval()
    memopt.convert(model)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if nested else None
    with torch.inference_mode(), RecordOps() as record:
        model(torch.randn(2, 5, 16), src_key_padding_mask=mask)
    names = [op._schema.name for op in record.ops]
    assert names.count("aten::_transformer_encoder_layer_fwd") == 2


def test_a_decoder_layer() -> None:
    torch.manual_seed(0)
    plain = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
    converted = copy.deepcopy(plain)
    memopt.convert(converted)
    x, memory = torch.randn(2, 2, 5, 16)
    assert "memopt::_activation_forward" in memopt_ops(lambda: converted(x, memory))
    torch.testing.assert_close(converted(x, memory), plain(x, memory))


def test_reverted_the_function_is_pytorch_s() -> None:
    model = encoder()
    before = state(model)
    memopt.convert(model)
    assert model.layers[0].activation is not F.gelu
    memopt.revert(model)
    assert state(model) == before


def own_function(x: Tensor) -> Tensor:
    return F.gelu(x)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("function", [own_function, memopt.functional.gelu])
def test_other_functions_are_left(function) -> None:
    model = encoder(function)
    memopt.convert(model)
    assert model.layers[0].activation is function
    memopt.revert(model)
    assert model.layers[0].activation is function


def test_without_recipes_relu_stays_pytorch_s() -> None:
    model = encoder("relu")
    report = memopt.convert(model, recipes=False)
    assert [e.path for e in report.left] == ["layers.0.activation", "layers.1.activation"]
    assert model.layers[0].activation is F.relu
