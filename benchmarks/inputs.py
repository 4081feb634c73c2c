"""The tensors that the benchmarks work on."""

from __future__ import annotations

import torch
from torch import Tensor

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


def linear_parameters(
    features: int, out: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """A Linear's weight, (out, features), and bias, of the size that keeps activations of size 1;
    both require grad.
    """
    weight = random_matrix(out, features, torch.float32, device, seed=3) / features**0.5
    bias = random_matrix(1, out, torch.float32, device, seed=4)[0]
    return weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()
