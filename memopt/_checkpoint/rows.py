"""Whether a call works on each row alone: a probe, on a few rows like those of the call.

The call runs on a sample of six rows, forward and backward. It works on rows alone if

- what it returns for a row, and the gradient of the row, stay when all other rows are exchanged,
- both are what they are in a chunk of three rows, and of one: nothing depends on a row's place,
- it changes nothing that the next call would find (statistics, counters, tensors kept for later),
  nor its arguments: a chunk's lists and dicts are its own, and the caller would look into others,
- it draws no decisions across rows: it does not sort or count rows, nor sum over those before one.
  A capacity of experts, say, shows at no small sample.

Random numbers are replaced by constants for the comparison of chunks, since each chunk draws its
own. Everything is put back. A call is probed once (known_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memopt._checkpoint.caches import has_cache, may_have_caches
from memopt._checkpoint.chunks import CallRows
from memopt._checkpoint.flags import with_flag
from memopt._checkpoint.known_rows import PLAIN, KnownCall
from memopt._checkpoint.naming import region_name
from memopt._checkpoint.state import ArgumentState, version_of
from memopt._compat import dispatch_modes, is_fake, without_dispatch_modes
from memopt._extension import _C
from memopt.memory.arguments import by_name
from memopt.memory.backwards import own_backward
from memopt.memory.ledger import Ledger
from memopt.memory.saved import saved_unseen
from memopt.memory.unchanged import unchanged
from memopt.memory.uncompiled_mode import UncompiledMode
from memopt.memory.writes import Writes

_ROWS = 6
_CHUNKS = ((0, 3), (3, 3), (5, 1))
_SEED = 0
# How far results in one dtype may lie apart, as a part of the largest: kernels differ by the number
# of rows. For calls of one shape a quarter of it.
_CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_SAME_SHAPE = 0.25
_OVER_ROWS = {
    *("nonzero", "bincount", "histc", "multinomial", "searchsorted", "_grouped_mm"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
}
_ALONG_A_DIM = {
    *("sort", "argsort", "topk", "kthvalue"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
}

_OF_INFERENCE = "Inference tensors"
"""The beginning of PyTorch's messages about tensors that inference mode made."""


def check_rows(who: str, fn: Callable[..., Any], rows: CallRows, owner: nn.Module | None) -> bool:
    """Probe a call, unless it was probed before.

    Nothing is known where tensors have no values, and while memopt measures.

    Returns:
        Whether it may run in chunks. It runs whole where it uses tensors, beside its arguments,
        that inference mode made: no probe can run backward.

    Raises:
        ValueError: it does not work on each row alone.
    """
    if (
        _C.flags().recomputing
        or any(map(_needs_to_see, dispatch_modes()))
        or any(isinstance(leaf, Tensor) and (leaf.is_meta or is_fake(leaf)) for leaf in rows.leaves)
    ):
        return True
    known = KnownCall(fn, rows, owner)
    if known.in_chunks is not None:
        return known.in_chunks
    with torch.inference_mode(False), without_dispatch_modes():
        reason = why_not_rows(fn, rows.with_plain_tensors(), known.modules)
    in_chunks = not reason
    if reason and _OF_INFERENCE not in reason:
        name = region_name(fn if owner is None else owner)
        raise ValueError(
            f"{who}: chunks needs a call that works on each row alone, got {name}: {reason}"
        )
    known.note(in_chunks)
    return in_chunks


def _needs_to_see(mode: TorchDispatchMode) -> bool:
    """Whether a mode gives tensors what they are, or is memopt's, of a step that is measured."""
    return isinstance(mode, (Ledger, Writes)) or mode.is_infra_mode()  # fake tensors, traces


