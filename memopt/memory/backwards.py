"""Backward passes of a function that runs its own: when each begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from memopt._compat import is_in_backward
from memopt.memory.exchanged import exchanged
from memopt.memory.storages import graph_leaves

AtTurn = Callable[[Tensor], object]
"""Called with the first tensor that a backward begins at."""
AtEnd = Callable[[], object]


@contextmanager
def around_backward(at_turn: AtTurn, at_end: AtEnd) -> Iterator[None]:
    """Tell of each backward in this context. One whose own graph is wanted (create_graph, of a
    gradient penalty) counts as a part of forward: what it saves is for a backward to come. One that
    a backward runs (a reentrant checkpoint's) is a part of that.
    """

    def run(engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        create_graph = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
        if create_graph or is_in_backward():
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
    """Backward computes nothing in this context; gradients that are asked for are zeros, and so are
    those that leaves would get, where a step clips or looks at them. Without gradients there is no
    graph that tells of leaves.
    """

    def run(engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 else ()
        if kwargs.get("accumulate_grad", False):
            for leaf in inputs or _leaves_of(outputs):
                if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)
        return tuple(torch.zeros_like(each) for each in inputs if isinstance(each, Tensor))

    with _in_place_of_the_engine(run):
        yield


@contextmanager
def own_backward() -> Iterator[None]:
    """PyTorch's backward, of what runs beside a function in one of the contexts above."""
    engines: Any = torch.autograd.graph
    engine = engines._engine_run_backward  # the function itself; torch.autograd calls it by a name
    with _in_place_of_the_engine(lambda _, *args, **kwargs: engine(*args, **kwargs)):
        yield


def _leaves_of(outputs: Any) -> Iterator[Tensor]:
    """The leaves that get gradients by a backward from these tensors, or edges."""
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    edges = (
        get_gradient_edge(out) if isinstance(out, Tensor) else out
        for out in outputs
        if not isinstance(out, Tensor) or out.requires_grad
    )
    return graph_leaves(edge.node for edge in edges)


def _in_place_of_the_engine(run: Callable[..., Any]) -> AbstractContextManager[None]:
    """Tensor.backward, autograd.backward and autograd.grad all call this one function."""
    return exchanged(torch.autograd, "_engine_run_backward", run)
