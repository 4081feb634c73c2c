"""One training step under a ledger: forward, loss, backward, optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memopt._compat import add_note
from memopt.memory.backwards import around_backward, no_backward
from memopt.memory.batches import call, loss_in, parts, rows_of
from memopt.memory.histories import Histories, is_used_up, without_history
from memopt.memory.leaves import all_tensors, as_dict
from memopt.memory.ledger import Ledger
from memopt.memory.lists import check_cut
from memopt.memory.objects import kept_holders
from memopt.memory.optimizers import (
    ALIKE,
    States,
    like,
    outlined,
    tables_of,
    trained_beside,
)
from memopt.memory.pieces import FUNCTIONALITY, GRADIENTS, STATES, WEIGHTS
from memopt.memory.saved import held_by
from memopt.memory.storages import storage_keys
from memopt.memory.tensors import unseen

T = TypeVar("T")

LossLike = Callable[[Any], Tensor] | None

StepFunction = Callable[[nn.Module, Any], object] | None
"""Runs forward and backward of a model and a batch itself, as often and in the order it likes."""


def _nothing(*_: object) -> None: ...


@dataclass
class Step:
    """A training step, as objects that may be copied together."""

    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | None
    loss: LossLike = None
    autocast: torch.dtype | None = None
    micro_batches: int = 1
    set_to_none: bool = True
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around the step: regions are recomputed in backward."""
    function: StepFunction = None
    """A function that runs forward and backward in place of the model's call, loss and backward."""
    watching: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around each call of `function`."""
    beside: Sequence[tuple[str, nn.Parameter]] = field(init=False)
    """Parameters that it trains and the model does not have, see `trained_beside`."""
    who: str = field(kw_only=True)
    """The function that the user called, for messages."""

    def __post_init__(self) -> None:
        self.beside = trained_beside(self.model, self.loss, self.optimizer)

    @property
    def trained(self) -> list[tuple[str, Tensor]]:
        """The model's parameters and those beside it, with names."""
        return [*self.model.named_parameters(), *self.beside]

    def with_copies(self, copy: Callable[[Any, dict[int, Any]], Any]) -> Step:
        """Return the same step of what `copy(objects, memo)` copies: model, optimizer, batch, and a
        loss that is a module. Functions are not copied, so that parameters which they may close
        over stay what they are, as `memo` says.
        """
        loss = self.loss if isinstance(self.loss, nn.Module) else None
        held = set() if loss is None else {id(p) for p in loss.parameters()}
        memo = {id(p): p for _, p in self.beside if id(p) not in held and p.device.type == "cpu"}
        model, optimizer, batch, new = copy((self.model, self.optimizer, self.batch, loss), memo)
        return replace(
            self,
            model=model,
            optimizer=optimizer,
            batch=batch,
            loss=self.loss if new is None else new,
        )

    @property
    def roots(self) -> tuple[object, ...]:
        """All that it uses, for `unchanged`."""
        return self.model, self.batch, self.loss, self.optimizer, self.function

    def alone(self) -> Step:
        """Return its forward and backward, without the optimizer, which leave no gradients."""
        return replace(self, optimizer=None, set_to_none=True)

    def settle(self) -> None:
        """Run it where forward exchanges tensors that modules hold as attributes: they are then
        what the step before left.
        """
        if next(tensor_attributes(self.model), None) is not None:
            put_back = self.with_new_inputs()
            self.run()
            put_back()

    def run(self, ledger: Ledger | None = None) -> None:
        """The step, told to the ledger."""
        with self.context():
            self._run(ledger)

    def _run(self, ledger: Ledger | None) -> None:
        for batch in self.batches():
            if ledger is None:
                self.forward_and_backward(batch)
                continue
            ledger.phase = "forward"
            self.forward_and_backward(
                batch, partial(self._turn, ledger), partial(self._end_of_backward, ledger)
            )
        if self.optimizer is None:
            self._zero_gradients()
            return
        if ledger is None:
            self._step(self.optimizer)
        else:
            ledger.phase = "optimizer"
            with_gradients = frozenset(n for n, p in self.trained if p.grad is not None)
            ledger.alike(with_gradients, partial(self._step, self.optimizer))
            ledger.assign(STATES, self._states())
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def _zero_gradients(self) -> None:
        self.model.zero_grad(set_to_none=self.set_to_none)
        if isinstance(self.loss, nn.Module):
            self.loss.zero_grad(set_to_none=self.set_to_none)

    def _turn(self, ledger: Ledger, loss: Tensor) -> None:
        ledger.end_of_forward(loss)
        ledger.phase = "backward"

    def _end_of_backward(self, ledger: Ledger) -> None:
        ledger.assign(GRADIENTS, self._gradients())
        if self.function is not None:
            ledger.phase = "forward"  # another one may follow

    def forward_and_backward(
        self,
        batch: Any,
        at_turn: Callable[[Tensor], object] = _nothing,
        at_end: Callable[[], object] = _nothing,
    ) -> None:
        """Run them for a micro-batch.

        Args:
            at_turn: called before each backward, with the tensor that it begins at.
            at_end: called behind each backward.

        Raises:
            ValueError: the step's function ran no backward.
        """
        if self.function is None:
            loss = self.forward(batch)
            at_turn(loss)
            loss.backward()
            del loss
            at_end()
            self._cut_state()
            return
        backwards: list[None] = []

        def turn(loss: Tensor) -> None:
            backwards.append(None)
            at_turn(loss)

        with (
            self.watching(),
            around_backward(turn, at_end),
            torch.enable_grad(),
            self._autocast(),
        ):
            self.function(self.model, batch)
        if not backwards:
            raise ValueError(
                f"{self.who}: step must run backward, got a function that ran none "
                f"({function_name(self.function)})"
            )
        self._cut_state()

    def _cut_state(self) -> None:
        """Take the history from what modules keep of a step, such as the hidden states of a
        recurrent network: where backward freed it, a training does so before the next step.
        """
        held = (*self.model.buffers(), *(tensor for _, tensor in tensor_attributes(self.model)))
        with unseen():
            for tensor in filter(is_used_up, held):
                without_history(tensor)

    def with_new_inputs(self) -> Callable[[], None]:
        """Return a function that puts back the gradients which inputs have now and what the batch's
        containers and objects hold, and takes away what a step has written into their histories:
        each step of a training has a batch of its own.
        """
        holders = kept_holders(self.batch)
        inputs = all_tensors(self.batch)
        gradients = [(leaf, leaf.grad) for leaf in inputs if leaf.is_leaf]
        histories = Histories(inputs)

        def put_back() -> None:
            for restore in holders:
                restore()
            for leaf, gradient in gradients:
                leaf.grad = gradient
            with unseen():
                histories.put_back()
                histories.cut()

        return put_back

    def batches(self) -> list[Any]:
        """The micro-batches."""
        if self.micro_batches == 1:
            return [as_dict(self.batch)]
        check_cut(self.who, self.batch)
        rows = rows_of(self.who, self.batch)
        if not 1 <= self.micro_batches <= rows:
            raise ValueError(
                f"{self.who}: micro_batches must be from 1 to the batch's {rows} rows, got "
                f"{self.micro_batches}"
            )
        return parts(self.who, self.batch, -(-rows // self.micro_batches))

    def forward(self, batch: Any, model: Callable[..., Any] | None = None) -> Tensor:
        """The loss of one of them, with its share of the whole. `model`: in place of its own."""
        with torch.enable_grad(), self._autocast():
            output = call(self.model if model is None else model, batch)
            loss = loss_in(self.who, output if self.loss is None else self.loss(output))
            return loss / self.micro_batches if self.micro_batches > 1 else loss

    def output(self, batch: Any, backward: bool = False) -> Any:
        """The model's output for one batch; of a function its result, without its backward unless
        that is asked for.
        """
        with self._autocast():
            if self.function is None:
                return call(self.model, batch)
            with nullcontext() if backward else no_backward():
                return self.function(self.model, batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(device, dtype=self.autocast)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            optimizer.step()
        except Exception as error:  # sparse gradients, for most of them
            kind = type(optimizer).__name__
            add_note(error, f"{self.who}: the step of {kind} raised this; optimizer= takes others")
            raise

    def prime(self, states: States) -> None:
        """Have the optimizer's states as they are after a step: see `states`."""
        if self.optimizer is None:
            return
        named = {name: p for name, p in self.trained if name in states}
        if type(self.optimizer) in ALIKE:
            for name, parameter in named.items():
                if parameter not in self.optimizer.state:
                    self.optimizer.state[parameter] = like(states[name])
            return
        for parameter in named.values():
            parameter.grad = torch.empty_like(parameter)
        self._step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def states(self, known: States) -> States:
        """The optimizer's state for each parameter that has one, by name, but for those that are
        known; without memory for its tensors.
        """
        if self.optimizer is None:
            return {}
        found = self.optimizer.state
        alone = type(self.optimizer) in ALIKE
        return {
            name: outlined(found[p]) if alone else {}
            for name, p in self.trained
            if p in found and name not in known
        }

    def adopt(self, ledger: Ledger) -> None:
        """Enter memory that is allocated before the step."""
        ledger.adopt(WEIGHTS, self.trained)
        ledger.adopt(FUNCTIONALITY, self.model.named_buffers())
        if isinstance(self.loss, nn.Module):
            ledger.adopt(WEIGHTS, self.loss.named_parameters("loss"))  # the frozen ones too
            ledger.adopt(FUNCTIONALITY, self.loss.named_buffers("loss"))
        ledger.adopt(FUNCTIONALITY, [("inputs", self.batch)])
        ledger.adopt(FUNCTIONALITY, tensor_attributes(self.model))
        ledger.adopt(STATES, self._states())
        ledger.adopt(GRADIENTS, self._gradients())

    def _gradients(self) -> Iterator[tuple[str, object]]:
        yield from ((name, p.grad) for name, p in self.trained)

    def _states(self) -> Iterator[tuple[str, object]]:
        if self.optimizer is None:
            return
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.trained}
        for parameter, state in self.optimizer.state.items():
            yield names.get(parameter, ""), list(dict(state).values())
        yield "", tables_of(self.optimizer)


def function_name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def traced(step: Step, ledger: Ledger, prime: States | None = None) -> tuple[float, float]:
    """Traces the second of two steps: in the first the optimizer makes its state.

    Args:
        prime: the states after the first step. With them there is none.

    Returns the seconds of both.
    """
    seconds = []
    put_back = step.with_new_inputs()
    step.adopt(ledger)
    with ledger:
        if prime is not None:
            ledger.phase = "optimizer"
            step.prime(prime)
            ledger.assign(STATES, step._states())
            seconds.append(0.0)
        for _ in range(1 if seconds else 2):
            put_back()
            ledger.restart()
            start = time.perf_counter()
            step.run(ledger)
            seconds.append(time.perf_counter() - start)
    ledger.close()
    return seconds[0], seconds[1]


def with_its_tensors(model: nn.Module, run: Callable[[], T]) -> T:
    """Return what `run` finds; where it exchanged buffers of the model, or the memory of parameters
    (`p.data = ...`, as momentum encoders do), what a second run finds: in the first those that were
    there before, which are held to be put back, count as well.
    """
    buffers = [*map(id, model.buffers())]
    weights = [(p, storage_keys(p)) for p in model.parameters()]
    found = run()
    is_same = buffers == [*map(id, model.buffers())]
    return found if is_same and all(keys == storage_keys(p) for p, keys in weights) else run()


def tensor_attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in plain attributes of modules, which are neither parameters nor buffers, each
    with a name below its module's path.
    """
    for path, module in model.named_modules():
        for tensor in held_by(module):
            yield f"{path}.attribute" if path else "attribute", tensor
