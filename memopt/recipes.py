"""memopt.recipes(): outputs of memopt's ops are not kept for backward but recomputed."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from memopt._extension import _C
from memopt.fates import saved_tensors


def recipes() -> AbstractContextManager[None]:
    """Recompute outputs of memopt's ops in backward, which are not kept inside this context.

    This is `memopt.saved_tensors("recipe")` under a name of its own.

    An output's recipe is kept instead: the op, and the tensors that the op's own node saves anyway.
    No op keeps the output itself, or a view of it. So an unmodified Linear, three separate ones for
    query, key and value, or a LoRA layer stop storing the LayerNorm or GELU output that they read.
    Backward runs the op's forward kernel once per backward for all readers of an output, and drops
    the result after the last one has read it. Recipes chain: dropout(gelu(layer_norm(x))) keeps x,
    the statistics and 16 bytes. Gradients have the same bits. retain_graph, partial backward
    (inputs=), create_graph, several threads, detached aliases and checkpointed regions work as they
    do outside.

    A recipe is used if it saves memory: if something inside the context keeps each tensor that it
    reads already. Otherwise the output itself is kept. That is so for a dropout behind a Linear,
    since nothing keeps the Linear's output; if the output was written in place after the op, or
    PyTorch could not tell (views of another dtype, tensor subclasses); and if a weight that the op
    read was freed, as sharded ones are after their module's forward. If a
    tensor that a recipe reads is written in place before backward (a weight by an optimizer's step,
    say), backward raises an error, as the op's own backward would. Writes that PyTorch does not
    count (through another tensor's .data, or NumPy) must not be made between the op and backward.

    Only ops that run inside the context and record a graph have recipes; backward may run
    anywhere. Saved-tensor hooks that are active around the context (save_on_cpu, a checkpointed
    region, a user's own) get every tensor that has no recipe; hooks inside it get all. A context
    inside another does nothing; under torch.compile, in torch.func's transforms and in
    torch.jit.trace it does nothing either. (torch.func.grad, vjp, jacrev and hessian raise an error
    inside it, as in any saved-tensor hooks; vmap and jvp work.) It belongs to the thread that
    enters it.

    Host time: 0.2 us for each tensor that an op of the usual kinds saves, over 1 us for what a hook
    is called for (other ops, custom autograd Functions; everything where other hooks, a dispatch
    mode or a region are active), and a kernel launch for each output that is recomputed
    (benchmarks/recipes_overhead.py).

        with memopt.recipes():
            loss = model(input)
        loss.backward()

    Source: llm.c's and flash-attention's recomputation of norms and activations, here for any
    consumer.
    """
    return saved_tensors("recipe")


def recipes_are_on() -> bool:
    """Whether what this thread saves now may have a recipe: the innermost saved-tensor hooks are
    those of a scope with recipes. Never under torch.compile.
    """
    return not torch.compiler.is_compiling() and _C.recipes_are_on()


def is_kept_anyway(tensor: Tensor) -> bool:
    """Whether it would cost nothing to save `tensor` here: recipes are on, and it is held already
    or has a recipe.

    PyTorch's relu and sigmoid save their output, which the next layer saves as well. So memopt's,
    which save their input, are a gain only there; elsewhere they would be none, and a loss where
    the output is saved outside of the scope.
    """
    return not torch.compiler.is_compiling() and _C.is_kept_anyway(tensor)
