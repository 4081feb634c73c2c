"""What the tests must know of an op: how to call it, what it saves, what its exact results are.

A family of ops is a subclass and a module of this folder; a case is the op with its keyword choices
fixed. What most families have in common is here and may be overridden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import memopt
from tests.support.shapes import Dtypes, random_normal
from tests.support.tolerances import ROUNDINGS

from .call import Call, Results, as_tuple

# The tensors that forward keeps for backward beside its arguments (statistics, say), by name.
Saved = dict[str, Tensor]


@dataclass(frozen=True)
class OpCase:
    """One op with its keyword choices fixed."""

    family: str
    """memopt.functional.NAME, and the name in errors; the public op's too, but for the functions
    that are another op with an argument fixed (public_op).
    """

    private: ClassVar[str]
    """The ops that it is made of: torch.ops.memopt._NAME_forward and _NAME_backward."""

    outputs: ClassVar[tuple[str, ...]] = ("output",)
    """The outputs of the public op, in order."""

    parameters: ClassVar[tuple[str, ...]] = ()
    """Which of its tensors are weights (see Call)."""

    constants: ClassVar[tuple[str, ...]] = ()
    """Which of its tensors have no gradient."""

    kept: ClassVar[tuple[str, ...]] = ("input",)
    """The activations that are saved for backward, themselves and not a copy."""

    kept_outputs: ClassVar[tuple[str, ...]] = ()
    """The outputs that are saved for backward, themselves: they must not change in place."""

    saved: ClassVar[tuple[str, ...]] = ()
    """What the forward op returns beside its outputs, for the backward op."""

    forward_results: ClassVar[tuple[str, ...]] = ("output",)
    """All that the forward op returns, in order: None what is neither an output nor saved here."""

    gradients: ClassVar[tuple[str, ...]] = ("input",)
    """The tensors whose gradients the backward op returns."""

    masked: ClassVar[tuple[str, ...]] = ()
    """The tensors that the backward op's output_mask stands for; () where it has none."""

    reemitted: ClassVar[tuple[str, ...]] = ("output",)
    """The outputs that the backward op returns after its gradients if recompute_output says so."""

    elementwise: ClassVar[bool] = False
    """Whether an element of each result depends on the elements at the same place alone."""

    rows_are_independent: ClassVar[bool] = True
    """Whether a row's bits are those of the row alone. (A GEMM's may depend on the others.)"""

    random: ClassVar[bool] = False
    """Whether it draws random numbers. A call through `memopt` is then seeded first."""

    linear: ClassVar[bool] = False
    """Whether it is a linear function of its only tensor: the backward op is given the gradient
    alone and has derivatives of its own.
    """

    def __str__(self) -> str:
        return self.family

    def seed(self) -> None:
        """Puts the default generator where each call of a random op finds it."""

    # How calls are made.

    def make_call(
        self,
        size: tuple[int, ...],
        dtypes: Dtypes,
        device: torch.device,
        *,
        normalized_dims: int = 1,
        values: Tensor | None = None,
        weight: bool = True,
        bias: bool = True,
        **choices: Any,
    ) -> Call:
        """A call whose output has `size`, or whose input has; by default of one tensor, `input`.

        Everything is standard normal unless `values`, of `size`, says otherwise for the first
        tensor. An op that normalises nothing, or has no weight or bias to leave out, ignores these
        arguments.
        """
        x = random_normal(*size, seed=1) if values is None else values.reshape(size)
        return Call(
            tensors={"input": x.to(device, dtypes.tensor)},
            grads={"output": random_normal(*size, seed=4).to(device, dtypes.tensor)},
            options=self.call_options(device),
        )

    def call_options(self, device: torch.device) -> dict[str, Any]:
        """The options of a call of one tensor."""
        return {}

    def random_choices(self, draw: Any, size: tuple[int, ...]) -> dict[str, Any]:
        """Keyword arguments of make_call for a random call; `draw` is hypothesis's."""
        return {}

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments of the public function."""
        return tuple(call.tensors.values()), dict(call.options)

    def public_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments of the public op."""
        return self.arguments(call)

    def forward_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments of the forward op."""
        return self.public_arguments(call)

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments of the backward op; for all gradients by default."""
        raise NotImplementedError

    # What the results must be.

    def torch(self, call: Call) -> Tensor | tuple[Tensor, ...]:
        """The same mathematics by PyTorch's own ops."""
        raise NotImplementedError

    def exact(self, call: Call) -> Tensor | tuple[Tensor, ...]:
        """The same for float64 tensors, exact to float32 whatever the values; differentiable."""
        return self.torch(call)

    def magnitudes(self, call: Call) -> Results:
        """The first-order error of each result of a float64 call, elementwise, in roundings of the
        type of the sums (oracle.py).
        """
        raise NotImplementedError

    def roundings(self, result: str) -> float:
        """How many of these roundings the result may be off."""
        if result in self.outputs:
            return ROUNDINGS["output"]
        kind = "parameter" if result.removeprefix("grad_") in self.parameters else "input"
        return ROUNDINGS[f"grad_{kind}"]

    def result_dtypes(self, call: Call) -> dict[str, torch.dtype]:
        """The dtype that each result must have: that of what it belongs to."""
        dtypes = {name: call.first.dtype for name in self.outputs}
        return dtypes | {f"grad_{name}": t.dtype for name, t in call.differentiable.items()}

    def statistics(self, call: Call) -> dict[str, tuple[Tensor, Tensor]]:
        """The exact statistics of each row among `saved`, each with the size of what is rounded in
        it.
        """
        return {}

    # What is saved for backward.

    def read_by_backward(self, call: Call) -> tuple[str, ...]:
        """The tensors that must not change in place between forward and backward."""
        return self.kept

    def statistics_bytes(self, call: Call) -> int:
        """What is saved beside the activations in `kept` and parameters."""
        return 0

    def saved_bytes(self, call: Call) -> int:
        """What is saved beside parameters."""
        kept = {getattr(call, name).untyped_storage() for name in self.kept}
        outputs = len(self.kept_outputs) * call.first.nbytes
        return sum(storage.nbytes() for storage in kept) + outputs + self.statistics_bytes(call)

    # The op, in its three forms.

    @property
    def public_op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.memopt, self.family).default

    @property
    def forward_op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.memopt, f"_{self.private}_forward").default

    @property
    def backward_op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.memopt, f"_{self.private}_backward").default

    @property
    def backward_results(self) -> tuple[str, ...]:
        """All that the backward op returns, in order: None what is not among this op's results."""
        return (*(f"grad_{name}" for name in self.gradients), *self.reemitted)

    def memopt(self, call: Call) -> Tensor | tuple[Tensor, ...]:
        """The op under test, through the public Python function. A compiler does not let a graph
        seed the generator: who calls the graph does it.
        """
        if self.random and not torch.compiler.is_compiling():
            self.seed()
        arguments, keywords = self.arguments(call)
        return getattr(memopt.functional, self.family)(*arguments, **keywords)

    def forward(self, call: Call) -> tuple[Results, Saved]:
        """The forward op, below autograd: its outputs and what it saves for the backward op."""
        self.seed()
        arguments, keywords = self.forward_arguments(call)
        results = as_tuple(self.forward_op(*arguments, **keywords))
        by_name = dict(zip(self.forward_results, results, strict=True))
        outputs = Results((name, by_name.pop(name)) for name in self.outputs)
        saved = {name: by_name.pop(name) for name in self.saved}
        assert all(rest is None for rest in by_name.values())
        return outputs, saved

    def backward(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> Results:
        """The backward op: the re-emitted outputs and the gradients."""
        arguments, keywords = self.backward_arguments(call, saved, output_mask, recompute_output)
        results = as_tuple(self.backward_op(*arguments, **keywords))
        by_name = dict(zip(self.backward_results, results, strict=True))
        names = (*self.reemitted, *(f"grad_{name}" for name in self.gradients))
        expected = Results((name, by_name.pop(name)) for name in names)
        assert all(rest is None for rest in by_name.values())
        return expected
