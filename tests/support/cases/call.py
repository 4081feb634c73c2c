"""A call of any op: named tensors, plain options, the gradients that come back to its outputs; and
what it computes, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


class Results(dict[str, Tensor | None]):
    """What a call computes: its outputs by name and, as grad_NAME, the gradients of its tensors.

    None where a result was not asked for. results.grad_input is results["grad_input"].
    """

    def __getattr__(self, name: str) -> Tensor | None:
        if name in self:
            return self[name]
        raise AttributeError(f"no result {name}, only {', '.join(self)}")

    def updated(self, **changes: Tensor | None) -> Results:
        return Results({**self, **changes})


@dataclass(frozen=True)
class Call:
    """The arguments of one call. call.NAME finds a tensor, an option, or as grad_OUTPUT a gradient
    that comes in.
    """

    tensors: dict[str, Tensor | None]
    """What the op takes, in the order of its schema; None where an optional one is left out."""

    grads: dict[str, Tensor | None]
    """The gradient that comes back to each output, by the output's name and in the outputs' order;
    None: none comes.
    """

    options: dict[str, Any] = field(default_factory=dict)
    """Arguments that are no tensors."""

    parameters: tuple[str, ...] = ()
    """The tensors that are weights: alive anyway, and one for all rows. The others and the
    gradients are activations, and row i of each (dimension 0) belongs to row i of the others.
    """

    constants: tuple[str, ...] = ()
    """The tensors that have no gradient."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for place, key in (
                (self.tensors, name),
                (self.options, name),
                (self.grads, name.removeprefix("grad_")),
            ):
                if key in place:
                    return place[key]
        raise AttributeError(f"no tensor, option or gradient {name}")

    @property
    def given(self) -> dict[str, Tensor]:
        """The tensors that are not left out."""
        return {name: t for name, t in self.tensors.items() if t is not None}

    @property
    def activations(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.given.items() if name not in self.parameters}

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters that are not left out."""
        return {name: t for name, t in self.given.items() if name in self.parameters}

    @property
    def differentiable(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.given.items() if name not in self.constants}

    @property
    def incoming(self) -> dict[str, Tensor]:
        """The gradients that come in, as grad_OUTPUT."""
        return {f"grad_{name}": t for name, t in self.grads.items() if t is not None}

    @property
    def first(self) -> Tensor:
        """The first tensor, whose dtype, device and number of rows are the call's."""
        return next(iter(self.given.values()))

    def replace(self, **changes: Any) -> Call:
        """The same call with other tensors, options or gradients, by the names that call.NAME
        knows.
        """
        tensors, grads, options = dict(self.tensors), dict(self.grads), dict(self.options)
        for name, value in changes.items():
            output = name.removeprefix("grad_")
            if name in tensors:
                tensors[name] = value
            elif name in options:
                options[name] = value
            elif output != name and output in grads:
                grads[output] = value
            else:
                raise TypeError(f"no tensor, option or gradient {name}")
        return replace(self, tensors=tensors, grads=grads, options=options)

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The same call with `function` applied to each of its tensors and gradients."""
        everything = {**self.given, **self.incoming}
        return self.replace(**{name: function(t) for name, t in everything.items()})

    def map_activations(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The same for all but the parameters."""
        everything = {**self.activations, **self.incoming}
        return self.replace(**{name: function(t) for name, t in everything.items()})

    def leaves(self) -> Call:
        """The same call on fresh autograd leaves that share these tensors' memory and strides."""
        return self.replace(
            **{name: t.detach().requires_grad_() for name, t in self.differentiable.items()}
        )

    def __str__(self) -> str:
        tensors = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in self.given.items()]
        return ", ".join(tensors)


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def evaluate(function: Callable[[Call], Tensor | tuple[Tensor, ...]], call: Call) -> Results:
    """Outputs and gradients of `function` by autograd, `call.grads` coming in."""
    leaves = call.leaves()
    outputs = dict(zip(call.grads, as_tuple(function(leaves)), strict=True))
    wanted = leaves.differentiable
    gradients = torch.autograd.grad(
        [output for name, output in outputs.items() if call.grads[name] is not None],
        list(wanted.values()),
        list(call.incoming.values()),
        allow_unused=True,
    )
    results = Results({name: output.detach() for name, output in outputs.items()})
    for name in leaves.tensors:
        if name not in call.constants:
            results[f"grad_{name}"] = None
    for name, gradient in zip(wanted, gradients, strict=True):
        results[f"grad_{name}"] = gradient
    return results
