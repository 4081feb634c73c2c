"""Messages about a step that runs, or is predicted, for a measurement."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from memopt._compat import add_note


@contextmanager
def noted_errors(who: str, model: nn.Module) -> Iterator[None]:
    """Names the function that the user called beside an error of the model's own."""
    try:
        yield
    except Exception as error:
        kind = type(model).__name__
        add_note(error, f"{who}: {kind} raised this with the batch. It is as it was before.")
        raise


def note_on_mode(model: nn.Module) -> str:
    """A report's note on a model in evaluation mode, as transformers loads it; else empty."""
    if model.training:
        return ""
    return (
        "the model is in evaluation mode, and so are these bytes: a step of training takes more "
        "where dropout, batch norm or a head act in training alone; model.train() comes first"
    )


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Turns off logs and warnings of libraries about a step that does not count."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
