"""Proves: unmodified models of transformers, converted, compute what they computed, to the
accuracy of the unconverted model, and are in every other respect the models that they were.
"""

from __future__ import annotations

import collections
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import memopt
from benchmarks.convert_models.models import HIDDEN, MODELS, Model
from memopt._convert.swap import swap_of
from tests.convert.support import (
    DRAWS,
    Results,
    assert_as_accurate,
    assert_same,
    converted_inside,
    exact_step,
    state,
    step,
)
from tests.support.selection import pairwise

transformers: Any = pytest.importorskip("transformers")

ALL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
GENERATING = pytest.mark.parametrize(
    "model", [pytest.param(m, id=name) for name, m in MODELS.items() if m.generates]
)


AUTOCAST = "autocast"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, AUTOCAST], ids=str)


def make(model: Model, dtype: torch.dtype | str, seed: int = 0) -> nn.Module:
    return model.make(seed=seed).to(torch.float32 if dtype == AUTOCAST else dtype)


def step_in(dtype: torch.dtype | str, model: nn.Module, inputs: dict[str, Tensor]) -> Results:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == AUTOCAST):
        return step(model, inputs)


@ALL
@DTYPES
def test_outputs_and_gradients(model: Model, dtype: torch.dtype | str) -> None:
    inputs = model.inputs()
    draws = []
    for seed in DRAWS:
        plain = make(model, dtype, seed)
        converted = copy.deepcopy(plain)
        report = memopt.convert(converted)
        swapped = collections.Counter(e.from_class for e in report.swapped)
        assert swapped.pop("Dropout", 0) == sum(isinstance(m, nn.Dropout) for m in plain.modules())
        assert swapped == model.swapped
        steps = (step_in(dtype, one, inputs) for one in (converted, plain))
        draws.append((*steps, exact_step(plain, inputs)))
    assert_as_accurate(draws)


WITH_REGIONS = {
    "regions": ({"checkpoint": True}, "keep"),
    "offloaded regions": ({"checkpoint": True, "offload": "cpu"}, "keep"),
    "offloaded": ({}, "cpu"),
    "both": ({"checkpoint": True, "offload": "cpu"}, "cpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "way"),
    pairwise(list(MODELS), (torch.float32, torch.bfloat16, AUTOCAST), list(WITH_REGIONS)),
    ids=str,
)
def test_regions_and_offload_change_no_bit(name: str, dtype: torch.dtype | str, way: str) -> None:
    """So gradients are as right as those of the converted model without them, dropout included."""
    model, (choice, policy) = MODELS[name], WITH_REGIONS[way]
    inputs = model.inputs()
    converted, other = (make(model, dtype).train() for _ in range(2))
    memopt.convert(converted)
    memopt.convert(other, **choice)
    torch.manual_seed(1)
    expected = step_in(dtype, converted, inputs)
    torch.manual_seed(1)
    with memopt.saved_tensors(policy):
        assert_same(step_in(dtype, other, inputs), expected)


@ALL
def test_saves_less_for_backward(model: Model) -> None:
    report = memopt.convert(model.make(), model.inputs())
    assert report.bytes_before is not None
    assert report.bytes_after is not None
    assert 0 < report.bytes_after <= report.bytes_before


@ALL
def test_reverted_it_is_the_model_that_it_was(model: Model) -> None:
    module = model.make()
    before, inputs = state(module), model.inputs()
    expected = step(module, inputs)
    memopt.convert(module)
    step(module, inputs)
    memopt.revert(module)
    assert state(module) == before
    assert_same(step(module, inputs), expected)


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    results = step(model, inputs)
    return {name: results[name] for name in ("logits", "loss")}


@ALL
def test_state_goes_between_converted_and_plain(model: Model, tmp_path: Path) -> None:
    plain, converted = model.make(), model.make()
    memopt.convert(converted)
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.mul_(1.25)
    assert list(converted.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(converted.state_dict())
    inputs = model.inputs()
    expected = outputs(plain, inputs)
    converted.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path, attn_implementation="eager").train()
    assert type(loaded) is type(plain)
    assert_same(outputs(loaded, inputs), expected)
    assert loaded.config.architectures == [type(plain).__name__]


@GENERATING
def test_generates_the_same_tokens(model: Model) -> None:
    module = model.make().eval()
    ids = model.inputs()["input_ids"]

    def tokens() -> Tensor:
        return module.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)

    expected = tokens()
    memopt.convert(module)
    assert torch.equal(tokens(), expected)


