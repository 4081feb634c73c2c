"""Scratch of Fourier transforms and of matrix exponentials on the CPU.

MKL transforms one batch of contiguous signals. The dimensions that are not transformed become that
batch, in the order of their strides; where no view is such a batch, the input is copied. A real
result of several dimensions is made in two transforms, complex ones first.

Source: PyTorch's `_exec_fft` (ATen/native/mkl/SpectralOps.cpp), `mexp_impl` (LinearAlgebra.cpp).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt.memory.scratch.contractions import product
from memopt.memory.scratch.size import Scratch, elements_of


class _Layout(NamedTuple):
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def order(self, dims: Sequence[int]) -> list[int]:
        """The dimensions that are not transformed by their strides, and behind them those that are.

        Args:
            dims: those that are transformed.
        """
        others = [dim for dim in range(len(self.sizes)) if dim not in dims]
        return [*sorted(others, key=lambda dim: -self.strides[dim]), *dims]

    def is_batch(self, dims: Sequence[int]) -> bool:
        """Whether a view has one dimension in place of all that are not transformed."""
        batch = self.order(dims)[: len(self.sizes) - len(dims)]
        steps = [(self.strides[dim], self.sizes[dim]) for dim in batch if self.sizes[dim] > 1]
        return all(
            outer == stride * size for (outer, _), (stride, size) in itertools.pairwise(steps)
        )

    def transformed(self, dims: Sequence[int]) -> _Layout:
        """The layout of a result of the same sizes."""
        strides, step = list(self.strides), 1
        for dim in reversed(self.order(dims)):
            strides[dim], step = step, step * self.sizes[dim]
        return _Layout(self.sizes, tuple(strides))


def fourier(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A copy of the input; of real ones always, where it is expanded."""
    source, dims = args[0], [dim % args[0].dim() for dim in args[1]]
    copied = _copy(source, _Layout(tuple(source.shape), source.stride()), dims)
    if not source.is_complex() and 0 in source.stride():
        copied = elements_of(source)
    return _of_mkl(copied)


def fourier_to_real(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """A copy of the input; of several dimensions what the complex transforms return, and copies of
    both, one after the other.
    """
    source, dims = args[0], [dim % args[0].dim() for dim in args[1]]
    layout = _Layout(tuple(source.shape), source.stride())
    if len(dims) == 1:
        return _of_mkl(_copy(source, layout, dims))
    first = sorted(dims[:-1], key=lambda dim: -layout.strides[dim])
    between = layout.transformed(first)
    result = results[0].numel() * results[0].element_size()
    into = _copy(source, layout, first) - result
    return _of_mkl(source.nbytes + max(into, _copy(source, between, dims[-1:])))


def matrix_exponential(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Powers of the matrices: ten for a batch, up to twelve for one matrix, by its norm."""
    source = given[0]
    matrices = math.prod(source.shape[:-2])
    powers = 12 * elements_of(source) + 64 * matrices
    return Scratch(0, powers + product((), (source, source), results).margin)


def _copy(source: Tensor, layout: _Layout, dims: Sequence[int]) -> int:
    return 0 if layout.is_batch(dims) else elements_of(source)


def _of_mkl(nbytes: int) -> Scratch:
    """Others (pocketfft) copy less."""
    return Scratch(nbytes) if torch.backends.mkl.is_available() else Scratch(0, nbytes)
