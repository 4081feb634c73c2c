"""memopt.compile: torch.compile with memopt's fates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt._arguments import check_flags
from memopt._compat import options_of_mode
from memopt._errors import warn
from memopt.memory.sizes import as_bytes

_PARTITIONER = "custom_partitioner_fn"
# Inductor holds a dead buffer until one of the same size is wanted, if its own estimate of the peak
# allows that. The estimate counts twice what is written in place: a transformer's peak was 12 %
# higher for it (benchmarks/NOTES.md).
_NO_REUSE = {"allow_buffer_reuse": False}


def compile(
    model: Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
    budget: int | float | str | None = None,
    head: bool = True,
) -> Any:
    """Compile as torch.compile does, but keep for backward what gives the lowest peak in about the
    same time, or the least time within a budget of the peak.

        model = memopt.compile(model)
        model = memopt.compile(model, budget="4GiB")

    In a compiled graph there is no op to swap: the compiler generates the kernels, and decides what
    forward keeps by how it expects to fuse. Here several choices are compared by the peak and the
    work that are predicted for them: torch.compile's own, also at its lower
    `activation_memory_budget`s, and minimum cuts, which keep what matrix products, convolutions,
    attention and custom ops produced, the seeds of random draws, and statistics of reductions; all
    else, which is element-wise or a normalisation, is recomputed by the kernels of backward that
    read it. Without a budget the lowest peak is taken that costs at most 1.02 of the work of
    torch.compile's own choice (benchmarks/compile.py measures both).
    Before a choice is taken, Inductor generates its code, without compiling kernels, and the bytes
    that this code allocates are counted. That is done one to five times for most graphs, and up to
    thirteen times before a budget is refused; each takes about two thirds of the time that
    torch.compile takes without compiling kernels.
    Gradients are those of torch.compile but for the rounding of fused code.

    The model may be converted or not: in a compiled graph both are the same. Regions of
    `checkpoint_wrapper` and torch.utils.checkpoint inside are obeyed. Graphs that run without
    gradients are torch.compile's own. Compiled graphs are cached as torch.compile's are.

    Args:
        model, fullgraph, dynamic, mode, options, disable: as of `torch.compile`. Without `model`
            the result is a decorator.
        backend: "inductor" only; no other has a partitioner that takes orders.
        budget: keep less, so that no graph needs more at its peak: see `compile_options`.
        head: where logits reach nothing but losses of the same graph, compute these in chunks of
            rows, so that neither the logits nor their gradient exist: as `memopt.convert` does in
            eager mode, for logits of two chunks at least.

    Returns:
        The result of `torch.compile`.

    Raises:
        TypeError: `model` is compiled already, or `budget` is not a number.
        ValueError: another backend, options that set Inductor's `custom_partitioner_fn`, or a
            budget out of range. One below what a graph needs is found when the graph is compiled,
            at the first call: its error says how many bytes would do.

    The logger "memopt.compile" says at level INFO what each graph keeps, whose choice that is,
    which peak is predicted for it, and which op and module have it, when it is compiled. Where a
    model has convolutions, Inductor may keep copies of their weights and inputs in another layout;
    options={"layout_optimization": False} leaves them.

    Where PyTorch lacks the internals that this relies upon, a warning says so once, and the model
    is compiled by torch.compile alone.
    """
    if backend != "inductor":
        raise ValueError(
            "compile: backend must be 'inductor', which lets the policy choose what is saved, got "
            f"{backend!r}"
        )
    check_flags(
        "compile",
        fullgraph=fullgraph,
        dynamic=dynamic is not None and dynamic,
        disable=disable,
        head=head,
    )
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"compile: options must be a dict or None, got {options!r}")
    if mode is not None and options is not None:
        raise ValueError(
            f"compile: mode and options must not both be given, got {mode!r} and {options!r}"
        )
    if options is not None and _PARTITIONER in options:
        raise ValueError(
            f"compile: options must leave {_PARTITIONER!r} to memopt, got "
            f"{type(options[_PARTITIONER]).__name__}"
        )
    policy = compile_options(budget, head=False)
    _check_model(model)
    merged = {**options_of_mode(mode, dynamic), **policy, **(options or {})}
    if policy and head:
        from memopt._compile._inductor_head import with_heads

        merged = with_heads(merged)

    def compiled(model: Callable[..., Any]) -> Any:
        _check_model(model)
        return torch.compile(
            model, fullgraph=fullgraph, dynamic=dynamic, options=merged or None, disable=disable
        )

    return compiled if model is None else compiled(model)


def compile_options(
    budget: int | float | str | None = None, *, head: bool = True
) -> dict[str, Any]:
    """Return the `options` with which torch.compile follows memopt's policy.

        model = torch.compile(model, options=memopt.compile.options())
        model.compile(options={**memopt.compile.options(), "epilogue_fusion": False})

    Args:
        budget: the most bytes that forward and backward of one compiled graph may take at their
            peak, in addition to its inputs and parameters: kept tensors, gradients, the tensors
            between kernels, and outputs until its backward begins. An int is bytes, as is a string
            such as "4GiB"; a float of 0 to 1 is a share of the peak that torch.compile's own choice
            would have. Of the choices within it the one of the least work is taken; matrix products
            and attention are recomputed if it asks for that, those first that cost the fewest
            operations per byte. None (default): the lowest peak in about the work of
            torch.compile's own choice. The peak is that of the code which Inductor generates. What
            a kernel takes for itself while it runs is not in it. Where sizes are symbols (dynamic
            shapes), it is that of the largest batch that the same ops were compiled for, if this is
            at least as large in each size; a batch beyond that, which might exceed a budget in
            bytes, is compiled anew.
        head: as in `memopt.compile`.

    Returns:
        A dict: the policy as Inductor's `custom_partitioner_fn`, `allow_buffer_reuse` off, since
        dead buffers that wait for their reuse raise the peak, and with `head` a
        `pre_grad_custom_pass`, which runs the one that was set before. Empty, with a warning, where
        PyTorch lacks what the policy needs.

    Raises:
        TypeError: `budget` is not a number or string.
        ValueError: `budget` is not a positive number of bytes, nor a share of 0 to 1.
    """
    allowed = _checked_budget(budget)
    check_flags("compile", head=head)
    try:
        # Imports the compiler, which takes a second: not with memopt.
        from memopt._compile._inductor import Partitioner
        from memopt._compile._inductor_head import with_heads
    except ImportError as missing:
        _say_once(str(missing))
        return {}
    options = {_PARTITIONER: Partitioner(allowed), **_NO_REUSE}
    return with_heads(options) if head else options


def _checked_budget(budget: object) -> int | float | None:
    """Bytes (int), a share (float), or None."""
    if budget is None:
        return None
    if isinstance(budget, str):
        return int(as_bytes("compile: budget", budget))
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(
            "compile: budget must be a number of bytes (int) or a share (float), got "
            f"{type(budget).__name__}"
        )
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(
            f"compile: budget as a share must be more than 0 and at most 1, got {budget}"
        )
    if isinstance(budget, int) and budget <= 0:
        raise ValueError(f"compile: budget in bytes must be positive, got {budget}")
    return budget


def _check_model(model: object) -> None:
    if model is None:
        return
    if not callable(model):
        raise TypeError(
            f"compile: model must be a module or a function, got {type(model).__name__}"
        )
    compiled_in_place = isinstance(model, nn.Module) and model._compiled_call_impl is not None
    if compiled_in_place or hasattr(model, "_torchdynamo_orig_callable"):
        raise TypeError(
            f"compile: model must not be compiled already, got {type(model).__name__}; its options "
            "are those of torch.compile: pass options=memopt.compile.options() there"
        )


@functools.cache
def _say_once(missing: str) -> None:
    warn(
        f"compile: PyTorch {torch.__version__} lacks what the policy needs ({missing}); "
        "torch.compile decides alone what is saved"
    )
