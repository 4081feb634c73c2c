"""The bytes that a step of a compiled graph takes at its peak, counted in Inductor's own code.

Inductor lowers, fuses and orders the halves, as it does when it compiles them, up to the lines of
the wrapper that allocates, calls kernels and frees. No kernel is compiled, and nothing runs. What
counts is what timeline.py counts. What a kernel takes for itself while it runs is not seen.

Relied upon: `compile_fx_inner`, which ends in `GraphLowering._compile_to_module`, of one graph at a
time (PyTorch holds a lock while it compiles); the lines of the wrapper, which are objects;
`get_donated_idxs`, which says what backward may write over; where statistics are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import sympy
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.graph_compile import collect_fw_donated_buffer_idxs
from torch._inductor import config, graph, ir, metrics
from torch._inductor.codegen import wrapper
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch.utils import _pytree as pytree

from memopt._compile.ops import elements, has_tensor, hint, in_numbers, module_path, nbytes


class CountedPeak(NamedTuple):
    """The most bytes at any time, and the op that runs then."""

    most: int
    where: str


def peak_of_code(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> CountedPeak:
    """The peak of a step of these halves, which stay as they are. Sizes that are symbols are the
    numbers of `sizes_are`.

    Args:
        outputs: how many of forward's outputs are the caller's; the rest is kept for backward.
    """
    results = _outputs(forward)
    kept = [node for node in results[outputs:] if has_tensor(node)]  # and not a size
    only_ours = collect_fw_donated_buffer_idxs(
        *map(_values, (_inputs(forward), results[:outputs], _outputs(backward), kept))
    )
    donated = {kept[index].name for index in only_ours}
    first, names = _Ledger(), [getattr(node, "name", "") for node in results]
    returned = _follow(forward, _values(_inputs(forward)), first, [], is_backward=False)
    made = dict(zip(names, returned, strict=True))

    # Inputs that forward has allocated, copies of its own inputs in another layout among them.
    second, inputs = _Ledger(), _inputs(backward)
    values, arrive = _values(inputs), [node for node in inputs if node.name not in made]
    for node in arrive:
        second.allocate(node.name, nbytes(node), node.name)
        if _is_number(node):
            second.allocate(_CALLER, nbytes(node), node.name)
    for node, result in zip(results[:outputs], returned, strict=False):
        if _is_number(node):
            for storage in first.storages.get(result.maybe_get_name() or "", ()):
                second.allocate(_CALLER, first.nbytes[storage], f"forward's {storage}")
    for place, node in enumerate(inputs):
        if node.name in made and has_tensor(node):
            result = made[node.name]
            values[place] = _with_strides(values[place], result)
            for storage in first.storages.get(result.maybe_get_name() or "", ()):
                second.allocate(node.name, first.nbytes[storage], f"forward's {storage}")
    places = [place for place, node in enumerate(inputs) if node.name in donated]
    _follow(backward, values, second, places, is_backward=True)
    return max(
        CountedPeak(first.most, f"{first.where}, in forward"),
        CountedPeak(second.most, f"{second.where}, in backward"),
        CountedPeak(
            first.now + sum(map(nbytes, arrive)), "what makes the gradients of its outputs"
        ),
    )


# Who has a loss and its gradient until backward ends.
_CALLER = "the caller"


def _is_number(node: fx.Node | None) -> bool:
    return isinstance(node, fx.Node) and has_tensor(node) and elements(node) <= 1


def _inputs(half: fx.GraphModule) -> list[fx.Node]:
    return list(half.graph.find_nodes(op="placeholder"))


def _outputs(half: fx.GraphModule) -> list[fx.Node]:
    (output,) = half.graph.find_nodes(op="output")
    return list(output.args[0])


def _values(nodes: Iterable[fx.Node | None]) -> list[Any]:
    return [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]


def _with_strides(value: Any, result: Any) -> Any:
    """An input of backward as it will come from the code of forward."""
    if not isinstance(value, torch.Tensor) or not result.has_tensor_output():
        return value
    strides = [in_numbers(sympy.sympify(stride)) for stride in result.get_stride()]
    if list(map(hint, value.stride())) == strides:
        return value
    return value.as_strided(value.size(), [int(stride) for stride in strides])


@contextmanager
def _own_statistics() -> Iterator[None]:
    """Inductor's statistics are of what is compiled, and this is not."""
    numbers = {name: getattr(metrics, name) for name in metrics.get_metric_fields()}
    counted = copy.deepcopy(counters)
    try:
        yield
    finally:
        vars(metrics).update(numbers)
        counters.clear()
        counters.update(counted)


