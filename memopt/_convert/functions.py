"""`memopt.convert.functions`: calls of PyTorch's functions go to memopt's ops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memopt._extension import _C


@contextmanager
def memopt_functions() -> Iterator[None]:
    """Replaces PyTorch's functions by memopt's in this scope and thread, as functions of
    torch.nn.functional or torch and as methods of tensors: layer_norm, rms_norm, group_norm,
    instance_norm, batch_norm, dropout, gelu, silu, relu, relu6, leaky_relu, elu, hardswish,
    hardsigmoid and mish.

    For functions that belong to no model; inside a model `convert(model)` does this already. The
    calls are found below Python (csrc/intercept/functions.h), so that nothing of PyTorch's changes.
    Calls that memopt's ops do not support (in-place forms, integers, other devices, sparse, nested
    or distributed tensors) are PyTorch's as before. Autocast leaves all of them the dtype of their
    input. The scope applies to this thread only, and ends on exceptions too. Under torch.compile it
    does nothing.

    relu saves its input, where PyTorch's saves its output: a gain only with recipes on
    (`memopt.recipes`). For the same reason sigmoid stays PyTorch's.

    A checkpointed region must run with the same functions again in backward, which runs outside of
    the scope: enter it inside the region.
    """
    if torch.compiler.is_compiling():
        yield
        return
    _C.begin_functions()
    try:
        yield
    finally:
        _C.end_functions()


@contextmanager
def functions_paused() -> Iterator[None]:
    """Leaves PyTorch's functions to PyTorch in this scope and thread, in spite of outer scopes."""
    before = _C.pause_functions(True)
    try:
        yield
    finally:
        _C.pause_functions(before)