def without_cache(model: Model) -> nn.Module:
    """A region that runs again would write its keys and values into the cache once more."""
    module = model.make()
    for part in module.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False
    return module


@ALL
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
def test_gradient_checkpointing_changes_no_bit(model: Model) -> None:
    module, inputs = without_cache(model), model.inputs()
    memopt.convert(module)
    expected = step(module, inputs)
    module.gradient_checkpointing_enable()
    assert_same(step(module, inputs), expected)


@pytest.mark.parametrize("model", [MODELS["Llama"], MODELS["GPT-2"]], ids=["Llama", "GPT-2"])
def test_memopt_s_checkpoints_of_the_blocks_change_no_bit(model: Model) -> None:
    module, inputs = without_cache(model), model.inputs()
    memopt.convert(module)
    expected = step(module, inputs)
    report = memopt.convert(module, checkpoint=True)
    assert len(report.checkpointed) == 2
    assert_same(step(module, inputs), expected)
    plain = model.make()
    assert state(memopt.revert(module))[0][0] is type(plain)
    assert [type(m) for m in module.modules()] == [type(m) for m in plain.modules()]


class LoRA(nn.Module):
    """base(x) + B(A(dropout(x))): what PEFT puts in a linear's place."""

    def __init__(self, base: nn.Linear, rank: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.B = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.dropout(x) @ self.A.T @ self.B.T


def adapted(model: nn.Module) -> nn.Module:
    """Freezes the model and adapts query, value and gate projections."""
    torch.manual_seed(3)
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in ("q_proj", "v_proj", "gate_proj"):
            if isinstance(getattr(module, name, None), nn.Linear):
                setattr(module, name, LoRA(getattr(module, name)))
    return model


@pytest.mark.parametrize("first", ["adapters", "convert"])
def test_adapters(first: str) -> None:
    model = MODELS["Llama"]
    inputs = model.inputs()
    draws = []
    for seed in DRAWS:
        plain, converted = adapted(model.make(seed=seed)), model.make(seed=seed)
        if first == "adapters":
            adapted(converted)
        report = memopt.convert(converted)
        if first == "convert":
            adapted(converted)
        assert [e.from_class for e in report.swapped].count("LlamaMLP") == 2
        results = step(converted, inputs)
        assert sum("gradient" in name for name in results) == 12
        draws.append((results, step(plain, inputs), exact_step(plain, inputs)))
    assert_as_accurate(draws)


def test_a_norm_s_weight_may_be_wider_than_its_input() -> None:
    """There PyTorch's promotion decides the dtype, for most classes; convert keeps to it."""
    norms = transformers.models
    for cls in (
        norms.llama.modeling_llama.LlamaRMSNorm,
        norms.t5.modeling_t5.T5LayerNorm,
        norms.gemma.modeling_gemma.GemmaRMSNorm,
        norms.olmo2.modeling_olmo2.Olmo2RMSNorm,
        norms.cohere.modeling_cohere.CohereLayerNorm,
    ):
        norm = cls(HIDDEN)
        x = torch.randn(3, HIDDEN, dtype=torch.bfloat16)
        expected = norm(x)
        norm = converted_inside(norm)
        assert swap_of(norm) is not None, cls
        assert norm(x).dtype == expected.dtype, cls
        torch.testing.assert_close(norm(x), expected, rtol=1.6e-2, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_compiles_with_as_many_graphs(name: str) -> None:
    """And to the same gradients; recipes step aside."""
    plain, inputs = MODELS[name].make(), MODELS[name].inputs()
    converted = copy.deepcopy(plain)
    memopt.convert(converted)
    graphs = []
    for module, backend in ((plain, "eager"), (converted, "aot_eager")):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        compiled = torch.compile(module, backend=counter)
        compiled(**inputs).loss.backward()
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] > 0
    gradients = [p.grad for p in converted.parameters()]
    converted.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    converted(**inputs).loss.backward()
    for ours, parameter in zip(gradients, converted.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)