class _Done(BaseException):
    """Ends a compilation when its code is there. No Exception: PyTorch would catch it."""


def _follow(
    half: fx.GraphModule, inputs: list[Any], ledger: _Ledger, donated: list[int], is_backward: bool
) -> list[Any]:
    """Generate the code of this half and note what it allocates and frees.

    Args:
        donated: the places of the inputs that may be written over.

    Returns:
        The outputs, as nodes of Inductor's.
    """
    results: list[Any] = []

    def read(lowering: GraphLowering) -> None:
        lowering.codegen()
        ledger.read(lowering)
        results.extend(lowering.graph_outputs)
        raise _Done

    # Inductor changes the graph that it gets.
    half = fx.GraphModule(half, copy.deepcopy(half.graph))
    with (
        _own_statistics(),
        mock.patch.object(GraphLowering, "_compile_to_module", read),
        mock.patch.object(graph, "get_donated_idxs", return_value=donated),
        # From its cache a graph would come without its lines.
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, graph_partition=False),
    ):
        try:
            compile_fx_inner(half, inputs, static_input_idxs=(), is_backward=is_backward)
        except _Done:
            return results
    raise RuntimeError("compile: Inductor has compiled a graph without generating its code")


class _Ledger:
    """The storages that are allocated, by the names that the code has for them."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.where = "its first op"
        self.storages: dict[str, list[str]] = {}
        self.nbytes: dict[str, int] = {}
        self._names: dict[str, set[str]] = {}

    def allocate(self, name: str, nbytes: int, storage: str) -> None:
        """A tensor of this name in a storage, which is allocated unless it was."""
        if storage not in self.nbytes:
            self.nbytes[storage], self._names[storage] = nbytes, set()
            self.now += nbytes
            self.most = max(self.most, self.now)
        self._names[storage].add(name)
        self.storages.setdefault(name, []).append(storage)

    def read(self, lowering: GraphLowering) -> None:
        """Follow the code of a half."""
        line: Any
        for line in lowering.wrapper_code.lines:
            before = self.most
            self._read_line(line, lowering)
            if self.most > before:
                self.where = _op_of(line.node)  # only what has a buffer allocates

    def _read_line(self, line: Any, lowering: GraphLowering) -> None:
        match line:
            case wrapper.AllocateLine():
                self._make(line.node, line.node.get_name(), lowering)
            case wrapper.ExternKernelAllocLine():
                # A tuple holds its tensors too, until its own name is gone.
                for result in _results(line.node):
                    self._make(result, line.node.get_name(), lowering)
            case wrapper.ReuseLine():
                self._share(line.node.get_name(), line.reused_as.get_name())
                if line.delete_old:
                    self._free(line.node.get_name())
            case wrapper.ReinterpretLine():
                self._share(line.node.get_name(), line.reused_as.get_name())
            case wrapper.FreeIfNotReusedLine():
                if not line.is_reused:
                    self._free(line.node.get_name())
            case wrapper.FreeLine():
                self._free(line.node.get_name())

    def _make(self, buffer: Any, also: str, lowering: GraphLowering) -> None:
        sizes, length = lowering.sizevars, lowering.get_allocation_storage_size(buffer)
        length = in_numbers(sympy.sympify(length).xreplace(sizes.inv_precomputed_replacements))
        most = int(sizes.optimization_hint(length)) * buffer.get_dtype().itemsize
        for name in {buffer.get_name(), also}:
            self.allocate(name, most, buffer.get_name())

    def _share(self, name: str, other: str) -> None:
        for storage in self.storages.get(name, ()):
            self.allocate(other, 0, storage)

    def _free(self, name: str) -> None:
        for storage in self.storages.pop(name, ()):
            self._names[storage].discard(name)
            if not self._names[storage]:
                self.now -= self.nbytes[storage]


def _op_of(buffer: Any) -> str:
    """The last op that is computed into it, and its module."""
    ops = list(buffer.get_origins())
    if not ops:
        return str(buffer.get_name())
    module = module_path(ops[-1])
    return f"{ops[-1].name} of {module}" if module else str(ops[-1].name)


def _results(op: ir.ExternKernelAlloc) -> list[ir.Buffer]:
    """The tensors that a library's op allocates."""
    if isinstance(op.layout, ir.Layout):
        return [op]
    found = pytree.tree_leaves(getattr(op, "outputs", ()))
    return [result for result in found if isinstance(result, ir.MultiOutput)]
