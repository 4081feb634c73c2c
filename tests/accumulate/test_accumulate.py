"""Proves that micro-batches give the whole batch's gradients."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import memopt

ROWS, WIDTH, WORDS = 10, 16, 11
INF, NAN = math.inf, math.nan
LAZY = nn.Sequential(nn.LazyLinear(8, dtype=torch.float64))


def net(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WORDS)
    ).to(dtype)


class Words(nn.Module):
    """Logits for each token and the mean loss over those that are not ignored."""

    def __init__(self, shift: bool = False) -> None:
        super().__init__()
        self.net = net()
        self.shift = shift

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss}


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_close(model: nn.Module, reference: nn.Module) -> None:
    """float64, and sums in another order: a few units in the last place of the largest entry."""
    found, wanted = gradients(model), gradients(reference)
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 64 * torch.finfo(a.dtype).eps * b.abs().max()


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 10, 64])
@pytest.mark.parametrize(
    ("weight", "loss"),
    [("rows", lambda y: y.square().mean()), ("sum", lambda y: y.square().sum())],
)
def test_mean_and_sum(micro_batch: int, weight: Any, loss: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    model = net()
    reference = copy.deepcopy(model)
    whole = loss(reference(x))
    whole.backward()
    result = memopt.accumulate(model, x, micro_batch=micro_batch, weight=weight, loss=loss)
    assert_close(model, reference)
    assert result.loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert result.micro_batches == -(-ROWS // micro_batch)
    assert not result.loss.requires_grad


@pytest.mark.parametrize("weight", ["tokens", "next tokens"])
@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_labels_that_are_ignored(micro_batch: int, weight: Any) -> None:
    """Rows without any label in the middle and at the end among them."""
    x = torch.randn(ROWS, 5, WIDTH, dtype=torch.float64)
    labels = torch.randint(0, WORDS, (ROWS, 5))
    labels[torch.rand(ROWS, 5) < 0.6] = -100
    labels[0, 1] = 1
    labels[3:6] = labels[-3:] = -100
    model = Words(shift=weight == "next tokens")
    reference = copy.deepcopy(model)
    whole = reference(x, labels)["loss"]
    whole.backward()
    batch = {"x": x, "labels": labels}
    result = memopt.accumulate(model, batch, micro_batch=micro_batch, weight=weight)
    assert_close(model, reference)
    assert result.loss.item() == pytest.approx(whole.item(), rel=1e-6)


class One(nn.Module):
    """A loss of whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.weight * 1


IGNORED = torch.tensor([[0, 1, 2], [0, -100, -100], [0, 1, -100], [0, 1, 2]])
SEQUENCES = [torch.zeros(length, 2) for length in (4, 3, 3, 1)]


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"x": torch.zeros(4, 3), "labels": IGNORED}, "['labels'] has 4, 5 entries"),
        ((torch.zeros(4, 3), IGNORED), "[1] has 4, 5 entries"),
        (pack_sequence(SEQUENCES), "the batch has 7, 4 entries"),
        (torch.nested.nested_tensor(SEQUENCES, layout=torch.jagged), "the batch has 14, 8 entries"),
        ({"x": torch.zeros(4, 3), "num_items_in_batch": 9}, 'weight="sum"'),
        ((torch.zeros(4, 3), [1, 2, 3, 4]), "batch[1], a list with a number for each row"),
    ],
)
def test_a_batch_that_shows_that_rows_count_differently(batch: Any, named: str) -> None:
    """A mean of tokens is no mean of rows, and memopt cannot know which of them the loss is."""

    with pytest.warns(UserWarning, match=re.escape(named)) as seen:
        memopt.accumulate(One(), batch, micro_batch=2)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memopt.accumulate(One(), batch, micro_batch=2, weight="rows")


