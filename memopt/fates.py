"""memopt.saved_tensors(): what becomes of each tensor that autograd saves for backward."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from memopt._extension import _C
from memopt.place import directory_of

__all__ = ["BuiltIn", "Fate", "Handle", "Policy", "saved_tensors"]

BuiltIn: TypeAlias = Literal["keep", "recipe", "cpu", "disk"]
"""The names of the built-in fates."""


@runtime_checkable
class Handle(Protocol):
    """An object that stands in the autograd graph for a saved tensor."""

    def restore(self) -> Tensor:
        """The tensor, of the shape, dtype and device of the one that was packed.

        Called in each backward that needs it, perhaps in another thread; without gradients and
        autocast.
        """


@runtime_checkable
class Fate(Protocol):
    """A user's own class that decides what becomes of a saved tensor."""

    def pack(self, tensor: Tensor) -> Handle | None:
        """Return the handle for `tensor`, which comes without its history (but a leaf as it is).

        None leaves it to the hooks around the scope; without any it is kept. Called without
        gradients and autocast.
        """


Policy: TypeAlias = BuiltIn | os.PathLike[str] | Fate | Callable[[Tensor], BuiltIn | Fate]
"""A fate for all tensors (a path: offloaded to this directory), or a callable that picks one for
each."""


def saved_tensors(policy: Policy) -> AbstractContextManager[None]:
    """Let `policy` decide, inside this context, what becomes of each tensor that autograd saves.

    Args:
        policy: a fate for all tensors, or a callable that gets each saved tensor and answers with
            its fate. (It must not keep the tensor: one that is a node's own output would hold its
            whole graph.) A fate is one of

            - "keep": the graph holds the tensor itself, as autograd does. In a checkpointed region,
              a tensor that is kept is not dropped.
            - "recipe": an output of memopt's ops, or a view of one, is not kept but recomputed from
              what is kept anyway. See `memopt.recipes`, which is this policy.
            - "cpu": a copy in (pinned) host memory, which is back before backward needs it. This
              is `memopt.offload` without its options: all storages of 1 KB and more are offloaded.
              Without an accelerator everything stays where it is.
            - "disk": a copy in a file in the directory that `memopt.offload.configure` was given;
              tensors in host memory are offloaded as well. A path (for all tensors, not as an
              answer for one) names another directory.
            - an object with a method `pack(tensor)` that returns an object with a method
              `restore()`, see `Fate` and `Handle`: for trying an idea, in Python.

    Tensors that a fate does not take (an output without a recipe, a parameter that is not copied)
    go to the saved-tensor hooks that are active around the context: another context of this kind,
    a checkpointed region, save_on_cpu, a user's own. If there are none, they are kept. So

        with memopt.saved_tensors("cpu"), memopt.saved_tensors("recipe"):

    recomputes outputs of memopt's ops and offloads the rest. Hooks inside the context get all.

    Whatever the fate, a tensor that is written in place between forward and backward makes backward
    raise an error, as autograd does by itself. The built-in fates run no Python for a tensor. Under
    torch.compile, in torch.func's transforms and in torch.jit.trace the context does nothing. It
    belongs to the thread that enters it; it may be entered again, also inside itself.

    This keeps float32 tensors, except parameters, in 16 bits, at the price of rounded gradients:

        >>> import torch, memopt
        >>> class Half:
        ...     def __init__(self, tensor):
        ...         self.values = tensor.bfloat16()
        ...     def restore(self):
        ...         return self.values.float()
        >>> class ToHalf:
        ...     def pack(self, tensor):
        ...         return Half(tensor)
        >>> def policy(tensor):
        ...     is_weight = tensor.is_leaf and tensor.requires_grad
        ...     return ToHalf() if tensor.dtype == torch.float32 and not is_weight else "recipe"
        >>> x, weight = torch.randn(8, 16), torch.randn(16, 16, requires_grad=True)
        >>> with memopt.saved_tensors(policy):
        ...     loss = torch.nn.functional.linear(x, weight).sum()
        >>> loss.backward()
        >>> torch.allclose(weight.grad, x.bfloat16().float().sum(0).expand(16, 16), atol=1e-5)
        True

    Raises:
        TypeError: `policy` is no fate and not callable. In forward: it answers with something else
            than a fate, or a user's `pack` returns something without `restore`. In backward:
            `restore` returns no tensor.
        ValueError: `policy` is a string that names no fate, or "disk" without a directory. In
            backward: `restore` returns a tensor of another shape, dtype or device.
        OSError: no file can be made in the directory.

    Source: PyTorch's saved-tensor hooks (torch.autograd.graph.saved_tensors_hooks).
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    if isinstance(policy, os.PathLike):
        return _C.SavedTensors(_C.Offload(directory=directory_of("saved_tensors: policy", policy)))
    return _C.SavedTensors(policy)
