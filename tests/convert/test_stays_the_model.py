"""Proves: convert does not disturb the model while it looks at it, and the converted model is in
every other respect what it was: its looks, state, copies and pickles; twice is once.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import memopt
from tests.convert import modules
from tests.convert.support import state


def example() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.0), modules.PlainRMSNorm(8)
    )


def test_the_model_is_in_every_other_respect_what_it_was() -> None:
    model = example().eval()
    model[1].register_buffer("extra", torch.ones(3))
    model[1].weight.requires_grad_(False)
    parameters = list(model.parameters())
    calls: list[str] = []
    model[1].register_forward_hook(lambda *_: calls.append("hook"))
    model[4].register_forward_pre_hook(lambda *_: calls.append("pre-hook"))
    seen = (repr(model), list(model.state_dict()), [name for name, _ in model.named_modules()])
    names = [type(m).__name__ for m in model.modules()]
    memopt.convert(model)
    assert (repr(model), list(model.state_dict()), [n for n, _ in model.named_modules()]) == seen
    assert [type(m).__name__ for m in model.modules()] == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not any(m.training for m in model.modules())
    assert calls == []
    model(torch.randn(2, 8))
    assert calls == ["hook", "pre-hook"]


def test_looking_disturbs_nothing() -> None:
    model = example()
    model.append(nn.BatchNorm1d(8))
    model.append(modules.Decorated(dropout=0.5))
    model[0].weight.grad = torch.ones(8, 8)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.get_rng_state()
    memopt.convert(model)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert (parameter.grad is None) == (name != "0.weight")


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
        memopt.convert.functions,
    ],
)
def test_the_caller_s_modes_do_not_matter(context) -> None:
    model = nn.Sequential(example(), modules.FeedForward(), modules.Decorated())
    with context():
        report = memopt.convert(model)
    assert report.swapped == memopt.convert(copy.deepcopy(memopt.revert(model))).swapped
    assert len(report.swapped) == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_any_device_and_dtype(device: str, dtype: torch.dtype) -> None:
    """Probes have tensors of their own, so that a model without memory is recognised as well."""
    model = nn.Sequential(example(), modules.FeedForward(), modules.Decorated()).to(device, dtype)
    assert len(memopt.convert(model).swapped) == 10
    assert model(torch.ones(2, 8, device=device, dtype=dtype)).shape == (2, 8)


def by_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_torch_save]
)
def test_copies_are_converted_and_independent(make_copy) -> None:
    model = nn.Sequential(example(), modules.FeedForward())
    memopt.convert(model, checkpoint=modules.FeedForward)
    twin = make_copy(model)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    x = torch.randn(2, 8)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        model[0][1].weight.zero_()
    assert not torch.equal(twin(x), model(x))
    memopt.revert(twin)
    assert type(twin[0][1]) is nn.LayerNorm
    assert type(twin) is nn.Sequential
    assert type(model[0][1]) is not nn.LayerNorm


def test_converting_again_does_nothing_and_says_so() -> None:
    model = example()
    memopt.convert(model)
    before = state(model)
    report = memopt.convert(model)
    assert report.swapped == ()
    assert report.recipes
    assert report.notes[0] == "nothing changed: the model was converted before"
    assert state(model) == before


def test_converting_again_swaps_what_was_added_since() -> None:
    model = example()
    first = memopt.convert(model)
    assert "nothing changed" not in str(first)
    model.append(nn.LayerNorm(8))
    report = memopt.convert(model)
    assert [e.path for e in report.swapped] == ["5"]
    assert "nothing changed" not in str(report)


class Given(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_what_returns_its_input_still_does() -> None:
    """It is no leaky ReLU with slope 1, whose result a write would not carry to the input."""
    model, x = nn.Sequential(Given()), torch.randn(3)
    assert memopt.convert(model).swapped == ()
    assert model(x) is x
