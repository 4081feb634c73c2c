"""Proves, tensor by tensor, what convolutional networks keep for backward before convert and after:
the terms of benchmarks/convert_models/conv.py and nothing else, and the allocator holds the same.
Their gradients are as accurate as before, batch norms' statistics move once, and training has the
same bits with recipes and without. Those of transformers keep no more than before.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from benchmarks.convert_models.conv import CONV_MODELS
from memopt._convert.recipes import turn_recipes_off
from memopt.memory.allocator import LiveBytes
from memopt.memory.saved import SavedTensors
from tests.convert.support import Draw, NoNarrowing, Results, assert_as_accurate

every_model = pytest.mark.parametrize("name", CONV_MODELS)


def made(name: str) -> tuple[nn.Module, Tensor]:
    return CONV_MODELS[name].make()


def converted(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    memopt.convert(twin)
    return twin


def kept(model: nn.Module, x: Tensor) -> Counter[int]:
    with SavedTensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
        output = model(x)
    del output
    return Counter(saved.storage_bytes)


def total(sizes: Counter[int]) -> int:
    return sum(sizes.elements())


@every_model
def test_kept_is_what_the_terms_say(name: str) -> None:
    model, x = made(name)
    assert kept(model, x) == CONV_MODELS[name].kept("before")
    memopt.convert(model)
    assert kept(model, x) == CONV_MODELS[name].kept("after")
    memopt.revert(model)
    assert kept(model, x) == CONV_MODELS[name].kept("before")


@every_model
def test_the_allocator_holds_what_is_kept(name: str) -> None:
    model, x = made(name)
    for _ in range(2):
        with SavedTensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
            output = model(x)
        is_kept = any(t.data_ptr() == output.data_ptr() for t in saved.tensors)
        of_the_output = 0 if is_kept else output.nbytes
        del output
        with LiveBytes() as live:
            output = model(x)
        # Each model's first convolution keeps the input, which was there before.
        assert live.left == saved.bytes - x.nbytes + of_the_output
        del output
        memopt.convert(model)


def step(model: nn.Module, x: Tensor) -> Results:
    model.zero_grad()
    output = model(x)
    loss = output.square().mean()
    loss.backward()
    return {
        "logits": output.detach(),
        **{f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


# PyTorch's own backward of the U-Net in channels-last ends the process.
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, torch.contiguous_format) for name in CONV_MODELS]
    + [(name, torch.channels_last) for name in CONV_MODELS if name != "DDPM's U-Net"],
)
def test_gradients_are_as_accurate_as_before(name: str, layout: torch.memory_format) -> None:
    def draw(seed: int) -> Draw:
        model, x = made(name)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        model, x = model.to(memory_format=layout), x.contiguous(memory_format=layout)
        exact = copy.deepcopy(model)
        with NoNarrowing():
            oracle = step(exact.double(), x.double())
        return step(converted(model), x), step(model, x), oracle

    # Sums over few values: five draws would have means up to a tenth off.
    assert_as_accurate(map(draw, range(15)))


@every_model
def test_statistics_move_once_and_as_before(name: str) -> None:
    model, x = made(name)
    twin = converted(model)
    for module in (model, twin):
        step(module, x)
        step(module.eval(), x)
    expected = dict(model.named_buffers())
    for buffer, value in twin.named_buffers():
        torch.testing.assert_close(value, expected[buffer])


@every_model
def test_training_has_the_same_bits_with_recipes_and_without(name: str) -> None:
    def train(recipes: bool) -> list[Tensor]:
        model, x = made(name)
        memopt.convert(model)
        if not recipes:
            for module in model.modules():
                turn_recipes_off(module)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            with memopt.convert.functions():
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for ours, theirs in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("region", ["memopt", "torch"])
@pytest.mark.parametrize("name", ["ResNet", "EfficientNet", "MobileNetV3"])
def test_in_regions_gradients_and_statistics_are_the_same(name: str, region: str) -> None:
    model, x = made(name)
    memopt.convert(model)
    twin = copy.deepcopy(model)

    def through(x: Tensor) -> Tensor:
        for block in twin:
            x = checkpointed(block, x)
        return x

    def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
        if region == "memopt":
            return memopt.checkpoint(block, x)  # type: ignore[no-any-return]
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]

    x = x.requires_grad_()
    model(x).sin().sum().backward()
    through(x).sin().sum().backward()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    if region == "memopt":  # PyTorch's moves them twice
        expected = dict(model.named_buffers())
        for buffer, value in twin.named_buffers():
            torch.testing.assert_close(value, expected[buffer])


def test_a_convolution_a_norm_and_an_activation_keep_what_in_place_abn_keeps() -> None:
    """Rota Bulo et al., arXiv:1712.02616: one tensor for the three, their output, from which a
    leaky ReLU's input is computed again. Here it is the norm's input, for any activation, exactly.
    """
    units, width = 5, 4
    layers: list[nn.Module] = []
    for _ in range(units):
        layers += [nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.LeakyReLU(0.01, True)]
    model = nn.Sequential(*layers, nn.Conv2d(width, width, 1))
    x = torch.randn(2, width, 6, 6)
    of_statistics = 2 * width * 4
    of_in_place_abn = x.nbytes + units * (x.nbytes + of_statistics)
    assert total(kept(model, x)) == of_in_place_abn + units * x.nbytes
    memopt.convert(model)
    assert total(kept(model, x)) == of_in_place_abn


SMALL: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "convnext": (
        "AutoModelForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        (3, 32, 32),
    ),
    "mobilenet_v2": (
        "AutoModelForImageClassification",
        {"depth_multiplier": 0.25, "classifier_dropout_prob": 0.0},
        (3, 32, 32),
    ),
    "resnet": (
        "AutoModelForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [1, 2], "embedding_size": 16},
        (3, 32, 32),
    ),
    "regnet": (
        "AutoModelForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16, "groups_width": 8},
        (3, 32, 32),
    ),
    "efficientnet": (
        "AutoModelForImageClassification",
        {
            "width_coefficient": 0.25,
            "depth_coefficient": 0.3,
            "hidden_dim": 320,
            "dropout_rate": 0.0,
            "drop_connect_rate": 0.0,
        },
        (3, 32, 32),
    ),
    "segformer": (
        "AutoModelForImageClassification",
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1] * 4,
            "num_attention_heads": [1, 1, 2, 2],
            "drop_path_rate": 0.0,
            "classifier_dropout_prob": 0.0,
        },
        (3, 64, 64),
    ),
    "mobilevit": (
        "AutoModelForImageClassification",
        {
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
            "image_size": 64,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout_prob": 0.0,
        },
        (3, 64, 64),
    ),
    "wav2vec2": (
        "AutoModel",
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "conv_dim": (8, 8),
            "conv_stride": (5, 4),
            "conv_kernel": (10, 8),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_length": 2,
            "apply_spec_augment": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "layerdrop": 0.0,
        },
        (400,),
    ),
}

# At most so much of what was kept.
MOST = {
    "convnext": 0.66,
    "mobilenet_v2": 0.35,
    "resnet": 0.66,
    "regnet": 0.56,
    "efficientnet": 0.35,
    "segformer": 0.7,
    "mobilevit": 0.4,
    "wav2vec2": 0.65,
}


def of_transformers(kind: str) -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    auto, settings, shape = SMALL[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    return getattr(transformers, auto).from_config(config).train(), torch.randn(2, *shape)


class Output(nn.Module):
    """The tensor in what a model of transformers returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", SMALL)
def test_models_of_transformers(kind: str) -> None:
    """In float64: a rounding in float32 moves what lies at the corner of a ReLU to the other side,
    and with it all gradients, in any implementation.
    """
    model, x = of_transformers(kind)
    model = Output(model)
    twin = converted(model)
    assert total(kept(twin, x)) <= MOST[kind] * total(kept(model, x))
    model, twin, x = model.double(), twin.double(), x.double()
    ours, theirs = step(twin, x), step(model, x)
    assert ours.keys() == theirs.keys()
    largest = max(result.abs().max() for result in theirs.values())
    for name, result in theirs.items():
        torch.testing.assert_close(ours[name], result, rtol=1e-6, atol=1e-8 * float(largest))
    expected = dict(model.named_buffers())
    for buffer, value in twin.named_buffers():
        torch.testing.assert_close(value, expected[buffer])
