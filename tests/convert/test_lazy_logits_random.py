"""Proves: whatever operations follow one another on lazy logits, and whatever they end in, results,
errors and gradients are those of the same operations on plain ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import memopt

WORDS, WIDTH = 7, 3
SIZES = (4, 2, 6)

Operation = Callable[[Tensor], Any]

numbers = st.sampled_from([-2, -1, 0, 1, 2])
slices = st.builds(slice, st.sampled_from([None, 0, 1, -2]), st.sampled_from([None, -1, 2, 7]))


@st.composite
def indices(draw: st.DrawFn) -> Any:
    each = st.one_of(numbers, slices, st.none(), st.booleans())
    parts: list[Any] = draw(st.lists(each, max_size=3))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), Ellipsis)
    return tuple(parts)


def moved(name: str, *arguments: Any) -> Operation:
    def move(tensor: Tensor) -> Any:
        return getattr(tensor, name)(*arguments)

    return move


def masked(seed: int) -> Operation:
    def mask(tensor: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return tensor[
            torch.rand(tensor.shape[: max(1, tensor.dim() - 1)], generator=generator) > 0.4
        ]

    return mask


def part(name: str, argument: int, dim: int) -> Operation:
    return lambda tensor: getattr(tensor, name)(argument, dim)[0]


operations: st.SearchStrategy[Operation] = st.one_of(
    st.builds(lambda index: lambda tensor: tensor[index], indices()),
    st.builds(moved, st.sampled_from(["transpose", "movedim", "flatten"]), numbers, numbers),
    st.builds(moved, st.sampled_from(["unsqueeze", "squeeze", "unbind"]), numbers).map(
        lambda move: lambda tensor: found[0] if isinstance(found := move(tensor), tuple) else found
    ),
    st.builds(moved, st.just("select"), numbers, numbers),
    st.builds(moved, st.just("narrow"), numbers, st.integers(0, 1), st.integers(1, 7)),
    st.builds(
        part, st.sampled_from(["split", "chunk", "tensor_split"]), st.integers(1, 7), numbers
    ),
    st.builds(moved, st.sampled_from(["reshape", "view"]), st.just(-1), st.just(WORDS)),
    st.builds(moved, st.sampled_from(["reshape", "view"]), st.just(2), st.just(-1), st.just(WORDS)),
    st.builds(moved, st.sampled_from(["reshape", "view"]), st.just(-1)),
    st.builds(
        moved, st.sampled_from(["contiguous", "clone", "float", "double", "tanh", "neg", "mT"])
    ).map(lambda move: move),
    st.builds(moved, st.sampled_from(["mul", "div", "add", "mul_"]), st.sampled_from([2, 0.5, -1])),
    st.builds(moved, st.sampled_from(["log_softmax", "softmax", "logsumexp", "mean"]), numbers),
    st.builds(masked, st.integers(0, 3)),
)


def cross_entropy(tensor: Tensor) -> Tensor:
    shape = (tensor.shape[0], *tensor.shape[2:]) if tensor.dim() > 1 else ()
    classes = tensor.shape[1] if tensor.dim() > 1 else tensor.shape[0]
    return F.cross_entropy(tensor, torch.arange(max(1, shape_size(shape))).view(shape) % classes)


def shape_size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def gathered(tensor: Tensor) -> Tensor:
    index = torch.zeros((*tensor.shape[:-1], 1), dtype=torch.int64)
    return tensor.log_softmax(-1).gather(-1, index).exp().sum()


ends: st.SearchStrategy[Operation] = st.sampled_from(
    [cross_entropy, gathered, torch.sum, lambda tensor: tensor.square().mean()]
)


class RandomHead(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(words))
        return logits


def run(model: nn.Module, chain: list[Operation], end: Operation, kept: int) -> list[Any]:
    """The result of every step that a caller keeps, the gradients; or the error's kind."""
    model.zero_grad(set_to_none=True)
    tensor: Any = model(torch.arange(shape_size(SIZES)).view(SIZES) * 5 % WORDS)
    steps = [tensor]
    try:
        for operation in chain:
            steps.append(operation(steps[-1]))
        total = end(steps[-1])
        if kept < len(steps) and steps[kept].is_floating_point():
            total = total + steps[kept].sum() * 0.1
        total.backward()
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return [IndexError if "linear_" in str(error) else type(error)]
    return [
        *((each.shape, each.dtype, each.stride()) for each in steps),
        total.detach(),
        *(p.grad for p in model.parameters()),
    ]


@settings(max_examples=150, deadline=None)
@given(
    chain=st.lists(operations, max_size=5),
    end=ends,
    kept=st.integers(0, 9),
    bias=st.booleans(),
)
def test_operations_on_lazy_logits_are_those_on_plain_ones(
    chain: list[Operation], end: Operation, kept: int, bias: bool
) -> None:
    plain = RandomHead(bias)
    lazy = copy.deepcopy(plain)
    assert memopt.convert(lazy).heads
    ours, theirs = run(lazy, chain, end, kept), run(plain, chain, end, kept)
    assert len(ours) == len(theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        if isinstance(expected, Tensor):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        else:
            assert mine == expected


def test_a_bool_in_an_index_takes_no_dimension() -> None:
    """With as many rows as words or more: a slice of rows is none of the classes."""
    head = nn.Linear(WIDTH, WORDS)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), head)
    x = torch.arange(9) % WORDS
    expected = model(x)[True, 0:WORDS]
    memopt.convert(model)
    assert torch.equal(model(x)[True, 0:WORDS], expected)
