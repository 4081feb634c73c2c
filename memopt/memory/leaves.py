"""A batch's leaves: as in pytree, but a PackedSequence is one, whose tensors cannot be cut one by
one, and dataclasses are opened, which pytree opens only where it was told of the class.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from memopt.memory.objects import tensors_held
from memopt.memory.storages import tensors_in


def as_dict(batch: Any) -> Any:
    """A mapping of another class (transformers' BatchEncoding) as a dict, which pytree opens."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)


def entries_of_record(leaf: object) -> dict[str, Any]:
    """The fields of a dataclass that have values; empty of all else."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, (type, Tensor, nn.Module)):
        return {}
    names = (field.name for field in dataclasses.fields(leaf))
    return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}


def named_leaves(batch: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf behind its path, which is empty where it is the batch."""
    for keys, leaf in pytree.tree_leaves_with_path(as_dict(batch), is_leaf=is_packed):
        here = path + pytree.keystr(keys)
        fields = entries_of_record(leaf)
        for name, value in fields.items():
            yield from named_leaves(value, f"{here}.{name}")
        if not fields:
            yield here, leaf


def leaves_of(batch: object) -> list[Any]:
    return [leaf for _, leaf in named_leaves(batch)]


def mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with `function(leaf)` in the place of each leaf: one object for one tensor, which
    models ask for (`query is key`). Dataclasses are copied, without a call of their `__init__`.
    """
    found: dict[int, Any] = {}

    def one(leaf: Any) -> Any:
        fields = entries_of_record(leaf)
        if fields:
            made = copy.copy(leaf)
            for name, value in fields.items():
                object.__setattr__(made, name, everywhere(value))
            return made
        if not isinstance(leaf, Tensor):
            return function(leaf)
        if id(leaf) not in found:
            found[id(leaf)] = function(leaf)
        return found[id(leaf)]

    def everywhere(value: Any) -> Any:
        return pytree.tree_map(one, value, is_leaf=is_packed)

    return everywhere(as_dict(batch))


def tensors_of_objects(batch: object) -> list[Tensor]:
    """The tensors that a batch holds in objects which PyTorch cannot take apart."""
    if is_packed(batch):
        return []
    return tensors_held(pytree.tree_leaves(batch, is_leaf=is_packed))


def all_tensors(batch: object) -> list[Tensor]:
    """A batch's tensors, also those of such objects."""
    return [*tensors_in(batch), *tensors_of_objects(batch)]
