"""Whether calls of a predicted step work on each row alone: the probe of rows.py, on stand-ins.

Hooks note what each module's arguments look like. The probe calls the module with a few rows of
such looks; for one without values a copy with random numbers stands in.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt._checkpoint.chunks import CallRows, is_ordinary
from memopt._checkpoint.rows import why_not_rows
from memopt._compat import is_in_backward
from memopt.memory.leaves import all_tensors
from memopt.memory.modules import ByModule, seen_modules
from memopt.memory.paths import is_inside

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout)
# A prime number of them is repeated, so that no two rows of a weight begin with the same ones.
_NUMBERS = 65521
_STEP = 4099


class _Look(NamedTuple):
    """The look of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Given(NamedTuple):
    """The arguments of a call, without tensors."""

    leaves: tuple[Any, ...]
    spec: Any


@contextmanager
def given_to_calls(model: nn.Module) -> Iterator[dict[str, Given]]:
    """Notes, while it is entered, what the first call with gradients of each module gets, by path.
    A module that gets objects of other classes has no entry.
    """
    found: dict[str, Given] = {}
    paths = ByModule((module, path) for path, module in seen_modules(model).items())

    def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
        path = paths[module]
        if path in found or is_in_backward() or not torch.is_grad_enabled():
            return
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if all(isinstance(leaf, _PLAIN) or _may_have_rows(leaf) for leaf in leaves):
            found[path] = Given(tuple(map(_look, leaves)), spec)

    with ExitStack() as stack:
        for module in paths:
            hook = module.register_forward_pre_hook(entered, with_kwargs=True)
            stack.callback(hook.remove)
        yield found


def _may_have_rows(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and is_ordinary(leaf)


def are_predicted(batch: object) -> bool:
    """Whether a prediction's calls get what those of a step get. It takes tensors of a class of
    their own for ordinary ones, which alone run in chunks.
    """
    return all(map(is_ordinary, all_tensors(batch)))


def _look(leaf: Any) -> Any:
    return _Look(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def row_modules_among(
    who: str,
    modules: Mapping[str, nn.Module],
    given: Mapping[str, Given],
    autocast: torch.dtype | None,
) -> tuple[str, ...]:
    """The paths, in their order and none inside another of them, of modules that work on each row
    alone. Of modules of one class, with parameters and arguments of the same looks, one is asked.

    Args:
        modules: those that are asked for, by path, outer ones before those inside.
        given: what they get.
        autocast: the dtype that they run under.
    """
    found: list[str] = []
    known: dict[tuple[type, str], bool] = {}
    numbers = _Numbers()
    for path, module in modules.items():
        if path not in given or any(is_inside(path, other) for other in found):
            continue
        looks = [(name, tuple(p.shape), p.dtype) for name, p in module.named_parameters()]
        kind = type(module), repr((module.training, looks, given[path]))
        if kind not in known:
            known[kind] = _works_on_rows(who, module, given[path], autocast, numbers)
        if known[kind]:
            found.append(path)
    return tuple(found)


def _works_on_rows(
    who: str, module: nn.Module, given: Given, autocast: torch.dtype | None, numbers: _Numbers
) -> bool:
    stand_in, device = _stand_in(module, numbers)
    leaves = [_tensor(leaf, device) if isinstance(leaf, _Look) else leaf for leaf in given.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, given.spec)
    try:
        rows = CallRows(who, args, kwargs)
    except ValueError:
        return False
    if not rows.first.is_floating_point() or not rows.count:
        return False
    scope = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
    with scope:
        return not why_not_rows(stand_in.forward, rows, [stand_in])


def _stand_in(module: nn.Module, numbers: _Numbers) -> tuple[nn.Module, torch.device]:
    """The module, or a copy with values, and its device."""
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return module, next((t.device for t in tensors), torch.device("cpu"))
    return copy.deepcopy(module)._apply(numbers.like), torch.device("cpu")


class _Numbers:
    """Random numbers in place of weights. Those of one size share memory, from other places on:
    the weights of a block may be as large as the memory that is free.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._some = torch.randn(_NUMBERS, generator=generator, device="cpu")
        self._known: dict[tuple[torch.dtype, float], Tensor] = {}
        self._given = 0

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor on the CPU as large as this one. Integers are zero."""
        if not tensor.is_floating_point():
            return torch.zeros_like(tensor, device="cpu")
        size = 1 / math.sqrt(tensor.shape[-1]) if tensor.dim() > 1 else 1.0
        self._given += 1
        first, count = _STEP * self._given % _NUMBERS, tensor.numel()
        key = tensor.dtype, size
        if key not in self._known or len(self._known[key]) < count + _NUMBERS:
            part = (size * self._some).to(tensor.dtype)
            self._known[key] = part.repeat(count // _NUMBERS + 2)
        return self._known[key][first : first + count].view(tensor.shape)


def _tensor(look: _Look, device: torch.device) -> Tensor:
    """A tensor of this look, whose memory is that of its last dimension."""
    last = look.shape[-1:]
    if look.dtype.is_floating_point:
        one = torch.randn(last, generator=torch.Generator().manual_seed(1), device="cpu")
    else:
        one = torch.full(last, look.dtype == torch.bool, device="cpu")
    return one.to(device, look.dtype).expand(look.shape)