def why_not_rows(fn: Callable[..., Any], rows: CallRows, modules: list[nn.Module]) -> str:
    """Why a call does not work on each row alone; empty if it does.

    Args:
        fn: called with the arguments of `rows`.
        modules: those that it uses.
    """
    args, kwargs = rows.call_with(lambda leaf: leaf)
    if may_have_caches() and has_cache(args, kwargs):
        return "a cache of keys and values is among its arguments"
    with ExitStack() as stack:
        stack.enter_context(unchanged(fn, modules, args, kwargs))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(own_backward())
        stack.enter_context(with_flag("disabled"))
        stack.enter_context(saved_unseen())  # by a region around
        for module in modules:
            for part in module.modules():
                if isinstance(part, nn.modules.dropout._DropoutNd):
                    part.training = False
        before = dict(_marks(modules))
        probe = _Probe(fn, rows)
        try:
            reason = probe.reason()
        except _NoRows as error:
            return str(error)
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            return f"with other rows it raises {type(error).__name__} ({first_line})"
        after = dict(_marks(modules))
        changed = [name for name in before | after if before.get(name) != after.get(name)]
        if changed and not reason:
            return f"it changes {changed[0]}, which the next chunk would find"
        return reason


class _NoRows(Exception):
    """A result is not of the rows."""


class _Probe:
    """Runs of one call on rows of a sample."""

    def __init__(self, fn: Callable[..., Any], rows: CallRows) -> None:
        self._fn, self._rows = fn, rows
        self._dims = len(rows.row_sizes)
        device = next(leaf.device for leaf in rows.leaves if isinstance(leaf, Tensor))
        self._generator = torch.Generator(device="cpu").manual_seed(_SEED)
        self._device = device
        self._watch = _Watch()
        kinds = {id(leaf): leaf for leaf in rows.leaves if rows.are_of(leaf)}
        self._sample = {key: self._rows_like(leaf) for key, leaf in kinds.items()}
        self._other = {
            key: torch.randn(one.shape, generator=self._generator).to(one) + one
            if one.is_floating_point()
            else one.roll(1, 0)
            for key, one in self._sample.items()
        }
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def reason(self) -> str:
        whole = self._run(self._sample, 0)
        if self._watch.over_rows:
            return f"it sorts, counts or sums rows ({self._watch.over_rows})"
        for row in range(_ROWS):
            stays = torch.zeros(_ROWS, dtype=torch.bool).index_fill_(0, torch.tensor([row]), True)
            mixed = {
                key: torch.where(_as_column(stays, one), one, self._other[key])
                for key, one in self._sample.items()
            }
            results = self._run(mixed, 0, stays)
            at = slice(row, row + 1)
            if what := _difference(whole, results, at, at, _SAME_SHAPE):
                return f"{what} of one row depends on other rows"
        for first, count in _CHUNKS:
            part = {key: one[first : first + count] for key, one in self._sample.items()}
            results = self._run(part, first)
            if self._watch.draws_unseen:  # other numbers: the shapes alone are known
                continue
            if what := _difference(whole, results, slice(first, first + count), slice(None)):
                return f"{what} of a row depends on its place, or on how many rows there are"
        return ""

    def _rows_like(self, leaf: Tensor) -> Tensor:
        """Rows as those of an argument: of its size where it has floats, else some of its own."""
        places = torch.linspace(0, self._rows.count - 1, _ROWS).long().to(leaf.device)
        with torch.no_grad():
            own = leaf[tuple(torch.unravel_index(places, self._rows.row_sizes))].detach()
            if not own.is_floating_point():
                return own.clone()
            size = float(own.double().square().mean().sqrt())
            size = size if 0 < size < 1e4 else 1.0
            return (torch.randn(own.shape, generator=self._generator) * size).to(own)

    def _run(self, given: dict[int, Tensor], first: int, stays: Tensor | None = None) -> Any:
        """The results and the gradients of rows, with the rows as the first dim."""
        count = len(next(iter(given.values())))
        whole = (2, 3) if count == _ROWS and self._dims > 1 else (count,)
        sizes = (1,) * (self._dims - len(whole)) + whole
        leaves: dict[int, Tensor] = {}
        for key, one in given.items():
            leaf = one.detach().reshape(*sizes, *one.shape[1:])
            leaves[key] = leaf.requires_grad_() if leaf.is_floating_point() else leaf
        arguments = self._rows.call_with(lambda leaf: leaves[id(leaf)].clone())
        before = ArgumentState(arguments)
        torch.manual_seed(_SEED)
        with self._watch:
            results = pytree.tree_leaves(self._fn(*arguments[0], **arguments[1]))
            if what := before.written(ArgumentState(arguments)):
                raise _NoRows(f"it writes to its arguments ({what})")
            outputs = [leaf for leaf in results if isinstance(leaf, Tensor)]
            if others := [leaf for leaf in results if not isinstance(leaf, (Tensor, *PLAIN))]:
                raise _NoRows(f"it returns an object of {type(others[0]).__name__}")
            for output in outputs:
                if tuple(output.shape[: self._dims]) != sizes:
                    raise _NoRows(
                        f"for rows of {list(sizes)} it returns a tensor of {list(output.shape)}"
                    )
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        made = [(n, out) for n, out in enumerate(outputs) if out.requires_grad]
        gradients: tuple[Tensor | None, ...] = ()
        if made and wanted:
            weights = [self._weight(n, out, first, count, stays) for n, out in made]
            with self._watch:
                gradients = torch.autograd.grad(
                    [out for _, out in made], wanted, weights, allow_unused=True
                )
        rows = [("what it returns", t) for t in outputs]
        rows += [("the gradient", t) for t in gradients if t is not None]
        return [(what, t.detach().reshape(count, -1)) for what, t in rows]

    def _weight(
        self, number: int, output: Tensor, first: int, count: int, stays: Tensor | None
    ) -> Tensor:
        """The gradient of an output; other ones for rows that do not stay."""
        rest = output.shape[self._dims :]
        if number not in self._weights:
            one, other = (torch.randn(_ROWS, *rest, generator=self._generator) for _ in range(2))
            self._weights[number] = one, other
        one, other = self._weights[number]
        if stays is not None:
            one = torch.where(_as_column(stays, one), one, other)
        return one[first : first + count].reshape(output.shape).to(output)


