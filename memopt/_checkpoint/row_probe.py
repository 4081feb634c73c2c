"""The probe of rows.py: runs of one call on a few rows, which are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from memopt._checkpoint.chunks import CallRows, is_ordinary
from memopt._checkpoint.known_rows import PLAIN
from memopt._checkpoint.state import ArgumentState
from memopt.memory.arguments import by_name
from memopt.memory.uncompiled_mode import UncompiledMode

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
# Those that end a process on a GPU where a value is no number, or make an index of it.
_NEED_NUMBERS = {
    *("bernoulli", "binomial", "poisson", "_assert_async"),
    *("binary_cross_entropy", "binary_cross_entropy_backward"),
}


def sample_sizes(rows: CallRows) -> tuple[int, ...]:
    """The sizes of the probe's rows, as many as those of a call."""
    dims = len(rows.row_sizes)
    return (*(1,) * (dims - 2), 2, 3) if dims > 1 else (_ROWS,) * dims


class NoRows(Exception):
    """A result is not of the rows."""


class RowProbe:
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
            key: self._random(one) + one if _is_number(one) else one.roll(1, 0)
            for key, one in self._sample.items()
        }
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def reason(self) -> str:
        whole = self._run(self._sample, 0)
        if self._watch.over_rows:
            return f"it sorts, counts or sums rows ({self._watch.over_rows})"
        for row in range(_ROWS):
            stays = torch.arange(_ROWS, device="cpu") == row
            results = self._run(_mixed(stays, self._sample, self._other), 0, stays)
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
        return self._reached(whole)

    def _reached(self, whole: Any) -> str:
        """Name what other rows reach, however small their weight is now: a residual branch begins
        with weights of zero or a millionth, where no value shows what it does after some steps.
        What is no number stays none, whatever it is multiplied by.
        """
        if self._watch.needs_numbers:
            return ""
        lost = {
            key: torch.full_like(one, torch.nan) if _is_number(one) else one
            for key, one in self._sample.items()
        }
        for row in range(_ROWS):
            stays = torch.arange(_ROWS, device="cpu") == row
            try:
                with torch.autograd.set_detect_anomaly(False):
                    results = self._run(_mixed(stays, self._sample, lost), 0, stays, lost=True)
            except Exception:  # it looks at values; with numbers it did not complain
                return ""
            at = slice(row, row + 1)
            if what := _difference(whole, results, at, at, _SAME_SHAPE):
                return f"{what} of one row can depend on other rows, once weights are other ones"
        return ""

    def _rows_like(self, leaf: Tensor) -> Tensor:
        """Rows as those of an argument: of its size where it has floats, else some of its own."""
        places = torch.linspace(0, self._rows.count - 1, _ROWS, device=leaf.device).long()
        with torch.no_grad():
            own = leaf[tuple(torch.unravel_index(places, self._rows.row_sizes))].detach()
            if not _is_number(own):
                return own.clone()
            one = own if own.is_complex() else own.double()
            size = float(one.abs().square().mean().sqrt())
            size = size if 0 < size < 1e4 else 1.0
            return self._random(own, size)

    def _random(self, like: Tensor, size: float = 1.0) -> Tensor:
        dtype = torch.complex64 if like.is_complex() else torch.float32
        made = torch.randn(like.shape, dtype=dtype, generator=self._generator, device="cpu")
        return (made * size).to(like)

    def _run(
        self,
        given: dict[int, Tensor],
        first: int,
        stays: Tensor | None = None,
        lost: bool = False,
    ) -> Any:
        """The results and the gradients of rows, with the rows as the first dim."""
        count = len(next(iter(given.values())))
        sizes = sample_sizes(self._rows) if count == _ROWS else self._rows.sizes_of(count)
        leaves: dict[int, Tensor] = {}
        for key, one in given.items():
            leaf = one.detach().reshape(*sizes, *one.shape[1:])
            leaves[key] = leaf.requires_grad_() if _is_number(leaf) else leaf
        arguments = self._rows.call_with(lambda leaf: leaves[id(leaf)].clone())
        before = ArgumentState(arguments)
        torch.manual_seed(_SEED)
        with self._watch:
            results = pytree.tree_leaves(self._fn(*arguments[0], **arguments[1]))
            if what := before.written(ArgumentState(arguments)):
                raise NoRows(f"it writes to its arguments ({what})")
            outputs = [leaf for leaf in results if isinstance(leaf, Tensor)]
            if others := [leaf for leaf in results if not isinstance(leaf, (Tensor, *PLAIN))]:
                raise NoRows(f"it returns an object of {type(others[0]).__name__}")
            for output in outputs:
                if not is_ordinary(output):
                    raise NoRows(f"it returns a tensor of {type(output).__name__}")
                if tuple(output.shape[: self._dims]) != sizes:
                    raise NoRows(
                        f"for rows of {list(sizes)} it returns a tensor of {list(output.shape)}"
                    )
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        made = [(n, out) for n, out in enumerate(outputs) if out.requires_grad]
        gradients: tuple[Tensor | None, ...] = ()
        if made and wanted:
            weights = [self._weight(n, out, first, count, stays, lost) for n, out in made]
            with self._watch:
                gradients = torch.autograd.grad(
                    [out for _, out in made], wanted, weights, allow_unused=True
                )
        rows = [("what it returns", t) for t in outputs]
        rows += [("the gradient", t) for t in gradients if t is not None]
        return [(what, t.detach().reshape(count, -1)) for what, t in rows]

    def _weight(
        self, number: int, output: Tensor, first: int, count: int, stays: Tensor | None, lost: bool
    ) -> Tensor:
        """The gradient of an output; other ones, or none, for rows that do not stay."""
        rest = output.shape[self._dims :]
        if number not in self._weights:
            one, other = (
                torch.randn(_ROWS, *rest, generator=self._generator, device="cpu") for _ in range(2)
            )
            self._weights[number] = one, other
        one, other = self._weights[number]
        if stays is not None:
            other = torch.full_like(other, torch.nan) if lost else other
            one = torch.where(_as_column(stays, one), one, other)
        return one[first : first + count].reshape(output.shape).to(output)


