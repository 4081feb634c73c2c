"""Proves, over random trees of modules with regions that are chosen in every way: what the report
lists runs as a region, outputs and gradients equal those without regions in every bit, fewer bytes
are kept and never more, and the report's number is the allocator's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis import assume, given
from torch import Tensor, nn

import memopt
from memopt._checkpoint import region as engine
from memopt._checkpoint.blocks import find_blocks
from memopt._extension import _C
from memopt.memory.allocator import LiveBytes

SIZE = 6


class Leaf(nn.Module):
    def __init__(self, kind: int) -> None:
        super().__init__()
        self.act = (nn.Tanh, nn.GELU, nn.ReLU)[kind % 3]()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


class Wide(nn.Module):
    def __init__(self, kind: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up = nn.Linear(SIZE, 2 * SIZE)
        self.down = nn.Linear(2 * SIZE, SIZE)
        self.drop = nn.Dropout(0.5 if kind % 2 else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(torch.sigmoid(self.up(self.norm(x)))))


class Branch(nn.Module):
    """Calls everything that its containers hold; some of it through a list of lists."""

    def __init__(self, style: str, parts: list[nn.Module]) -> None:
        super().__init__()
        if style == "list":
            self.parts: nn.Module = nn.ModuleList(parts)
        elif style == "dict":
            self.parts = nn.ModuleDict({f"part{i}": part for i, part in enumerate(parts)})
        elif style == "sequential":
            self.parts = nn.Sequential(*parts)
        else:
            pairs = [nn.ModuleList(parts[i : i + 2]) for i in range(0, len(parts), 2)]
            self.parts = nn.ModuleList(pairs)

    def forward(self, x: Tensor) -> Tensor:
        return run(self.parts, x)


def run(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            x = run(child, x)
        return x
    return module(x)


leaves = st.builds(
    lambda kind, wide: (Wide if wide else Leaf, kind), st.integers(0, 5), st.booleans()
)
trees = st.recursive(
    leaves,
    lambda inner: st.tuples(
        st.sampled_from(["list", "dict", "sequential", "pairs"]),
        st.lists(inner, min_size=1, max_size=4),
        st.booleans(),
    ),
    max_leaves=10,
)


def build(tree: Any) -> nn.Module:
    if len(tree) == 2:
        kind, number = tree
        return kind(number)
    style, parts, repeat = tree
    # Blocks are often alike.
    chosen = [parts[0]] * len(parts) if repeat else parts
    return Branch(style, [build(part) for part in chosen])


CHOICES = {
    "blocks": True,
    "class": Wide,
    "classes": (Leaf, nn.Sequential),
    "branches": Branch,
    "predicate": lambda module: len(list(module.parameters())) > 3,
    "norms": nn.LayerNorm,
}


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    output = model(x)
    gradients = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
    return [output.detach(), *gradients]


class Watch:
    """Stands for the extension, and counts the regions that run, by their modules."""

    def __init__(self) -> None:
        self.runs: Counter[nn.Module] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(_C, name)

    def run_region(
        self, forward: Any, args: Any, kwargs: Any, settings: Any, module: nn.Module
    ) -> Any:
        self.runs[module] += 1
        return _C.run_region(forward, args, kwargs, settings, module)


def assert_regions_run(model: nn.Module, regions: Iterable[str], x: Tensor) -> None:
    """Each as often as it is called; and what is in it runs once more, when backward wants it."""
    watch, calls = Watch(), Counter[nn.Module]()
    modules = [model.get_submodule(path) for path in regions]
    # The hooks of a region itself are outside of what runs again.
    inside = {m for region in modules for m in region.modules() if not list(m.children())}
    layers = inside.difference(modules)
    handles = [m.register_forward_pre_hook(lambda m, _: calls.update([m])) for m in layers]
    with mock.patch.object(engine, "_C", watch):
        output = model(x).sum()
    assert watch.runs == Counter(modules)
    output.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    for region in modules:
        assert max((calls[m] for m in region.modules() if m in layers), default=2) >= 2


@given(trees, st.sampled_from(list(CHOICES)), st.booleans(), st.booleans())
def test_regions_of_random_models(tree: Any, choice: str, offload: bool, swaps: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(build(tree))
    x = torch.randn(3, SIZE)
    plain_bytes = memopt.saved_bytes(model, x)
    if swaps:
        memopt.convert(model)
    plain = step(model, x)
    check_fn: Any = CHOICES[choice]
    if check_fn is True:
        assume(find_blocks(model))
    report = None
    if swaps:
        place = "cpu" if offload else None
        report = memopt.convert(model, x, checkpoint=check_fn, offload=place)
        regions = [*report.checkpointed, *report.offloaded]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on lists of lists
            regions = memopt.apply_activation_checkpointing(
                model, check_fn=None if check_fn is True else check_fn, offload_to_cpu=offload
            )
    for ours, theirs in zip(step(model, x), plain, strict=True):
        assert torch.equal(ours, theirs)
    assert_regions_run(model, regions, x)
    saved = memopt.saved_bytes(model, x)
    if report is not None:
        assert report.bytes_after == saved
    assert saved <= plain_bytes
    with LiveBytes() as live:
        loss = model(x).sum()
    held = sum(storage.nbytes for storage in saved.storages if not storage.is_input)
    assert live.left == held + loss.nbytes
