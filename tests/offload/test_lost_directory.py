"""Proves: where the directory that tensors are offloaded to has gone between two steps, a step that
needs a new file there raises OSError, which names the directory, and leaves everything as it was:
no hooks, no region, no handle, and the next step works once the directory is back. A step whose
file is open already goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._extension import _C
from tests.support.bits import assert_same_bits

X = torch.randn(64, 256)

Step = Callable[[], list[Tensor]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)))


def step(net: nn.Module, scope: object = None) -> list[Tensor]:
    with scope or nullcontext():
        loss = net(X).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


def one_scope(net: nn.Module, directory: Path) -> Step:
    scope = memopt.offload("disk", directory=directory, min_bytes=1, keep_last=0)
    return lambda: step(net, scope)


def by_policy(net: nn.Module, directory: Path) -> Step:
    memopt.offload.configure(directory=directory)
    scope = memopt.saved_tensors("disk")
    return lambda: step(net, scope)


def regions(net: nn.Module, directory: Path) -> Step:
    memopt.apply_activation_checkpointing(net, offload=directory)
    return lambda: step(net)


def calls(net: nn.Module, directory: Path) -> Step:
    def forward(x: Tensor) -> Tensor:
        for block in net:
            x = memopt.checkpoint(block, x, offload=directory)
        return x

    def run() -> list[Tensor]:
        loss = forward(X).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]

    return run


every_way = pytest.mark.parametrize("way", [one_scope, by_policy, regions, calls])


@pytest.fixture
def gone(tmp_path: Path) -> Iterator[Path]:
    memopt.offload.empty_cache()
    path = tmp_path / "spill"
    path.mkdir()
    yield path
    memopt.offload.empty_cache()
    memopt.offload.configure()


@every_way
@pytest.mark.parametrize("has_run", [False, True])
def test_a_step_without_the_directory_names_it(
    way: Callable[[nn.Module, Path], Step], has_run: bool, gone: Path
) -> None:
    expected = step(model())
    run = way(model(), gone)
    if has_run:
        assert_same_bits(run(), expected)
        memopt.offload.empty_cache()  # whose file is gone
    gone.rmdir()
    before = _C.live_handles(), _C.live_regions()
    for _ in range(2):
        with pytest.raises(OSError, match=f"can be made in directory '{gone}'"):
            run()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert not memopt.checkpoint.is_checkpointing()
        assert (_C.live_handles(), _C.live_regions()) == before
    gone.mkdir()
    assert_same_bits(run(), expected)


@every_way
def test_a_file_that_is_open_outlives_its_directory(
    way: Callable[[nn.Module, Path], Step], gone: Path
) -> None:
    expected = step(model())
    run = way(model(), gone)
    assert_same_bits(run(), expected)
    gone.rmdir()
    assert_same_bits(run(), expected)
