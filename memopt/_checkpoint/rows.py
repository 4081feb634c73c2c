"""Whether a call works on each row alone: a probe, on a few rows like those of the call.

The call runs on a sample of six rows, forward and backward. It works on rows alone if

- what it returns for a row, and the gradient of the row, stay when all other rows are exchanged,
  be it for what is no number, which shows also behind weights of zero that are other ones later,
- both are what they are in a chunk of three rows, and of one: nothing depends on a row's place,
- it changes nothing that the next call would find (statistics, counters, tensors kept for later),
  nor its arguments: a chunk's lists and dicts are its own, and the caller would look into others,
- it draws no decisions across rows: it does not sort or count rows, nor sum over those before one.
  A capacity of experts, say, shows at no small sample,
- for as many rows as there are, and for those of a chunk, it runs the operators that it runs for
  six (row_operators.py): it may do something else from some number of rows on, or take another
  slice of a table.

Random numbers are replaced by constants for the comparison of chunks, since each chunk draws its
own. Everything is put back. A call is probed once (known_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memopt._checkpoint.caches import has_cache, may_have_caches
from memopt._checkpoint.chunks import CallRows, NotRows, uncached_casts
from memopt._checkpoint.flags import with_flag
from memopt._checkpoint.known_rows import KnownCall
from memopt._checkpoint.naming import region_name
from memopt._checkpoint.row_operators import other_operators
from memopt._checkpoint.row_probe import NoRows, RowProbe, sample_sizes
from memopt._checkpoint.state import version_of
from memopt._compat import dispatch_modes, is_fake, without_dispatch_modes
from memopt._extension import _C
from memopt.memory.backwards import own_backward
from memopt.memory.ledger import Ledger
from memopt.memory.saved import saved_unseen
from memopt.memory.unchanged import unchanged
from memopt.memory.writes import Writes

_OF_INFERENCE = "Inference tensors"
"""The beginning of PyTorch's messages about tensors that inference mode made."""


def check_rows(
    who: str,
    fn: Callable[..., Any],
    rows: CallRows,
    owner: nn.Module | None,
    chunks: int,
    keep_refusal: bool = False,
) -> bool:
    """Probe a call, unless it was probed before: with as few rows and as many.

    Nothing is known where tensors have no values, and while memopt measures.

    Args:
        keep_refusal: do not probe again what is refused, as where it runs whole each time.

    Returns:
        Whether it may run in chunks. It runs whole where it uses tensors, beside its arguments,
        that inference mode made: no probe can run backward.

    Raises:
        NotRows: it does not work on each row alone.
    """
    if (
        _C.flags().recomputing
        or any(map(_needs_to_see, dispatch_modes()))
        or any(isinstance(leaf, Tensor) and (leaf.is_meta or is_fake(leaf)) for leaf in rows.leaves)
    ):
        return True
    known = KnownCall(fn, rows, owner)
    sizes = rows.row_sizes, rows.sizes_of_chunk(chunks)
    if known.in_chunks is False and known.refused:
        raise _refusal(who, fn, owner, known.refused)
    if known.in_chunks is False or (known.in_chunks and known.covers(sizes)):
        return known.in_chunks
    why_not = why_not_rows if known.in_chunks is None else why_not_so_many_rows
    # Weights that the probe had cast would stay in autocast's cache to the end of the step.
    with torch.inference_mode(False), without_dispatch_modes(), uncached_casts():
        reason = why_not(fn, rows.with_plain_tensors(), known.modules, sizes)
    in_chunks = not reason
    if reason and _OF_INFERENCE not in reason:
        if keep_refusal and known.in_chunks is None:
            known.note(False, (*sizes, sample_sizes(rows)), reason)
        raise _refusal(who, fn, owner, reason)
    known.note(in_chunks, (*sizes, sample_sizes(rows)))
    return in_chunks


def _refusal(who: str, fn: Callable[..., Any], owner: nn.Module | None, why: str) -> NotRows:
    name = region_name(fn if owner is None else owner)
    return NotRows(who, "a call that works on each row alone", name, why)


def _needs_to_see(mode: TorchDispatchMode) -> bool:
    """Whether a mode gives tensors what they are, or is memopt's, of a step that is measured."""
    return isinstance(mode, (Ledger, Writes)) or mode.is_infra_mode()  # fake tensors, traces


def why_not_rows(
    fn: Callable[..., Any],
    rows: CallRows,
    modules: list[nn.Module],
    sizes: Iterable[tuple[int, ...]] | None = None,
) -> str:
    """Why a call does not work on each row alone; empty if it does.

    Args:
        fn: called with the arguments of `rows`.
        modules: those that it uses.
        sizes: of the rows that it is to run with; by default those that it has.
    """
    args, kwargs = rows.call_with(lambda leaf: leaf)
    if may_have_caches() and has_cache(args, kwargs):
        return "a cache of keys and values is among its arguments"
    with _trying(fn, rows, modules):
        before = dict(_marks(modules))
        probe = RowProbe(fn, rows)
        try:
            reason = probe.reason()
        except NoRows as error:
            return str(error)
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            return f"with other rows it raises {type(error).__name__} ({first_line})"
        after = dict(_marks(modules))
        changed = [name for name in before | after if before.get(name) != after.get(name)]
        if changed and not reason:
            return f"it changes {changed[0]}, which the next chunk would find"
        others = sizes or [rows.row_sizes]
        return reason or other_operators(fn, rows, sample_sizes(rows), others)


def why_not_so_many_rows(
    fn: Callable[..., Any],
    rows: CallRows,
    modules: list[nn.Module],
    sizes: Iterable[tuple[int, ...]],
) -> str:
    """`why_not_rows` of a call that was probed with other numbers of rows."""
    with _trying(fn, rows, modules):
        return other_operators(fn, rows, sample_sizes(rows), sizes)


@contextmanager
def _trying(fn: Callable[..., Any], rows: CallRows, modules: list[nn.Module]) -> Iterator[None]:
    """A scope in which a call may run on other rows: all that it changes is put back."""
    with ExitStack() as stack:
        stack.enter_context(unchanged(fn, modules, *rows.call_with(lambda leaf: leaf)))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(own_backward())
        stack.enter_context(with_flag("disabled"))
        stack.enter_context(saved_unseen())  # by a region around
        for module in modules:
            for part in module.modules():
                if isinstance(part, nn.modules.dropout._DropoutNd):
                    part.training = False
        yield


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
        return id(value), len([*iter(value)])  # some class refuses to say its length
    return id(value)