def test_a_batch_whose_micro_batches_count_alike_is_taken_without_a_word() -> None:
    """Rows of one and three labels, then of two and two; a mask of zeros and ones."""
    labels = IGNORED[[1, 0, 2, 2]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memopt.accumulate(One(), {"labels": labels, "mask": labels.ge(0).long()}, micro_batch=2)


LENGTHS = [torch.randn(length, 8) for length in (5, 4, 6, 6)]
ALIKE = [torch.zeros(3, 8) for _ in range(4)]


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ((LENGTHS, [0.0, 1.0, 2.0, 3.0]), "batch[0] of tensors with 5, 4, 6, 6 rows"),
        ({"y": torch.zeros(4), "x": tuple(LENGTHS)}, "batch['x'] of tensors with 5, 4, 6, 6 rows"),
        ({"y": torch.zeros(4), "x": {"of": ALIKE}}, "batch['x']['of'] with an entry for each of 4"),
        ((torch.zeros(4), [{"boxes": x} for x in ALIKE]), "batch[1] with an entry for each of 4"),
    ],
)
def test_lists_with_an_entry_for_each_row_are_refused(batch: Any, got: str) -> None:
    """They went whole to every micro-batch, or one of their tensors was cut by itself."""
    words = f"accumulate: batch must hold its rows in tensors.* got {re.escape(got)}"
    with pytest.raises(ValueError, match=words):
        memopt.accumulate(One(), batch, micro_batch=2)
    with pytest.raises(ValueError, match="anatomy: batch must hold its rows in tensors"):
        memopt.anatomy(One(), batch, micro_batches=2)


