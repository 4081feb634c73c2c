"""Scratch of decompositions, solvers, distances and products with vectors on the CPU.

LAPACK overwrites its input, so what it reads is copied. The workspace that it asks for beside that
is a few columns in blocks: at most 64, which is a bound. Only `syevd` wants matrices.

Source: ATen/native/BatchLinearAlgebra.cpp and BatchLinearAlgebraKernel.cpp, Distance.cpp,
Linear.cpp (`_trilinear`), Blas.cpp (`gemv`); LAPACK's documentation of `syevd` and `heevd`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.memory.scratch.contractions import is_for_blas, product
from memopt.memory.scratch.size import (
    NONE,
    TRANSPOSED,
    Scratch,
    ScratchRule,
    contiguous,
    elements_of,
)

_COLUMNS = 65
"""Blocks of columns in LAPACK's workspaces, and their factors."""


def _lapack(matrices: Callable[[int, int, int], int]) -> ScratchRule:
    """Elements of the shape [batch, rows, columns], and columns in blocks at the most."""

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        source = args[0]
        rows, columns = source.shape[-2:]
        batch = math.prod(source.shape[:-2])
        itemsize = source.element_size()
        around = _COLUMNS * max(rows, columns) + (TRANSPOSED if rows * columns > 3600 else 0)
        of_each = 16 * batch * (max(rows, columns) + 1) + 512  # pivots, signs and states
        return Scratch(matrices(batch, rows, columns) * itemsize, around * itemsize + of_each)

    return rule


def _eigenvectors(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The workspaces of `syevd` and `heevd`: two matrices, the second of complex ones real."""
    source = args[0]
    size, itemsize = source.shape[-1], source.element_size()
    if len(args) > 2 and not args[2]:
        return _COPIED(args, given, results)
    known = (1 + 6 * size + 2 * size * size) * itemsize
    if source.is_complex():
        known = (2 * size + size * size) * itemsize
        known += (1 + 5 * size + 2 * size * size) * itemsize // 2
    known += 4 * (3 + 5 * size) + 4 * math.prod(source.shape[:-2])
    return Scratch(known, _NOTHING(args, given, results).margin)


def _any_eigenvectors(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Real and complex forms of values and vectors; small ones take more than large ones."""
    scratch = _NOTHING(args, given, results)
    elements = 4 * args[0].numel() + (1 << 14)
    return Scratch(0, scratch.margin + elements * args[0].element_size())


def _orthogonal(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Both factors, where the triangle alone is taken out of them."""
    scratch = _NOTHING(args, given, results)
    whole = sum(map(elements_of, (args[0], *results))) if "r" in args[1:] else 0
    return Scratch(0, whole + scratch.margin)


def _with_others(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Copies of all that is read and returned."""
    whole = sum(map(elements_of, (*given, *results)))
    return Scratch(0, whole + _NOTHING(args, given, results).margin)


def _inverse_of_any(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Composed of a decomposition and products of its factors."""
    source = args[0]
    rows, columns = source.shape[-2:]
    square = math.prod(source.shape[:-2]) * min(rows, columns) ** 2
    whole = (3 if source.is_complex() else 2) * source.numel() + 2 * square
    return Scratch(0, whole * source.element_size() + _NOTHING(args, given, results).margin)


def _second_copied(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """A copy of the factor."""
    return Scratch(elements_of(args[1]), TRANSPOSED * args[1].element_size())


def _by_vector(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A copy of a matrix in strides that BLAS does not know; in 16 bits what a product takes."""
    matrix, vector = given[-2:]
    if matrix.element_size() == 2:
        margin = product((), (matrix, vector[:, None]), results).margin
        return Scratch(0, max(margin, elements_of(matrix)))
    return NONE if is_for_blas(matrix) else Scratch(elements_of(matrix))


def _added_product(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """A product's, and the buffer through which what it is added to is transposed."""
    scratch = product(args, given, results)
    turned = transposing(args, given, results)
    return scratch._replace(known=max(scratch.known, turned.known))


def _added_products(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """One product of a batch at a time."""
    one, other = given[-2:]
    scratch = product((), (one[0], other[0]), results)
    return Scratch(0, scratch.known + scratch.margin + TRANSPOSED * one.element_size())


def transposing(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """The buffer through which a matrix is copied that is transposed, and its copy is not."""
    source = given[1] if len(given) == 2 else given[0]  # copy_ reads the second, addmm the first
    is_turned = source.dim() == 2 and source.stride() == (1, source.shape[0])
    if not is_turned or source.numel() < TRANSPOSED or not results[0].is_contiguous():
        return NONE
    return Scratch(TRANSPOSED * source.element_size() if min(source.shape) > 1 else 0)


def _euclidean(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Both tensors beside their squares and ones, and a product of these. Before there is a result,
    what they are made of.
    """
    wide = [
        torch.empty((*each.shape[:-1], each.shape[-1] + 2), dtype=each.dtype, device="meta")
        for each in args[:2]
    ]
    scratch = product((), (wide[0], wide[1].mT), results)
    both = sum(map(elements_of, wide))
    made_of = max(map(elements_of, wide)) - elements_of(results[0])
    columns = 4 * 8 * sum(math.prod(each.shape[:-1]) for each in wide)
    return Scratch(0, both + columns + max(made_of, scratch.known + scratch.margin))


def _weight_norm(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Sums for each column and thread, where columns have norms."""
    columns = args[-1] if isinstance(args[-1], int) else 0
    threads, width = torch.get_num_threads(), results[1].numel()
    return Scratch(0, 3 * threads * width * 8 if columns else 0)


def _trilinear(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A product of two tensors over all dimensions but one, entry by entry of that."""
    shapes = []
    for tensor, added in zip(args[:3], args[3:6], strict=True):
        shape = list(tensor.shape)
        for dim in sorted(added):
            shape.insert(dim, 1)
        shapes.append(shape)
    sizes = [max(column) for column in zip(*shapes, strict=True)]
    unrolled = sizes[args[7] if len(args) > 7 else 1]
    step = math.prod(sizes) // max(1, unrolled) * results[0].element_size()
    return Scratch(0, step + 2 * elements_of(results[0]) + sum(map(elements_of, args[:3])) + 512)


_NOTHING = _lapack(lambda batch, rows, columns: 0)
_COPIED = _lapack(lambda batch, rows, columns: batch * rows * columns)

MATRICES: dict[str, ScratchRule] = {
    **dict.fromkeys(("_linalg_svd", "linalg_lu", "linalg_inv_ex"), _COPIED),
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex"), _NOTHING),
    **dict.fromkeys(("geqrf", "linalg_householder_product", "lu_unpack"), _NOTHING),
    "linalg_ldl_factor_ex": _NOTHING,
    "_linalg_eigh": _eigenvectors,
    **dict.fromkeys(("linalg_eig", "linalg_eigvals", "_linalg_eigvals"), _any_eigenvectors),
    "linalg_qr": _orthogonal,
    **dict.fromkeys(("ormqr", "linalg_lstsq"), _with_others),
    "linalg_pinv": _inverse_of_any,
    "cholesky_solve": _second_copied,
    **dict.fromkeys(("mv", "addmv"), _by_vector),
    "addmm": _added_product,
    "addbmm": _added_products,
    **dict.fromkeys(("clone", "copy_"), transposing),
    "_cdist_forward": contiguous(0, 1),
    "_cdist_backward": contiguous(0, 1, 2, 4),
    "_euclidean_dist": _euclidean,
    **dict.fromkeys(("_weight_norm_interface", "_weight_norm_interface_backward"), _weight_norm),
    "_trilinear": _trilinear,
}
