"""Proves what a region has to be worth: none where it would drop next to nothing of what a step
takes, nor around single layers whose own memory is the peak, nor around norms that have a recipe;
and that a bound of scratch does not count.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import memopt
from memopt._checkpoint.best import best_cut
from memopt.memory.allocator import LiveBytes
from tests.checkpoint.random_trees import WIDTH, Wide
from tests.checkpoint.support import tree_of


class _RunsAgain(torch.autograd.Function):
    """Keeps its input alone, and builds its graph in backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wide: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.wide = wide
        return wide(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.wide(x).backward(grads[0])
        return x.grad, None


class RunsAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 8)
        self.wide = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))

    def forward(self, x: Tensor) -> Tensor:
        return _RunsAgain.apply(self.lift(x).sin(), self.wide)


def test_no_region_around_what_takes_its_memory_in_backward_alone() -> None:
    """It would drop next to nothing of the peak, and run forward twice. The note says so; weights'
    gradients do not count, which a larger batch has no more of.
    """
    model, x = nn.Sequential(RunsAgain(), RunsAgain()), torch.randn(64, 8)
    report = memopt.convert(model, (x,), checkpoint=True)
    assert report.checkpointed == ()
    assert any("no regions: around " in note for note in report.notes)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)) for _ in range(6)]
    large = nn.Sequential(*layers)
    assert memopt.convert(large, (torch.randn(1, 256),), checkpoint=True).checkpointed


class Dilated(nn.Module):
    """A residual block of a vocoder."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            parametrizations.weight_norm(
                nn.Conv1d(channels, channels, kernel, padding=kernel // 2 * d, dilation=d)
            )
            for d in (1, 3, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(nn.functional.leaky_relu(x, 0.1))
        return x


class Vocoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(
            parametrizations.weight_norm(nn.ConvTranspose1d(64 >> i, 32 >> i, 8, 4, 2))
            for i in range(3)
        )
        self.blocks = nn.ModuleList(Dilated(32 >> i, k) for i in range(3) for k in (3, 7, 11))

    def forward(self, x: Tensor) -> Tensor:
        for i, up in enumerate(self.ups):
            x = up(nn.functional.leaky_relu(x, 0.1))
            x = sum(self.blocks[3 * i + j](x) for j in range(3)) / 3
        return x.tanh()


def test_what_a_parametrized_layer_takes_is_taken_in_any_case() -> None:
    """It calls a module, and is no region all the same: a kernel's scratch in the largest blocks is
    no reason to leave these out, where the layers need it as well.
    """
    x = torch.randn(2, 64, 32)
    report = memopt.convert(Vocoder(), x, checkpoint=True)
    assert {f"blocks.{i}" for i in range(9)} <= set(report.checkpointed)
    plain = nn.Sequential(nn.Conv1d(64, 64, 3))
    floor = best_cut(tree_of(plain, x), ["0"]).working
    parametrizations.weight_norm(plain[0])
    assert best_cut(tree_of(plain, x), ["0"]).working >= floor


class Stem(nn.Module):
    """Begins with a convolution whose scratch has a bound that is above all else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 4, 9, padding=8, dilation=2)
        self.blocks = nn.ModuleList(Wide(4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_bound_of_scratch_makes_no_sets_alike() -> None:
    """With it one region around all had the same peak, and kept least."""

    def most(model: nn.Module) -> int:
        def run() -> None:
            model(x).square().mean().backward()
            model.zero_grad()

        run()
        gc.collect()
        with LiveBytes() as live:
            run()
        return live.most

    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Stem()), torch.randn(64, 4, WIDTH)
    plain = most(model)
    names = memopt.apply_activation_checkpointing(model, batch=x)
    assert names == [f"1.blocks.{number}" for number in range(6)]
    assert most(model) < 0.6 * plain


class NormByHand(nn.Module):
    """Keeps several tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def test_a_norm_by_hand_is_a_region_where_it_has_no_recipe() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(NormByHand(), Wide(4), NormByHand(), Wide(4))

    x = torch.randn(32, WIDTH)
    assert memopt.convert(model(), x, checkpoint=True).checkpointed == ("1", "3")
    plain = model()
    assert memopt.apply_activation_checkpointing(plain, batch=x) == ["0", "1", "2", "3"]
    kept = memopt.saved_bytes(plain, x)
    for place in (0, 2):
        memopt.unwrap(plain[place])
    assert kept < memopt.saved_bytes(plain, x)