class _Watch(UncompiledMode):
    """Runs random operators as constants, and notes those that go over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.over_rows = ""
        self.draws_unseen = False
        """Whether an operator drew random numbers that this cannot replace."""
        self.needs_numbers = False
        """Whether an operator must not see what is no number."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _OVER_ROWS or (name in _ALONG_A_DIM and _goes_over_rows(func, args, kwargs)):
            self.over_rows = str(func.overloadpacket)
        self.needs_numbers |= _needs_numbers(func, args, kwargs)
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


def _needs_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = func.overloadpacket.__name__.rstrip("_")
    if name == "bernoulli" and not any(isinstance(arg, Tensor) for arg in args[1:]):
        return bool(func._overloadname == "default")  # the tensor is the probability
    if name == "_to_copy":
        return args[0].is_floating_point() and _is_whole(kwargs.get("dtype") or args[0].dtype)
    if name == "copy":
        return args[1].is_floating_point() and _is_whole(args[0].dtype)
    return name in _NEED_NUMBERS


def _is_number(tensor: Tensor) -> bool:
    """Whether a tensor has a gradient, as real and complex numbers have."""
    return tensor.is_floating_point() or tensor.is_complex()


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _mixed(
    stays: Tensor, sample: dict[int, Tensor], others: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Rows of a sample where they stay, and others."""
    return {
        key: torch.where(_as_column(stays, one), one, others[key]) for key, one in sample.items()
    }


def _as_column(flags: Tensor, like: Tensor) -> Tensor:
    return flags.to(like.device).reshape(-1, *(1,) * (like.dim() - 1))


def _difference(whole: Any, other: Any, at: slice, at_other: slice, strictness: float = 1.0) -> str:
    """Name what differs in these rows; empty if nothing does."""
    if [what for what, _ in whole] != [what for what, _ in other]:
        return "the gradient"
    for (what, one), (_, two) in zip(whole, other, strict=True):
        one, two = one[at], two[at_other]
        if one.is_complex():
            one, two = (
                torch.view_as_real(one.resolve_conj()),
                torch.view_as_real(two.resolve_conj()),
            )
        if not one.is_floating_point():
            if not torch.equal(one, two):
                return str(what)
            continue
        close = _CLOSE.get(one.dtype, 1e-4) * strictness
        limit = close * float(one.double().abs().nan_to_num().max()) if one.numel() else 0.0
        if not torch.allclose(one.double(), two.double(), rtol=0, atol=limit, equal_nan=True):
            return str(what)
    return ""
