"""What tests of compiled models share: blocks, their step, and the bytes that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import fresh_cache

from benchmarks.compile import Block
from memopt.memory.allocator import LiveBytes


def blocks(number: int = 2, **settings: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**settings) for _ in range(number)))


def sample(rows: int = 2, tokens: int = 32, width: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, tokens, width, generator=generator)


class Bytes(NamedTuple):
    """What the allocator of the CPU says."""

    held: int
    """When forward has ended: the loss and what is saved for backward."""
    most: int
    """At any time of forward and backward."""


def step_bytes(forward: Callable[[], Tensor], model: nn.Module) -> Bytes:
    """Of a step after one that compiles. `forward` returns the loss."""
    for _ in range(2):
        forward().backward()
        model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        loss = forward()
        live.mark()
        loss.backward()
    model.zero_grad(set_to_none=True)
    return Bytes(live.marks[0].nbytes, live.most)


def gradients(forward: Callable[[], Tensor], model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    forward().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@contextmanager
def no_kernels() -> Iterator[None]:
    """Inductor generates the halves, but not the kernels that they call: when a tensor is allocated
    and freed does not depend on what is in it, and to compile kernels takes most of the time.
    """

    def load(*source: object, **settings: object) -> Callable[..., None]:
        return lambda *pointers: None

    with fresh_cache(), mock.patch.object(AsyncCompile, "cpp_pybinding", load):
        torch.compiler.reset()
        yield
    torch.compiler.reset()


def op_by_op(options: dict[str, Any]) -> Callable[..., Any]:
    """A backend: all that Inductor does with these options until it generates code. The halves then
    run op by op, in Inductor's decompositions.
    """

    def run(half: fx.GraphModule, inputs: Sequence[Tensor], **settings: Any) -> Any:
        return make_boxed_func(half.forward)

    def backend(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        return compile_fx(graph, inputs, inner_compile=run, config_patches=options)

    return backend
