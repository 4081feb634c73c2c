"""Small programs with regions and scopes of recipes in them, as data: drawn by
test_random_programs.py, built as modules that share their weights, and run with and without these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memopt
from memopt._checkpoint import checkpoint, checkpoint_wrapper
from tests.checkpoint.support import torch_non_reentrant

SIZE = 3  # every value is a SIZE x SIZE matrix
DIRECTORY = TemporaryDirectory()  # of files without a name


class Pair(NamedTuple):
    first: Any
    second: Any


class Failure(Exception):
    """What a program is made to raise."""


class Fuse:
    """Raises Failure when it has been passed `left` times; never, if that is None."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self) -> None:
        if self.left is None:
            return
        if self.left == 0:
            self.left = None
            raise Failure
        self.left -= 1


class Weights(nn.Module):
    """What all parts of a program share: trained, frozen, and moving in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.randn(SIZE, SIZE))
        self.frozen = nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)
        self.norm = nn.BatchNorm1d(SIZE)
        self.fuse = Fuse()


def write_in_place(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    """Into a tensor of its own, which nothing has saved."""
    return (a * 2).mul_(3).add_(b)


def write_through_a_view(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    base = a.clone()
    base[:1].copy_(b[1:2])
    base.t()[0].mul_(0.5)
    return base


def write_an_output_in_place(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    y = memopt.functional.relu_squared(a.tanh())
    return y.add_(b) if b.numel() else y


def several_readers(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    """Views of one output, an alias and itself."""
    y = memopt.functional.silu(a)
    return (y @ w.trained + y.t() * w.frozen + y.detach() * w.trained + y[:1].square()).tanh()


def chain(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    y = memopt.functional.rms_norm(a, (SIZE,), w.trained[1])
    y = memopt.functional.dropout(memopt.functional.gelu(y), 0.3)
    return memopt.functional.swiglu(y, b.tanh()) @ w.trained


def views_of_an_output(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    """Slices, and every fourth element."""
    y = memopt.functional.quick_gelu(a)
    every_fourth = y.flatten()[::4]
    return (y[1:].t() @ y[1:]).tanh() + torch.outer(every_fourth, y.diagonal()).tanh()


def write_a_view_of_an_output(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    """Readers of the output and of the view, after the write."""
    y = memopt.functional.sigmoid(a)
    view = y[1:]
    view.mul_(0.5)
    return y @ w.trained + (view.t() @ view).sin()


def both_outputs(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    y, total = memopt.functional.add_layer_norm(a, b, (SIZE,), w.trained[0], w.frozen[0])
    return y @ w.trained + total.tanh() * y


def packed(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    both = torch.cat([a, b.tanh()], dim=-1)
    y = memopt.functional.swiglu_packed(both)
    return y @ w.trained + memopt.functional.geglu_packed(both, interleaved=True).tanh()


def with_linears(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    """Whose nodes hold a producer's input, and read an output that has a recipe."""
    M = memopt.functional
    y = M.layer_norm_linear(M.silu(a), w.trained[0], None, w.trained)
    return M.gelu_linear(M.relu(y), w.trained) + M.mlp(y, w.trained, None, w.trained).tanh()


def without_gradient(a: Tensor, b: Tensor, w: Weights) -> Tensor:
    with torch.no_grad():
        c = (a + b).sin()
    return c * w.trained


# All from two matrices to one, whose elements stay moderate.
OPS: dict[str, Callable[[Tensor, Tensor, Weights], Tensor]] = {
    "sin": lambda a, b, w: a.sin(),
    "tanh": lambda a, b, w: a.tanh(),
    "add": lambda a, b, w: a + b,
    "mul": lambda a, b, w: a * b.tanh(),
    "matmul": lambda a, b, w: (a @ b).tanh(),
    "trained": lambda a, b, w: a @ w.trained,
    "frozen": lambda a, b, w: a.tanh() * w.frozen,
    "transpose": lambda a, b, w: a.t(),
    "expand": lambda a, b, w: a[1:2].expand(SIZE, SIZE),
    "detach": lambda a, b, w: a.detach(),
    "no_grad": without_gradient,
    "in place": write_in_place,
    "in place, view": write_through_a_view,
    "dropout": lambda a, b, w: F.dropout(a, 0.4),
    "noise": lambda a, b, w: a * torch.rand_like(b),
    "batch norm": lambda a, b, w: w.norm(a),
    "memopt layer norm": lambda a, b, w: memopt.functional.layer_norm(a, (SIZE,), w.trained[0]),
    "memopt gelu": lambda a, b, w: memopt.functional.gelu(a),
    "memopt dropout": lambda a, b, w: memopt.functional.dropout(a, 0.4) @ w.trained,
    "memopt gated": lambda a, b, w: memopt.functional.geglu(a, b) @ w.trained,
    "memopt add": lambda a, b, w: memopt.functional.add_rms_norm(a, b, (SIZE,))[0] @ w.trained,
    "memopt in place": write_an_output_in_place,
    "several readers": several_readers,
    "views of an output": views_of_an_output,
    "memopt in place, view": write_a_view_of_an_output,
    "memopt both outputs": both_outputs,
    "memopt packed": packed,
    "memopt linears": with_linears,
    "memopt relu": lambda a, b, w: memopt.functional.relu(a),
    "memopt zero-centred": lambda a, b, w: memopt.functional.rms_norm(
        a, (SIZE,), w.trained[2], zero_centered_weight=True
    ),
    "chain": chain,
    "memopt both": lambda a, b, w: memopt.functional.layer_norm_gelu(a, (SIZE,), b[0], w.frozen[0]),
}

