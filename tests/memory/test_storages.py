"""Proves: the tensors of a batch are found in every container that PyTorch's pytree knows, and that
inside of dicts, lists and tuples too.
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from memopt.memory.storages import storages, tensors_in

Pair = namedtuple("Pair", ["first", "second"])


class Cache:
    """As a cache of keys and values: a class of its own that pytree was told of."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


pytree.register_pytree_node(Cache, lambda c: ([c.keys], None), lambda keys, _: Cache(*keys))
ONE, OTHER = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    "held",
    [
        {"a": ONE, "b": [OTHER]},
        {"a": ONE, "b": Cache(OTHER)},
        [ONE, Cache(OTHER)],
        (Pair(ONE, 3), {"b": OTHER}),
        OrderedDict(a=ONE, b=OTHER),
        Cache(ONE),
        {},
    ],
    ids=lambda held: type(held).__name__,
)
def test_tensors_are_found_in_order(held: Any) -> None:
    found, leaves = tensors_in(held), pytree.tree_leaves(held)
    assert list(map(id, found)) == [id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def test_a_key_is_its_own_copy() -> None:
    """A copy of PyTorch's weak reference frees what it does not own: the heap was damaged."""
    key = next(iter(storages([ONE])))
    assert copy.deepcopy(key) is key
    with pytest.raises(TypeError, match="a key of a storage cannot be pickled"):
        pickle.dumps(key)
