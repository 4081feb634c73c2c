"""Proves: timm's classes are recognised by what they compute, those that override torch.nn's
forwards included, and those that compute something else are left.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch

import memopt
from tests.convert.support import one_step


def _timm() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("timm")
    except Exception as error:  # its torchvision asks for one version of PyTorch, or is not there
        pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)


timm = _timm()
layers = timm.layers


@pytest.mark.parametrize(
    ("name", "arguments", "to"),
    [
        ("LayerNorm", (8,), "memopt.functional.layer_norm"),
        ("RmsNorm", (8,), "memopt.functional.rms_norm"),
        ("GELU", (), "memopt.functional.gelu"),
        ("GELUTanh", (), "memopt.functional.gelu(approximate='tanh')"),
        ("QuickGELU", (), "memopt.functional.quick_gelu"),
        ("Swish", (), "memopt.functional.silu"),
        ("SwiGLU", (8, 16), "memopt.functional.gated('silu')"),
        ("GluMlp", (8, 16), "memopt.functional.gated('sigmoid')"),
    ],
)
def test_layers_are_recognised(name: str, arguments: tuple[int, ...], to: str) -> None:
    plain = getattr(layers, name)(*arguments)
    converted = copy.deepcopy(plain)
    report = memopt.convert(converted)
    assert [e.to for e in report.swapped if e.path == ""] == [to]
    x = torch.randn(3, 8, requires_grad=True)
    for ours, theirs in zip(
        one_step(lambda: converted(x), x, *converted.parameters()),
        one_step(lambda: plain(x), x, *plain.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "op"), [("LayerNorm2d", "layer_norm"), ("RmsNorm2d", "rms_norm")])
def test_norms_over_channels(name: str, op: str) -> None:
    plain = getattr(layers, name)(8)
    converted = copy.deepcopy(plain)
    report = memopt.convert(torch.nn.Sequential(converted))
    assert [e.to for e in report.swapped] == [f"memopt.functional.{op}(channels first)"]
    x = torch.randn(2, 8, 3, 5, requires_grad=True)
    for ours, theirs in zip(
        one_step(lambda: converted(x), x, *converted.parameters()),
        one_step(lambda: plain(x), x, *plain.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert converted(x).stride() == plain(x).stride()


@pytest.mark.parametrize(("name", "arguments"), [("GroupNorm1", (8,)), ("LayerScale", (8,))])
def test_other_layers_are_left(name: str, arguments: tuple[int, ...]) -> None:
    layer = getattr(layers, name)(*arguments)
    report = memopt.convert(torch.nn.Sequential(layer))
    assert report.swapped == ()
    assert [e.from_class for e in report.left] == [name]


def test_a_vision_transformer() -> None:
    torch.manual_seed(0)
    plain = timm.models.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5
    )
    converted = copy.deepcopy(plain)
    x = torch.randn(2, 3, 16, 16)
    report = memopt.convert(converted, x)
    classes = [e.from_class for e in report.swapped]
    assert classes.count("LayerNorm") == 5
    assert classes.count("GELU") == 2
    for ours, theirs in zip(
        one_step(lambda: converted(x), *converted.parameters()),
        one_step(lambda: plain(x), *plain.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
