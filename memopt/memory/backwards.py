"""Backward passes of a function that runs its own: when each begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memopt._compat import is_in_backward

AtTurn = Callable[[Tensor], object]
"""Called with the first tensor that a backward begins at."""
AtEnd = Callable[[], object]


@contextmanager
def around_backward(at_turn: AtTurn, at_end: AtEnd) -> Iterator[None]:
    """Tell of each backward in this context. One whose own graph is wanted (create_graph, of a
    gradient penalty) counts as a part of forward: what it saves is for a backward to come.
    """

    def run(engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        create_graph = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
        if create_graph:
            return engine(outputs, *args, **kwargs)
        at_turn(outputs[0])
        try:
            return engine(outputs, *args, **kwargs)
        finally:
            at_end()

    with _in_place_of_the_engine(run):
        yield


@contextmanager
def weighted_backward(who: str, weight: float) -> Iterator[list[Tensor]]:
    """Have each backward that adds to gradients add `weight` times as much in this context. Yields
    a list of the losses that they began at, times the gradients that these were given.

    Raises:
        ValueError: one keeps its graph (create_graph): what is made of its gradients would not be
            `weight` times as much.
    """
    losses: list[Tensor] = []

    def run(engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if is_in_backward() or not kwargs.get("accumulate_grad", False):
            return engine(outputs, *args, **kwargs)
        starts, retain_graph, create_graph, *others = args
        if create_graph:
            raise ValueError(
                f"{who}: step must ask torch.autograd.grad for gradients that it differentiates, "
                "got backward(create_graph=True)"
            )
        losses.extend(
            (out.detach() * start).sum()
            for out, start in zip(outputs, starts, strict=True)
            if isinstance(out, Tensor) and start is not None
        )
        weighted = tuple(None if start is None else start * weight for start in starts)
        return engine(outputs, weighted, retain_graph, create_graph, *others, **kwargs)

    with _in_place_of_the_engine(run):
        yield losses


@contextmanager
def no_backward() -> Iterator[None]:
    """Backward does nothing in this context; gradients that are asked for are zeros."""

    def run(engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 else ()
        return tuple(torch.zeros_like(each) for each in inputs if isinstance(each, Tensor))

    with _in_place_of_the_engine(run):
        yield


@contextmanager
def _in_place_of_the_engine(run: Callable[..., Any]) -> Iterator[None]:
    """Tensor.backward, autograd.backward and autograd.grad all call this one function."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def instead(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return run(engine, outputs, *args, **kwargs)

    autograd._engine_run_backward = instead
    try:
        yield
    finally:
        autograd._engine_run_backward = engine
