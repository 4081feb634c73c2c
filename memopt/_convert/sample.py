"""convert's sample input: runs the model with it, to count what is saved for backward."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from memopt._checkpoint.naming import joined
from memopt._compat import add_note
from memopt._convert.recipes import TRANSFORM_INSIDE
from memopt._progress import doing
from memopt.memory.attribution import Attribution, attribute
from memopt.memory.batches import arguments_of
from memopt.memory.messages import note_on_mode
from memopt.memory.saved import HooksRefused, SavedBytes, check_can_measure, saved_bytes
from memopt.memory.sizes import as_text

NOT_COUNTED = (
    "bytes are not counted, since the model's code calls torch.func.grad, vjp, jacrev or hessian, "
    "around which PyTorch allows no saved tensor hooks; memopt.check(model, batch) counts them by "
    "the allocator"
)


def measure_sample(model: nn.Module, batch: Any, recipes: bool) -> SavedBytes | None:
    """Bytes that the model saves before it is converted; None where they cannot be counted.

    Raises:
        RuntimeError: so it is, and the model cannot have the hooks of `recipes` either.
    """
    check_can_measure("convert", model)
    args, kwargs = arguments_of(batch)
    _check_takes(model, batch, args, kwargs)
    doing("counting bytes kept, run")
    try:
        with _noted(model, "as it was"):
            return saved_bytes(model, *args, **kwargs)
    except HooksRefused as error:
        if recipes:
            raise RuntimeError(TRANSFORM_INSIDE) from error
        return None


def attribute_sample(model: nn.Module, batch: Any, regions: Iterable[str]) -> Attribution:
    """The storages that the converted model saves, and the regions that it calls."""
    args, kwargs = arguments_of(batch)
    doing("counting bytes kept, run")
    with _noted(model, "converted; as it was, it did not"):
        return attribute(model, args, kwargs, regions)


@contextmanager
def _noted(model: nn.Module, state: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        add_note(
            error,
            f"convert: {type(model).__name__} raised this when it ran with batch to count "
            f"bytes, {state}. It is as it was before convert.",
        )
        raise


def _check_takes(
    model: nn.Module, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises ValueError unless the model's forward has parameters for these arguments."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward that tells nothing
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            "convert: batch must be a tensor, a tuple or list of positional arguments, or a "
            f"mapping of keyword arguments that the model's forward takes, got "
            f"{type(batch).__name__} for {type(model).__name__}.forward{signature}: {error}"
        ) from None


def notes_on_sample(model: nn.Module, before: SavedBytes, after: SavedBytes) -> tuple[str, ...]:
    """Notes on the bytes that a batch has been counted with."""
    on_mode = tuple(filter(None, (note_on_mode(model),)))
    return (*_notes_on_bytes(before, after), *on_mode)


def _notes_on_bytes(before: SavedBytes, after: SavedBytes) -> tuple[str, ...]:
    if not before.storages:
        return (
            f"{'nothing' if not after.storages else 'nothing before'} was saved for backward with "
            "batch: no parameter or input requires a gradient, or the model's forward turns "
            "gradients off (torch.no_grad, torch.inference_mode)",
        )
    own = [sum(s.nbytes for s in saved.storages if s.is_input) for saved in (before, after)]
    if not any(own):
        return ()
    return (
        "these bytes count the sample's own tensors, which the caller holds anyway: "
        f"{as_text(own[0])} of those before, {as_text(own[1])} of those after",
    )


def note_on_calls(regions: Sequence[str], called: frozenset[str]) -> tuple[str, ...]:
    idle = [path for path in regions if path not in called]
    if not idle:
        return ()
    number = f"{len(idle)} of {len(regions)} regions"
    return (f"{number} save nothing here, since batch never calls them: {joined(idle)}",)
