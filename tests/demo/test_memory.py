"""Proves: the demo's memory figures are exact: they equal figures worked out by hand, for single
operators and for a whole GPT in each mode, and what autograd's own saved-tensor hooks count.
"""

from __future__ import annotations

import pytest
import torch

from memopt.demo.memory import MemoryProfile, profile_memory
from memopt.demo.model import GPT, VOCABULARY, ModelSize
from memopt.demo.modes import MODES, apply_mode
from memopt.memory.saved import SavedTensors

CPU = torch.device("cpu")
FLOAT = 4
SIZE = ModelSize(layers=3, width=32, heads=2, context=16)
BATCH = 5
TOKENS = BATCH * SIZE.context

# Floats per token that stay alive for backward, by who saves them first.
BLOCK = (
    SIZE.width  # the first LayerNorm's input
    + 2  # its mean and rstd
    + SIZE.width  # its output: the input of qkv
    + 3 * SIZE.width  # q, k, v
    + SIZE.width  # attention's output, which is the projection's input too
    + SIZE.heads  # attention's log-sum-exp
    + SIZE.width  # the second LayerNorm's input
    + 2
    + SIZE.width  # the input of fc
    + 4 * SIZE.width  # GELU's input
    + 4 * SIZE.width  # the input of proj
)
# LayerNormLinear and GELULinear do not keep what is between: the inputs of qkv, fc and proj.
FUSED_BLOCK = BLOCK - 6 * SIZE.width
HEAD = (
    SIZE.width  # the transform's input
    + SIZE.width  # LayerNorm's input
    + 2
    + SIZE.width  # GELU's input: the tensor that LayerNormGELU never makes
    + SIZE.width  # the input of logits
    + VOCABULARY  # log-probabilities
)
SCALAR = FLOAT  # the loss's total weight
BESIDE = {
    # Of each block, torch.utils.checkpoint keeps the whole state of the CPU's generator.
    "torch-checkpoint": SIZE.layers * torch.get_rng_state().nbytes,
    # The head in chunks has made the gradients of its weight and bias; there is no total weight.
    "convert": (SIZE.width + 1) * VOCABULARY * FLOAT - SCALAR,
}
EXPECTED = {
    "eager": SIZE.layers * BLOCK + HEAD,
    "torch-checkpoint": SIZE.layers * SIZE.width + HEAD,
    "fused": SIZE.layers * FUSED_BLOCK + HEAD - SIZE.width,
    # Of the head GELU's input and the input of logits are made again; in place of log-probabilities
    # there is the gradient of the input of logits.
    "convert": SIZE.layers * FUSED_BLOCK + HEAD - SIZE.width - VOCABULARY,
    "checkpoint": SIZE.layers * SIZE.width + HEAD,
    "fused+checkpoint": SIZE.layers * SIZE.width + HEAD - SIZE.width,
    "fused+checkpoint+offload": SIZE.layers * SIZE.width + HEAD - SIZE.width,
}


def gpt(mode: str) -> GPT:
    return apply_mode(GPT(SIZE, torch.Generator().manual_seed(0)), MODES[mode])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (2, BATCH, SIZE.context))
    return tokens[0], tokens[1]


@pytest.fixture(scope="module")
def profiles() -> dict[str, MemoryProfile]:
    tokens, targets = batch()
    profiles = {}
    for mode in MODES:
        model = gpt(mode)
        profiles[mode] = profile_memory(lambda model=model: model(tokens, targets), CPU)  # type: ignore[misc]
    return profiles


def test_one_operator_by_hand() -> None:
    x = torch.randn(1000, requires_grad=True)
    profile = profile_memory(lambda: x.exp().sum(), CPU)
    assert profile.saved == 1000 * FLOAT  # exp keeps its result
    # Backward: that result, x's gradient, the loss and the loss's gradient.
    assert profile.peak == 2 * 1000 * FLOAT + 2 * FLOAT
    assert profile.live[-1] == 1000 * FLOAT + FLOAT  # the gradient and the loss


def test_views_and_older_memory_cost_nothing() -> None:
    weight = torch.randn(50, 20, requires_grad=True)
    x = torch.randn(30, 20)
    profile = profile_memory(lambda: (x.view(30, 20) @ weight.t()).relu().sum(), CPU)
    assert profile.saved == 30 * 50 * FLOAT  # relu's result; x and weight were there before


def test_memory_freed_and_reused_is_not_counted_twice() -> None:
    def forward() -> torch.Tensor:
        total = torch.zeros(())
        for _ in range(20):
            total = total + torch.ones(1000).sum()
        return total.requires_grad_()

    profile = profile_memory(forward, CPU)
    assert profile.saved == 0
    assert profile.peak < 1100 * FLOAT


@pytest.mark.parametrize("mode", MODES)
def test_saved_bytes_of_a_gpt_are_those_of_the_formula(
    mode: str, profiles: dict[str, MemoryProfile]
) -> None:
    tensors = EXPECTED[mode] * TOKENS * FLOAT + SCALAR
    assert profiles[mode].saved == tensors + BESIDE.get(mode, 0)


@pytest.mark.parametrize("mode", ["eager", "fused", "convert"])
def test_saved_bytes_agree_with_saved_tensor_hooks(
    mode: str, profiles: dict[str, MemoryProfile]
) -> None:
    model, (tokens, targets) = gpt(mode), batch()
    with SavedTensors(exclude=[*model.parameters(), tokens, targets]) as saved:
        model(tokens, targets)
    assert profiles[mode].saved == saved.bytes


@pytest.mark.parametrize("mode", MODES)
def test_only_gradients_and_loss_are_left_after_backward(
    mode: str, profiles: dict[str, MemoryProfile]
) -> None:
    gradients = sum(p.numel() for p in gpt(mode).parameters()) * FLOAT
    assert profiles[mode].live[-1] == gradients + FLOAT


def test_the_samples_hold_the_peak_and_time_runs_forward(
    profiles: dict[str, MemoryProfile],
) -> None:
    for profile in profiles.values():
        assert max(profile.live) == profile.peak
        assert profile.ms == sorted(profile.ms)
        assert 0 < profile.forward_ms < profile.ms[-1]


def test_checkpointing_lowers_the_peak(profiles: dict[str, MemoryProfile]) -> None:
    assert profiles["checkpoint"].peak <= profiles["torch-checkpoint"].peak
    assert profiles["checkpoint"].peak < profiles["eager"].peak
    assert profiles["fused+checkpoint"].peak < profiles["fused"].peak


def test_without_norms_and_activations_the_peak_is_lower(
    profiles: dict[str, MemoryProfile],
) -> None:
    """Though they are made again on the way, one at a time."""
    assert profiles["fused"].peak < profiles["eager"].peak
    assert profiles["convert"].peak < profiles["eager"].peak
