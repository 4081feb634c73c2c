"""Proves that a batch in a dataclass is cut as one in a dict is, and that an object whose rows
nothing tells how to cut is refused by name, before anything ran.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt

ROWS, WIDTH = 48, 16


@dataclasses.dataclass(frozen=True, slots=True)
class Pairs:
    """Rows, and what they are to become."""

    x: Tensor
    labels: Tensor
    name: str = "of a data set"
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.made + 1)


class OfPairs(nn.Module):
    """A mean over rows, of pairs in any form."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)),) * 3
        self.blocks = nn.Sequential(*layers).double()

    def forward(self, pairs: Any = None, **others: Tensor) -> Tensor:
        pairs = pairs or SimpleNamespace(**others)
        assert len(pairs.x) == len(pairs.labels)
        return (self.blocks(pairs.x) - pairs.labels).square().mean()


def a_record() -> Pairs:
    torch.manual_seed(0)
    x, labels = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    return Pairs(x, labels)


def as_dict(pairs: Pairs) -> dict[str, Tensor]:
    return {"x": pairs.x, "labels": pairs.labels}


@pytest.mark.parametrize("as_batch", [lambda pairs: pairs, lambda pairs: (pairs,)])
@pytest.mark.parametrize("weight", ["rows", "tokens"])
def test_gradients_are_those_of_the_same_batch_in_a_dict(as_batch: Any, weight: Any) -> None:
    pairs, found, wanted = a_record(), OfPairs(), OfPairs()
    wanted.load_state_dict(found.state_dict())
    memopt.accumulate(wanted, as_dict(pairs), micro_batch=20, weight=weight)
    with_record = as_batch(pairs)
    result = memopt.accumulate(
        found, with_record, micro_batch=20, weight="rows" if with_record is not pairs else weight
    )
    assert result.micro_batches == 3
    for mine, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad)
    assert pairs.x.shape == (ROWS, WIDTH)
    assert pairs.made == 1


def test_sizes_and_floors_are_those_of_the_same_batch_in_a_dict() -> None:
    """What the batch itself takes counts, so that both have the same peaks."""
    pairs, model = a_record(), OfPairs()
    assert memopt.largest_batch(model, pairs, "1MB") == memopt.largest_batch(
        model, as_dict(pairs), "1MB"
    )
    texts = []
    for batch in (pairs, as_dict(pairs)):
        with pytest.raises(memopt.BudgetTooSmall) as refused:
            memopt.plan(model, batch, 1000, micro_batches=4, measure=False)
        texts.append(str(refused.value).splitlines()[0])
    assert texts[0] == texts[1]
    sizes = [
        memopt.accumulate(OfPairs(), batch, micro_batch="auto", budget=190_000).micro_batch
        for batch in (pairs, as_dict(pairs))
    ]
    assert sizes[0] == sizes[1] < ROWS


class Graph:
    """As torch_geometric's: nodes of several graphs behind each other, and edges between them."""

    def __init__(self, nodes: Tensor) -> None:
        self._store = {"x": nodes, "labels": nodes, "edge_index": torch.zeros(2, 5).long()}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_store"][name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (Graph(torch.randn(ROWS, WIDTH).double()), "Graph is no container"),
        (
            {"labels": torch.randn(ROWS, 1), "x": Graph(torch.randn(ROWS, WIDTH))},
            r"\['x'\], a Graph, with a tensor of 48 rows",
        ),
        (
            {"labels": torch.randn(ROWS, 1), "x": torch.randn(ROWS, WIDTH).numpy()},
            r"\['x'\], a ndarray of 48 rows \(torch.as_tensor",
        ),
    ],
    ids=["alone", "beside a tensor that is cut", "an array of NumPy's"],
)
def test_an_object_with_rows_is_refused_by_name(batch: Any, named: str) -> None:
    model = OfPairs()
    for call in (
        lambda: memopt.accumulate(model, batch, micro_batch=20),
        lambda: memopt.accumulate(model, batch, micro_batch="auto", budget="1GiB"),
        lambda: memopt.plan(model, batch, "1GiB", micro_batches=4),
        lambda: memopt.fit(model, batch, "1GiB", optimizer=torch.optim.SGD),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    assert all(p.grad is None for p in model.parameters())
    if isinstance(batch, Graph):
        with pytest.raises(ValueError, match=f"{named}.*a function of a size"):
            memopt.largest_batch(model, batch, "1GiB")


def test_a_batch_that_can_be_called_is_no_function_of_a_size() -> None:
    """As torch_geometric's, which iterates over its entries: the model raised, of a generator."""

    class Callable(Graph):
        def __call__(self, *names: str) -> Any:
            yield from self._store.items()

    with pytest.raises(TypeError, match="got a Callable, which returns a generator"):
        memopt.largest_batch(OfPairs(), Callable(torch.randn(ROWS, WIDTH)), "1GiB")


class Attention(nn.Module):
    """Looks whether its arguments are one tensor, as torch.nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, pairs: Pairs) -> Tensor:
        assert query is key is pairs.x
        return self.inner(query, key, key)[0].square().mean()


def test_a_tensor_at_several_places_of_a_batch_stays_one() -> None:
    """Else a prediction is of other operators than the step, and a micro-batch takes others."""
    model, x = Attention(), torch.randn(8, 6, WIDTH)
    batch = x, x, Pairs(x, x)
    assert memopt.accumulate(model, batch, micro_batch=3).micro_batches == 3
    assert memopt.largest_batch(model, batch, "1MB", limit=16) == 16
    plan = memopt.plan(model, batch, "1GiB", blocks=["inner"], measure=False).apply()
    plan.undo()
    assert plan.largest_batch("1MB", limit=16) == 16


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_cut_by_row(layout: torch.layout) -> None:
    """Those in CSR and CSC too, of which PyTorch takes no rows by their numbers."""
    weight = torch.randn(WIDTH, 3, requires_grad=True)
    dense = torch.randn(7, WIDTH).relu()

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            assert x.layout is layout
            return torch.sparse.mm(x, self.weight).square().mean()

    model = Product()
    (dense @ weight).square().mean().backward()
    memopt.accumulate(model, {"x": dense.to_sparse(layout=layout)}, micro_batch=3)
    torch.testing.assert_close(model.weight.grad, weight.grad)
