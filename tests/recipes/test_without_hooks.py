"""Proves that recipes call a hook for no tensor that an op which they know saves (csrc/intercept/
savers.h): what is held, what backward computes and what others observe is as it is with hooks. The
way with hooks is forced by a pair of hooks around the scope, which must get every tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import memopt
import memopt.functional as M
from memopt._extension import _C
from memopt.memory.allocator import LiveBytes
from tests.recipes.support import FEATURES, gradients, leaf

pytestmark = pytest.mark.usefixtures("collector_off")

ROWS = 6
SHAPE = (2, 4, ROWS, FEATURES)
X, OTHER = leaf(*SHAPE), leaf(*SHAPE, seed=1)
SQUARE = leaf(FEATURES, FEATURES, seed=2)
KERNEL = leaf(3, 4, 3, 3, seed=3)
W, B = leaf(FEATURES, seed=4), leaf(FEATURES, seed=5)
LEAVES = [X, OTHER, SQUARE, KERNEL, W, B]
TARGET = torch.zeros(2 * 4 * ROWS, dtype=torch.long)


def flat(y: Tensor) -> Tensor:
    return y.view(-1, FEATURES)


def batched(y: Tensor) -> Tensor:
    return y.view(-1, ROWS, FEATURES)


# By the name of the node whose op saves something: how it reads a tensor.
SAVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "AddmmBackward0": lambda y: torch.addmm(B, flat(y), SQUARE),
    "MmBackward0": lambda y: flat(y) @ SQUARE,
    "BmmBackward0": lambda y: torch.bmm(batched(y), batched(y).transpose(1, 2)),
    "BaddbmmBackward0": lambda y: torch.baddbmm(B, batched(y), batched(y).mT @ batched(OTHER)),
    "ConvolutionBackward0": lambda y: F.conv2d(y, KERNEL),
    "MulBackward0": lambda y: y * OTHER,
    "DivBackward0": lambda y: OTHER / (y + 3.0),
    "PowBackward0": lambda y: y.pow(3),
    "ExpBackward0": lambda y: y.exp(),
    "RsqrtBackward0": lambda y: y.exp().rsqrt(),
    "LogBackward0": lambda y: (y.exp() + 1.0).log() * y,
    "SinBackward0": lambda y: y.sin(),
    "CosBackward0": lambda y: y.cos(),
    "ErfBackward0": lambda y: y.erf(),
    "SqrtBackward0": lambda y: y.exp().sqrt() * y,
    "GatherBackward0": lambda y: flat(y).gather(1, TARGET[:, None]),
    "MaskedFillBackward0": lambda y: y.masked_fill(OTHER > 0, 0.5) * y,
    "NativeLayerNormBackward0": lambda y: torch.native_layer_norm(y, (FEATURES,), W, B, 1e-5)[0],
    "NativeGroupNormBackward0": lambda y: F.group_norm(y, 2) * y,
    "NativeBatchNormBackward0": lambda y: F.batch_norm(y, None, None, training=True) * y,
    "GeluBackward0": lambda y: F.gelu(y),
    "TanhBackward0": lambda y: y.tanh(),
    "ReluBackward0": lambda y: y.relu(),
    "SigmoidBackward0": lambda y: y.sigmoid(),
    "SiluBackward0": lambda y: F.silu(y),
    "WhereBackward0": lambda y: torch.where(y.detach() > 0, y, OTHER),
    "EmbeddingBackward0": lambda y: F.embedding(TARGET, SQUARE) * flat(y),
    "SoftmaxBackward0": lambda y: y.softmax(-1) * y,
    "LogSoftmaxBackward0": lambda y: y.log_softmax(-1) * y,
    "NllLossBackward0": lambda y: F.nll_loss(flat(y), TARGET),
    "ScaledDotProductFlashAttentionForCpuBackward0": lambda y: F.scaled_dot_product_attention(
        y, y, OTHER
    ),
    "linear": lambda y: F.linear(y, SQUARE, B),
    "a view": lambda y: y.transpose(-1, -2) @ OTHER,
    "a slice": lambda y: y[:, 1:, 2:] * OTHER[:, 1:, 2:],
    "detached": lambda y: y.detach() * OTHER,
    "several": lambda y: (y * OTHER).sum() + F.linear(y, SQUARE).exp().sum() + (y @ SQUARE).sum(),
}

MADE: dict[str, Callable[[], Tensor]] = {
    "gelu": lambda: M.gelu(X),
    "layer_norm": lambda: M.layer_norm(X, (FEATURES,), W, B),
    "no recipe": lambda: X + OTHER,
}


def to_outer_hooks(run: Callable[[], Any]) -> Any:
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return run()


def in_scope(run: Callable[[], Any]) -> Any:
    with memopt.recipes():
        return run()


def left_and_packed(run: Callable[[], Tensor]) -> tuple[int, int]:
    packs = _C.packs()
    with LiveBytes() as live:
        result = run()
    del result
    return live.left, _C.packs() - packs


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("saver", SAVERS)
def test_without_a_hook_the_same_is_held_and_computed(saver: str, made: str) -> None:
    def run() -> Tensor:
        return SAVERS[saver](MADE[made]()).square().sum()

    def half() -> Tensor:
        return SAVERS[saver](MADE[made]())

    live = _C.live_handles()
    without, packs = left_and_packed(lambda: in_scope(half))
    hooked, hooked_packs = left_and_packed(lambda: to_outer_hooks(lambda: in_scope(half)))
    assert without == hooked
    assert packs == 0
    assert hooked_packs > 0
    expected = gradients(run, LEAVES, recipes=False)
    for actual in (
        gradients(run, LEAVES, recipes=True),
        to_outer_hooks(lambda: gradients(run, LEAVES, recipes=True)),
    ):
        for a, e in zip(actual, expected, strict=True):
            assert (a is None) == (e is None)
            assert a is None or torch.equal(a, e)
    assert _C.live_handles() == live


def test_the_ops_of_these_tests_are_those_that_are_known() -> None:
    """Each name above is the node of its own op, somewhere in the graph."""
    for name, saver in SAVERS.items():
        if not name.endswith("0"):
            continue
        names, waiting = set(), [saver(X * 1).grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None:
                names.add(node.name())
                waiting += [following for following, _ in node.next_functions]
        assert name in names


@pytest.mark.parametrize("saver", ["MmBackward0", "MulBackward0", "SiluBackward0"])
def test_an_output_is_freed_and_recomputed_without_a_hook(saver: str) -> None:
    packs = _C.packs()
    with memopt.recipes():
        y = M.layer_norm(X, (FEATURES,), W, B)
        storage, expected = StorageWeakRef(y.untyped_storage()), y.detach().clone()
        result = SAVERS[saver](y)
        del y
    assert storage.expired()
    assert _C.packs() == packs
    node = result.grad_fn
    assert node is not None
    assert torch.equal(node._saved_self.view(SHAPE), expected)
    with pytest.raises(RuntimeError, match="already been set"):
        node._raw_saved_self.register_hooks(lambda t: t, lambda t: t)


@pytest.mark.parametrize("made", ["gelu", "layer_norm"])
def test_the_copy_that_autocast_makes_is_freed_without_a_hook(made: str) -> None:
    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(MADE[made](), SQUARE)

    without, packs = left_and_packed(lambda: in_scope(run))
    hooked, _ = left_and_packed(lambda: to_outer_hooks(lambda: in_scope(run)))
    assert without == hooked
    assert packs == 0
    expected = gradients(lambda: run().float().sum(), LEAVES, recipes=False)
    actual = gradients(lambda: run().float().sum(), LEAVES, recipes=True)
    for a, e in zip(actual, expected, strict=True):
        assert e is None or torch.equal(a, e)  # type: ignore[arg-type]


def test_a_converted_block_calls_no_hook() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.LayerNorm(FEATURES), nn.GELU()
            self.up, self.down = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            y = F.scaled_dot_product_attention(y, y, y)
            return x + self.down(self.act(self.up(y)))

    model = nn.Sequential(Block(), Block())
    memopt.convert(model)
    x = X.detach()
    model(x)  # looks modules up
    without, packs = left_and_packed(lambda: model(x))
    hooked, _ = left_and_packed(lambda: to_outer_hooks(lambda: model(x)))
    assert packs == 0
    assert without == hooked
