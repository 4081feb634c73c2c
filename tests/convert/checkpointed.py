"""One training step under transformers' gradient checkpointing: how often each layer ran, what was
held for backward, and the gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import memopt
from memopt.memory.allocator import LiveBytes
from tests.support.seed import seed
from tests.support.tiny_transformers import Tiny, loss_of

Step = Callable[[nn.Module], object]


@dataclass
class Run:
    """A training step."""

    forwards: Counter[str]
    """By the path of each layer that transformers can checkpoint: how often it ran, in forward and
    backward together. The leaf in it that is called first is counted.
    """

    held: int
    """Bytes that are allocated when forward has returned and backward begins; -1 if not counted.
    The inputs, and what the model kept from earlier calls, were there before and do not count.
    """

    gradients: dict[str, Tensor]


def train(family: Tiny, *steps: Step, count: bool = True) -> Run:
    """The first step of a new model, after these changes of it."""
    model = family.make()
    for step in steps:
        step(model)
    return of_family(family, model, count)


def of_family(family: Tiny, model: nn.Module, count: bool = True) -> Run:
    """A step of a model of this family; its inputs are made before the bytes are counted."""
    inputs = family.inputs()
    return run(model, lambda: loss_of(model(**inputs)), count)


def run(model: nn.Module, loss_of_model: Callable[[], Tensor], count: bool = True) -> Run:
    """count: whether to count bytes, which takes longer than a tiny model's step."""
    model.zero_grad(set_to_none=True)
    seed(2)
    live = LiveBytes()
    with counted_forwards(model) as forwards, live if count else nullcontext():
        loss = loss_of_model()
        live.mark()
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Run(forwards, live.marks[0].nbytes if count else -1, gradients)


@contextmanager
def counted_forwards(model: nn.Module) -> Iterator[Counter[str]]:
    """`Run.forwards` of all that runs inside, when it has ended."""
    calls: Counter[tuple[str, str]] = Counter()
    handles = [
        leaf.register_forward_pre_hook(
            lambda *_, path=path, name=name: calls.update([(path, name)])
        )
        for path, layer in layers(model).items()
        for name, leaf in layer.named_modules()
        if not leaf._modules
    ]
    forwards: Counter[str] = Counter()
    yield forwards
    for handle in handles:
        handle.remove()
    for (path, _), number in calls.items():
        forwards.setdefault(path, number)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return {n: m for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}


def checkpoint(model: nn.Module) -> None:
    model.activation_checkpointing_enable()  # type: ignore[operator]


def no_longer_checkpoint(model: nn.Module) -> None:
    model.activation_checkpointing_disable()  # type: ignore[operator]


def convert(model: nn.Module) -> None:
    assert memopt.convert(model).recipes


def convert_with_regions(model: nn.Module) -> None:
    assert memopt.convert(model, checkpoint=True).checkpointed


def same_bits(ours: Run, theirs: Run) -> bool:
    return ours.gradients.keys() == theirs.gradients.keys() and all(
        torch.equal(gradient, theirs.gradients[name]) for name, gradient in ours.gradients.items()
    )
