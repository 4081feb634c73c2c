"""Proves: losses and log-probabilities of lazy logits, and of their views, casts, scales and caps,
are memopt's op in chunks of rows; anything else gets the logits, computed once, with gradients that
are as right.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from tests.convert.lazy import (
    LENGTH,
    LOSSES,
    ROWS,
    WORDS,
    Loss,
    Squares,
    compare,
    gradients,
    lazy_and_plain,
    shifted,
    words,
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_chunked_op(name: str, bias: bool) -> None:
    use = compare(LOSSES[name], bias=bias)
    assert use.losses
    assert not use.were_made


@pytest.mark.parametrize("name", ["shifted", "transformers", "TRL by rows", "softcap"])
def test_in_bfloat16(name: str) -> None:
    assert not compare(LOSSES[name], dtype=torch.bfloat16).were_made


def with_item(logits: Tensor) -> Tensor:
    logits[0, :, 3] = -1.0
    return logits


OTHERS: dict[str, Loss] = {
    "squares": lambda z, t: z.square().mean(),
    "probabilities of softmax": lambda z, t: z.softmax(-1).square().sum(),
    "some classes": lambda z, t: F.cross_entropy(z[..., 1:].flatten(0, 1), t.flatten() % 7),
    "a factor with a gradient": lambda z, t: shifted(z * z.detach().mean(), t),
    "in place": lambda z, t: shifted(z.mul_(0.5), t),
    "in place, seen by a view": lambda z, t: (v := z[:, 1:], z.mul_(2), v.square().sum())[2],
    "in place, not seen by a copy": lambda z, t: (
        v := (z * 1.5)[:, 1:],
        z.mul_(2),
        v.square().sum(),
    )[2],
    "an item set": lambda z, t: shifted(with_item(z), t),
    "distillation": lambda z, t: F.kl_div(
        z.log_softmax(-1), z.detach().flip(-1).softmax(-1), reduction="sum"
    ),
    "K dimensions, classes last": lambda z, t: F.cross_entropy(
        z, (t[:, :1] % LENGTH).expand(ROWS, WORDS)
    ),
    "entropy": lambda z, t: (z.softmax(-1) * z.log_softmax(-1)).sum(),
    "joined": lambda z, t: shifted(torch.cat([z, z]), torch.cat([t, t])),
    "by NumPy's name": lambda z, t: z.add(1).T.sum(),
    "flipped classes": lambda z, t: shifted(z.flip(-1), t),
}


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_gets_the_logits(name: str) -> None:
    use = compare(OTHERS[name])
    assert use.were_made
    assert not use.losses


@pytest.mark.parametrize("cut", [lambda z: z, lambda z: z.float()[:, 1:] * 3], ids=["all", "some"])
def test_an_autograd_function_gets_the_logits(cut: Callable[[Tensor], Tensor]) -> None:
    apply: Loss = Squares.apply
    use = compare(lambda z, t: apply(cut(z)), bias=True)  # type: ignore[call-arg]
    assert use.were_made


@pytest.mark.parametrize("value", [-math.inf, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("where", ["bias", "mask"])
def test_logsumexp_where_class_0_is_masked(where: str, value: float) -> None:
    mask = torch.zeros(WORDS)
    mask[0] = value
    found = []
    for model in lazy_and_plain(bias=True):
        if where == "bias":
            with torch.no_grad():
                model.head.bias.copy_(mask)
            loss = model(words()).logsumexp(-1).square().mean()
        else:
            loss = (model(words()) + mask).logsumexp(-1).square().mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


def test_gradients_of_logsumexp_alone_are_as_right_as_pytorchs() -> None:
    """In bfloat16 no class's part, of which another would have to be taken off, stands out."""
    lazy, plain = (model.bfloat16() for model in lazy_and_plain())
    found = []
    for model in (lazy, plain, copy.deepcopy(plain).double()):
        model(words()).logsumexp(-1).mean().backward()
        found.append(model.head.weight.grad.double())
    ours, theirs, exact = found
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()


def test_chosen_logits_are_rounded_as_those_of_the_product() -> None:
    """So that a logsumexp less them is as near as with logits, whose rounding both have."""
    lazy, plain = (model.bfloat16() for model in lazy_and_plain())
    index = words(2).unsqueeze(-1)
    ours, theirs = (model(words()).float().gather(-1, index) for model in (lazy, plain))
    assert (ours == theirs).double().mean() > 0.8  # products may add up in another order
    torch.testing.assert_close(ours, theirs, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "target", "options"),
    [
        (torch.float32, torch.float32, {"ignore_index": 3}),
        (torch.float32, torch.float64, {}),
        (torch.bfloat16, torch.float32, {}),
        (torch.float32, torch.int64, {"ignore_index": None}),
        (torch.bfloat16, torch.int64, {"weight": torch.ones(WORDS)}),
    ],
)
def test_cross_entropy_does_what_it_does_with_plain_logits(
    dtype: torch.dtype, target: torch.dtype, options: dict[str, Any]
) -> None:
    """The same error, or a loss of the same dtype."""
    found: list[Any] = []
    for model in lazy_and_plain():
        logits = model.to(dtype)(words()).flatten(0, 1)
        classes = words().flatten()
        if target.is_floating_point:
            classes = F.one_hot(classes, WORDS).to(target)
        try:
            found.append(F.cross_entropy(logits, classes, **options).dtype)
        except (RuntimeError, TypeError) as error:
            found.append(type(error))
    assert found[0] is found[1]


def test_a_classifier_of_as_many_classes_as_types_of_tokens_is_no_head() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.types = nn.Embedding(WORDS, 8), nn.Embedding(2, 8)
            self.classifier = nn.Linear(8, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.classifier((self.words(ids) + self.types(ids % 2)).mean(1))

    assert memopt.convert(Classifier()).heads == ()


def test_a_distribution_gets_both() -> None:
    """Its logsumexp is of chunks, the rest needs the logits."""
    lazy, plain = lazy_and_plain()
    entropies = [
        torch.distributions.Categorical(logits=model(words())).entropy() for model in (lazy, plain)
    ]
    torch.testing.assert_close(*entropies)


def test_the_logits_are_computed_once() -> None:
    lazy, plain = lazy_and_plain()
    calls: list[Any] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape[-1:] == (WORDS,) and "mm" in str(func):
                calls.append(func)
            return out

    logits = lazy(words())
    with Products():  # type: ignore[no-untyped-call]
        first, view = logits.sum(), logits[:, 1:].square().sum()
        with torch.no_grad():
            best = logits.argmax(-1)
    assert len(calls) == 1
    assert torch.equal(best, plain(words()).argmax(-1))
    expected = plain(words())
    ours = gradients(lazy, first + view)
    theirs = gradients(plain, expected.sum() + expected[:, 1:].square().sum())
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
