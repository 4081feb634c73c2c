"""Who saves what for backward: each storage with the autograd nodes and the modules that saved it.

A saved-tensor hook runs inside the op that saves. The innermost forward of a module among the
Python frames says where that is, and the number that autograd gave its newest node says which node:
the graph that is there afterwards has their names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt._compat import sequence_number
from memopt.memory.frames import first_argument
from memopt.memory.modules import paths_of
from memopt.memory.saved import SavedBytes, SavedTensors, recorded
from memopt.memory.storages import node_of, sizes_of, storages

# Nodes that give another view of a tensor: what made the tensor stands in front of them.
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Alias", "AsStrided", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split",
        "SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
    )
    for number in range(4)
)  # fmt: skip


_MEMOPT = re.compile(r".*memopt::.*?(\w+)>*\s*>*$")


@dataclass(frozen=True)
class Attributed:
    """A storage that is held for backward, and where it comes from."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    op: str
    """The autograd node that saved it first: "GeluBackward0", or "memopt NormOp" for one of
    memopt's. Empty if the node is not in the graph of the output."""

    module: str
    """The path of the innermost module whose forward ran then; empty for the model itself."""

    function: str
    """The innermost function of torch.nn.functional that ran in it then; empty if none did."""

    made_by: str
    made_in: str
    """Node and module of which it is the output, as far as autograd knows; else empty."""

    behind: str
    """The node that made the first input of `op`; empty for a leaf."""

    savers: frozenset[str]
    """All nodes that saved it."""


@dataclass(frozen=True)
class Attribution:
    """The storages that a run of a model saved, and the modules that it called."""

    saved: SavedBytes
    """The bytes kept for backward, as `memopt.saved_bytes` counts them."""

    storages: tuple[Attributed, ...]
    """The storages of `saved` in their order, each with the node that saved it."""

    called: frozenset[str]
    """Paths of those of the `watched` modules that were called."""


def attribute(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    watched: Iterable[str] = (),
) -> Attribution:
    """Runs the model once, after which it is as it was.

    watched: paths of modules of which is to be said whether they were called.
    """
    paths = paths_of(model)
    called: set[str] = set()
    with ExitStack() as stack:
        for path in watched:
            hook = model.get_submodule(path).register_forward_pre_hook(
                lambda *_, path=path: called.add(path)
            )
            stack.callback(hook.remove)
        run = stack.enter_context(recorded(model, args, kwargs, partial(_Recorder, paths)))
        found = tuple(run.saved.attributed(_nodes(tensors_of(run.output))))
        return Attribution(run.bytes(), found, frozenset(called))


@dataclass(frozen=True)
class _Note:
    """A note taken when a tensor is saved. Nodes are noted by number, so that none lives longer."""

    node: int
    module: str
    function: str
    made_by: int | None


class _Recorder(SavedTensors):
    def __init__(self, paths: Mapping[nn.Module, str], **options: Any) -> None:
        super().__init__(**options)
        self._paths = paths
        self._notes: WeakKeyDictionary[Any, _Note] = WeakKeyDictionary()

    def _pack(self, tensor: Tensor) -> Any:
        packed = super()._pack(tensor)
        module, function = innermost(sys._getframe(1), self._paths)
        node = sequence_number() - 1
        self._notes[packed] = _Note(node, module, function, _maker(tensor))
        return packed

    def attributed(self, nodes: Mapping[int, Any]) -> Iterator[Attributed]:
        """Yields each storage with the node that saved it, while the graph lives.

        Args:
            nodes: the graph's nodes by their sequence numbers.
        """
        names = {number: _name(node) for number, node in nodes.items()}
        packed = [p for ref in self._packed if (p := ref()) is not None]
        places = {note.node: note.module for p in packed if (note := self._notes[p])}
        savers: dict[Any, list[_Note]] = {}
        for p in packed:
            for key in storages([p.tensor]):
                savers.setdefault(key, []).append(self._notes[p])
        for key, (nbytes, tensor) in self.by_storage().items():
            notes = savers[key]
            maker = next((n.made_by for n in notes if n.made_by is not None), None)
            first = nodes.get(notes[0].node)
            before = _before_views(first.next_functions[0][0] if first is not None else None)
            yield Attributed(
                nbytes,
                sizes_of(tensor),
                tensor.dtype,
                op=names.get(notes[0].node, ""),
                module=notes[0].module,
                function=notes[0].function,
                made_by="" if maker is None else names.get(maker, ""),
                made_in="" if maker is None else places.get(maker, ""),
                behind="" if before is None else _name(before),
                savers=frozenset(names.get(note.node, "") for note in notes),
            )


_FUNCTIONAL = nn.functional.__file__


def innermost(frame: FrameType | None, paths: Mapping[nn.Module, str]) -> tuple[str, str]:
    """The path of the innermost module that runs in or around `frame`, and the function of
    torch.nn.functional inside it; each empty if there is none.
    """
    function = ""
    while frame is not None:
        code = frame.f_code
        if not function and code.co_filename == _FUNCTIONAL:
            function = code.co_name
        first = first_argument(frame)
        if isinstance(first, nn.Module) and first in paths:
            return paths[first], function
        frame = frame.f_back
    return "", function


def _maker(tensor: Tensor) -> int | None:
    """The number of the node whose output `tensor` is or views."""
    node = _before_views(node_of(tensor))
    return None if node is None else _number(node)


def _before_views(node: Any) -> Any:
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node


def _name(node: Any) -> str:
    return _MEMOPT.sub(r"memopt \1", node.name())


def _number(node: Any) -> int:
    number: int = node._sequence_nr()
    return number


def _nodes(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """All nodes behind these tensors, by number."""
    nodes: dict[int, Any] = {}
    todo: list[Any] = [node_of(tensor) for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is not None and _number(node) not in nodes:
            nodes[_number(node)] = node
            todo.extend(after for after, _ in node.next_functions if _is_inner(after))
    return nodes


def _is_inner(node: Any) -> bool:
    """Whether a node has a number of its own, as those that accumulate a leaf's gradient do not."""
    return node is not None and not hasattr(node, "variable")


def tensors_of(output: object) -> Iterator[Tensor]:
    """The tensors in a model's output, also in objects that keep tensors as attributes."""
    seen: set[int] = set()
    todo: list[Any] = [output]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            leaves = pytree.tree_leaves(value)
            if len(leaves) == 1 and leaves[0] is value:
                skip = (str, type, nn.Module, FunctionType, MethodType)
                leaves = [] if isinstance(value, skip) else list(_attributes(value))
            todo.extend(leaves)


def _attributes(value: object) -> Iterable[Any]:
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    return attributes.values()