Packed = tuple[tuple[Any, ...], dict[str, Any]]

# How tensors become the arguments of a region.
CONTAINERS: dict[str, Callable[[list[Tensor]], Packed]] = {
    "positional": lambda ts: (tuple(ts), {}),
    "keyword": lambda ts: ((), {f"t{i}": t for i, t in enumerate(ts)}),
    "list": lambda ts: ((None, ts), {}),
    "nested": lambda ts: (({"a": ts[:1], 2: (ts[1:], None, "text")}, 7), {}),
    "named tuple": lambda ts: ((), {"pair": Pair([*ts], 7), "none": None}),
}

# How a region gives its results back.
RESULTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "bare": lambda ts: ts[0],
    "tuple": lambda ts: (*ts, None),
    "dict": lambda ts: {"a": ts[0], "b": [*ts[1:], 3]},
    "named tuple": lambda ts: Pair(ts[0], (*ts[1:], "text")),
}


@dataclass(frozen=True)
class Op:
    """Appends one value. Inputs count backwards from the newest value, and around."""

    name: str
    a: int = 0
    b: int = 0


@dataclass(frozen=True)
class Region:
    """Runs `body` on some of the values, nested in `container`; appends the results."""

    kind: str
    """checkpoint, disk (with its arguments in a file), torch (its own checkpoint), wrapped (a
    module), offloaded (likewise), recipes and offload (scopes of memopt.recipes() and, to a file,
    memopt.offload())."""
    body: tuple[Op | Region, ...]
    inputs: tuple[int, ...] = (0,)
    container: str = "positional"
    outputs: tuple[int, ...] = (0,)
    result: str = "bare"


@dataclass(frozen=True)
class Program:
    body: tuple[Op | Region, ...]
    backward: str = "backward"
    outer_first: bool = True
    """Which of two nested modules is wrapped first."""
    recipes: bool = False
    """Whether all of it runs in a scope of memopt.recipes()."""

    def kinds(self) -> set[str]:
        return {item.kind for item in _regions(self.body)}


def _regions(body: tuple[Op | Region, ...]) -> Iterator[Region]:
    for item in body:
        if isinstance(item, Region):
            yield item
            yield from _regions(item.body)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Part(nn.Module):
    """A body as a module; the regions in it are its children."""

    def __init__(self, body: tuple[Op | Region, ...], weights: Weights, regions: bool) -> None:
        super().__init__()
        self.body, self.weights, self.regions = body, weights, regions
        inner = [item for item in body if isinstance(item, Region)]
        self.inner = nn.ModuleList(RegionPart(item, weights, regions) for item in inner)

    def extend(self, values: list[Tensor]) -> None:
        """Run the body on `values`, and append what it makes."""
        inner = iter(self.inner)
        for item in self.body:
            if isinstance(item, Op):
                self.weights.fuse()
                a, b = _pick(values, (item.a, item.b))
                values.append(OPS[item.name](a, b, self.weights))
            else:
                args, kwargs = CONTAINERS[item.container](_pick(values, item.inputs))
                values.extend(tensors_in(self._call(item.kind, next(inner), args, kwargs)))

    def _call(self, kind: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.regions and kind == "checkpoint":
            return checkpoint(module, *args, **kwargs)
        if self.regions and kind == "disk":
            return checkpoint(module, *args, offload=Path(DIRECTORY.name), **kwargs)
        if self.regions and kind == "torch":
            return torch_non_reentrant(module, *args, **kwargs)
        if self.regions and kind == "recipes":
            with memopt.recipes():
                return module(*args, **kwargs)
        if self.regions and kind == "offload":
            with memopt.offload("disk", directory=DIRECTORY.name, min_bytes=1, keep_last=1):
                return module(*args, **kwargs)
        return module(*args, **kwargs)


class RegionPart(Part):
    def __init__(self, region: Region, weights: Weights, regions: bool) -> None:
        super().__init__(region.body, weights, regions)
        self.region = region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = tensors_in((args, kwargs))
        self.extend(values)
        return RESULTS[self.region.result](_pick(values, self.region.outputs))


def _pick(values: list[Tensor], indices: tuple[int, ...]) -> list[Tensor]:
    return [values[-1 - index % len(values)] for index in indices]


def build(program: Program, weights: Weights, regions: bool) -> Part:
    """`program` as a module, with its regions or as the plain run that they must equal."""
    part = Part(program.body, weights, regions)
    modules = [module for module in part.modules() if isinstance(module, RegionPart)]
    for module in modules if program.outer_first else reversed(modules):
        if regions and module.region.kind in ("wrapped", "offloaded"):
            checkpoint_wrapper(module, offload_to_cpu=module.region.kind == "offloaded")
    return part
