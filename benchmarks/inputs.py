"""What the benchmarks share: the tensors they work on, and the way through autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.harness import Variant

EPS = 1e-5


def random_matrix(rows: int, cols: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Standard normal values; the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, cols, generator=generator, device=device).to(dtype)


def random_tokens(tokens: int, length: int, words: int, device: str) -> Tensor:
    """Ids, (tokens / length, length); (1, tokens) if they are fewer."""
    generator = torch.Generator(device).manual_seed(1)
    length = min(length, tokens)
    shape = (tokens // length, length)
    return torch.randint(words, shape, generator=generator, device=device)


def affine_parameters(cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A weight around 1 and a bias around 0, as in a trained LayerNorm; both require grad."""
    noise = random_matrix(2, cols, torch.float32, device, seed=2) * 0.1
    weight, bias = (noise[0] + 1).to(dtype), noise[1].to(dtype)
    return weight.requires_grad_(), bias.requires_grad_()


def through_autograd(
    functions: Mapping[str, Callable[..., Tensor]],
    peers: Mapping[str, Callable[..., Tensor]],
    x: Tensor,
    parameters: Sequence[Tensor],
    grad: Tensor,
) -> list[Variant]:
    """Forward and backward of each `function(x, *parameters)`, as a training step runs them."""
    x = x.detach().requires_grad_()

    def variant(name: str, function: Callable[..., Tensor]) -> Variant:
        def forward() -> Tensor:
            return function(x, *parameters)

        def run() -> object:
            return torch.autograd.grad(forward(), (x, *parameters), grad)

        return Variant(name, run, forward, parameters, is_peer=name in peers)

    return [variant(name, function) for name, function in {**functions, **peers}.items()]


def linear_parameters(
    features: int, out: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """A Linear's weight, (out, features), and bias, of the size that keeps activations of size 1;
    both require grad.
    """
    weight = random_matrix(out, features, torch.float32, device, seed=3) / features**0.5
    bias = random_matrix(1, out, torch.float32, device, seed=4)[0]
    return weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()


def in_direction(
    direction: str,
    functions: Mapping[str, Callable[..., Tensor]],
    peers: Mapping[str, Callable[..., Tensor]],
    x: Tensor,
    parameters: Sequence[Tensor],
    grad: Tensor,
) -> list[Variant]:
    """Each `function(x, *parameters)`: without gradients, autograd's run of its graph, or both.

    For ops that have no private op for one direction alone.
    """
    if direction == "forward+backward":
        return through_autograd(functions, peers, x, parameters, grad)
    leaves = (x.detach().requires_grad_(), *parameters)

    def forward(function: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return function(*leaves)

        return run

    def backward(function: Callable[..., Tensor]) -> Callable[[], object]:
        output = function(*leaves)
        return lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True)

    make = forward if direction == "forward" else backward
    return [Variant(name, make(function)) for name, function in functions.items()]


def in_direction_of_graphs(
    direction: str,
    functions: Mapping[str, Callable[..., tuple[Tensor, ...]]],
    peers: Mapping[str, Callable[..., tuple[Tensor, ...]]],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Variant]:
    """Each `function(*inputs)`, of several outputs: forward with its graph, autograd's run of that
    graph, or both. `inputs` end with the parameters; a gradient for each output.
    """

    def variant(name: str, function: Callable[..., tuple[Tensor, ...]]) -> Variant:
        def forward() -> tuple[Tensor, ...]:
            return function(*inputs)

        is_peer = name in peers
        if direction == "forward":
            return Variant(name, forward, is_peer=is_peer)
        if direction == "backward":
            outputs = forward()
            return Variant(
                name,
                lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True),
                is_peer=is_peer,
            )
        return Variant(
            name,
            lambda: torch.autograd.grad(forward(), inputs, grads),
            forward,
            parameters,
            is_peer=is_peer,
        )

    return [variant(name, function) for name, function in {**functions, **peers}.items()]