class _Watch(UncompiledMode):
    """Runs random operators as constants, and notes those that go over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.over_rows = ""
        self.draws_unseen = False
        """Whether an operator drew random numbers that this cannot replace."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _OVER_ROWS or (name in _ALONG_A_DIM and _goes_over_rows(func, args, kwargs)):
            self.over_rows = str(func.overloadpacket)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name.startswith("_scaled_dot_product"):
            self.draws_unseen |= bool(by_name(func, args, kwargs).get("dropout_p"))
            return func(*args, **kwargs)
        if func.namespace != "aten":
            self.draws_unseen = True
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        return result.fill_(1) if isinstance(result, Tensor) else result


def _goes_over_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that goes along a dim goes along another one than the last."""
    dim, dims = by_name(func, args, kwargs).get("dim", -1), args[0].dim()
    return bool(dims < 2 or dim % dims != dims - 1)


def _as_column(flags: Tensor, like: Tensor) -> Tensor:
    return flags.to(like.device).reshape(-1, *(1,) * (like.dim() - 1))


def _difference(whole: Any, other: Any, at: slice, at_other: slice, strictness: float = 1.0) -> str:
    """Name what differs in these rows; empty if nothing does."""
    if [what for what, _ in whole] != [what for what, _ in other]:
        return "the gradient"
    for (what, one), (_, two) in zip(whole, other, strict=True):
        one, two = one[at], two[at_other]
        if not one.is_floating_point():
            if not torch.equal(one, two):
                return str(what)
            continue
        close = _CLOSE.get(one.dtype, 1e-4) * strictness
        limit = close * float(one.double().abs().nan_to_num().max()) if one.numel() else 0.0
        if not torch.allclose(one.double(), two.double(), rtol=0, atol=limit, equal_nan=True):
            return str(what)
    return ""


def _marks(modules: list[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield names and what tells that an attribute of a module was exchanged or written."""
    for module in modules:
        for path, part in module.named_modules():
            at = f"{path}." if path else ""
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                yield f"{at}{name}", (id(tensor), None if tensor is None else version_of(tensor))
            for name, value in vars(part).items():
                if not name.startswith("_"):
                    yield f"{at}{name}", _mark(value)


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, dict, set, tuple)):
        return id(value), len(value)
    return id(value)