@pytest.mark.parametrize(
    "extra",
    [
        [torch.zeros(4, 8), torch.zeros(4, 3)],  # cut as other tensors are
        (torch.zeros(2, 4, 8), torch.zeros(2, 4, 8)),  # the state of an LSTM
        [torch.zeros(9, 2), torch.zeros(9, 2)],  # tables
        (torch.zeros(4, 8), torch.zeros(9)),  # rows, and a table beside them
        ["a", "b", "c", "d"],
        [4, 4],
    ],
)
def test_lists_of_something_else_are_taken_without_a_word(extra: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memopt.accumulate(One(), (torch.zeros(4, 3), extra), micro_batch=2)


def test_a_function_that_counts() -> None:
    x, lengths = torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.arange(1, ROWS + 1)

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return (self.net(x).square().sum(-1) * lengths).sum() / lengths.sum()

    model = Weighted()
    reference = copy.deepcopy(model)
    reference(x, lengths).backward()
    memopt.accumulate(model, (x, lengths), micro_batch=4, weight=lambda part: float(part[1].sum()))
    assert_close(model, reference)


def test_gradients_are_added() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    model = net()
    model(x).sum().backward()
    reference = copy.deepcopy(model)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    reference(x).mean().backward()
    memopt.accumulate(model, x, micro_batch=4, loss=torch.mean)
    assert_close(model, reference)


def test_dropout_draws_as_the_micro_batches_one_after_another() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    model = net(dropout=0.5)
    reference = copy.deepcopy(model)
    state = torch.get_rng_state()
    for start in range(0, ROWS, 4):
        part = x[start : start + 4]
        (reference(part).mean() * (len(part) / ROWS)).backward()
    torch.set_rng_state(state)
    memopt.accumulate(model, x, micro_batch=4, loss=torch.mean)
    assert all(
        torch.equal(a, b) for a, b in zip(gradients(model), gradients(reference), strict=True)
    )


def test_grad_scaler() -> None:
    x = torch.randn(ROWS, WIDTH)
    model = net(dtype=torch.float32)
    reference = copy.deepcopy(model)
    reference(x).mean().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    memopt.accumulate(model, x, micro_batch=3, loss=torch.mean, scaler=scaler)
    scaler.unscale_(optimizer)
    for a, b in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast() -> None:
    seen = []
    model = net(dtype=torch.float32)
    model[0].register_forward_hook(lambda *a: seen.append(a[2].dtype))
    x = torch.randn(ROWS, WIDTH)
    memopt.accumulate(model, x, micro_batch=5, loss=torch.mean, autocast=torch.bfloat16)
    assert seen == [torch.bfloat16] * 2


def test_auto_fits_the_budget() -> None:
    model, x = net(dtype=torch.float32), torch.randn(512, WIDTH)
    whole = memopt.anatomy(model, x, loss=torch.mean, optimizer=None).peak.total
    result = memopt.accumulate(model, x, loss=torch.mean, budget=whole // 2)
    assert 1 < result.micro_batch < 512
    sizes = (result.micro_batch, result.micro_batch + 1)
    peaks = [
        memopt.anatomy(
            model, x[: 2 * size], loss=torch.mean, optimizer=None, micro_batches=2
        ).peak.total
        for size in sizes
    ]
    assert peaks[0] <= whole // 2 < peaks[1]


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (TypeError, "model must be an nn.Module", {"model": 3}),
        (TypeError, 'micro_batch must be an int or "auto"', {"micro_batch": 2.0}),
        (ValueError, "micro_batch must be at least 1, got 0", {"micro_batch": 0}),
        (ValueError, "on cpu must have a budget in bytes", {}),
        (ValueError, "above the .* of the model's weights, got 10 B", {"budget": 10}),
        (TypeError, "accumulate: budget must be bytes or a string", {"budget": [1]}),
        (ValueError, "accumulate: budget must be bytes or a string", {"budget": "lots"}),
        (ValueError, "weight must be", {"weight": "words", "micro_batch": 2}),
        (TypeError, "that maps 'labels' to a tensor", {"weight": "tokens", "micro_batch": 2}),
        (ValueError, "got 0: are all labels ignored", {"weight": lambda _: 0, "micro_batch": 2}),
        (ValueError, "must return a number .* got -1", {"weight": lambda _: -1, "micro_batch": 2}),
        (
            ValueError,
            "must return a number .* got nan",
            {"weight": lambda _: NAN, "micro_batch": 2},
        ),
        (
            ValueError,
            "must return a number .* got inf",
            {"weight": lambda _: INF, "micro_batch": 2},
        ),
        (
            ValueError,
            "must return a number .* got None",
            {"weight": lambda _: None, "micro_batch": 2},
        ),
        (
            ValueError,
            r"must return .* got tensor\(",
            {"weight": lambda part: part[0], "micro_batch": 2},
        ),
        (TypeError, "scaler must be a torch.amp.GradScaler", {"scaler": 3, "micro_batch": 2}),
        (
            TypeError,
            "the torch.optim.Optimizer that steps .* got <class",
            {"optimizer": torch.optim.AdamW},
        ),
        (TypeError, "the torch.optim.Optimizer that steps .* got <fun", {"optimizer": lambda p: 0}),
        (TypeError, "autocast must be a dtype .* got 'bf16'", {"autocast": "bf16"}),
        (TypeError, "loss must be a function .* got str", {"loss": "mean", "micro_batch": 2}),
        (ValueError, "must have its shape, got '0.weight'", {"model": LAZY, "budget": 1 << 20}),
        (ValueError, "on the model's device", {"batch": torch.empty(4, WIDTH, device="meta")}),
        (ValueError, "one number that requires a gradient", {"micro_batch": 2}),
        (
            ValueError,
            "must be a real number, got one of torch.complex128",
            {"micro_batch": 2, "loss": lambda y: y.mean() + 0j},
        ),
        (
            ValueError,
            "accumulate: batch must have rows, got tensors whose first dimension is 0",
            {"batch": torch.empty(0, WIDTH).double(), "micro_batch": 2},
        ),
    ],
)
def test_bad_input(error: type[Exception], words: str, options: dict[str, Any]) -> None:
    model = options.pop("model", net())
    batch = options.pop("batch", torch.randn(4, WIDTH).double())
    with pytest.raises(error, match=words):
        memopt.accumulate(model, batch, **options)


def test_counts_that_do_not_add_up() -> None:
    """One for each micro-batch: gradients were as many times too large, without a word."""
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    with pytest.warns(UserWarning, match="add up to it, got counts of 3 times the batch's") as seen:
        memopt.accumulate(net(), x, micro_batch=4, loss=torch.mean, weight=lambda part: 1)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memopt.accumulate(net(), x, micro_batch=4, loss=torch.mean, weight=len)


def test_without_a_graph() -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=r"torch.no_grad\(\) is on"):
        memopt.accumulate(net(), torch.randn(2, WIDTH).double(), micro_batch=1, loss=torch.mean)


def test_an_optimizer_that_steps_in_backward() -> None:
    """Each micro-batch was a step of its own, without a word. With one that is right."""
    model, x = net(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    with pytest.warns(UserWarning, match="accumulate: weights must stay as they are until") as seen:
        memopt.accumulate(model, x, micro_batch=4, loss=torch.mean)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memopt.accumulate(model, x, micro_batch=ROWS, loss=torch.mean)
