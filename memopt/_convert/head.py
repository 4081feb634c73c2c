"""The heads of a model: linears whose output reaches a loss, and is not computed until then.

A head is known by the structure of the model: it shares its weight with an embedding, the model
calls it its output embeddings (transformers), or it is the only linear that has a class for each
word of an embedding. Where nothing of that is so and there is a batch, the model runs once with
lazy logits from every linear. Those whose logits reach a loss, and take more bytes than the weight,
are heads: a loss in chunks keeps the weight's gradient in their place. A linear that is taken for
a head by mistake computes what it did: lazy logits are made where anything but a loss asks for
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from memopt._class_patch import SwappedModule, original_class
from memopt._compat import in_jit_trace, is_parametrized
from memopt._convert.apply_swaps import apply_swaps, undo_swap
from memopt._convert.supported import supports
from memopt._convert.swap import ClassSwap, Plain, swap_of
from memopt._extension import _C
from memopt._head.call import HeadUse, watched_heads
from memopt._head.logits import LazyLogits, computed, lazy_logits
from memopt.memory.batches import arguments_of
from memopt.memory.sizes import as_text
from memopt.memory.unchanged import Written, unchanged

_LEAST_WORDS = 3
"""Classes below which a linear is no head because an embedding has as many words: the two types of
tokens that BERT has are the classes of many a classifier."""


class FoundHead(NamedTuple):
    """A linear whose logits are lazy."""

    path: str
    words: int
    found_by: str
    """How it was known."""

    nbytes: int | None = None
    """Bytes of the logits of one forward of the sample; None without one."""

    made_by: str = ""
    """The function for which that forward computed them as a whole; empty: it did not."""

    losses: int = 0
    """Losses that it computed in chunks of rows."""

    def line(self) -> str:
        """The line of the report."""
        name = f"{self.path or 'the model'} ({self.words:,} classes; {self.found_by})"
        if self.nbytes is None:
            return f"head in chunks: {name}"
        logits = f"{as_text(self.nbytes)} of logits"
        if self.made_by:
            return f"head in chunks: {name}; with batch, {logits} are made, for {self.made_by}"
        if not self.losses:
            return f"head in chunks: {name}; with batch, {logits} wait for a loss"
        return f"head in chunks: {name}; with batch, {logits} are never made"


@dataclass(frozen=True)
class HeadSwap(ClassSwap):
    """A linear that returns lazy logits in training."""

    path: str

    def becomes(self) -> str:
        return "memopt.functional.linear_cross_entropy"

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        if torch.compiler.is_compiling():
            return plain(module, input)
        if isinstance(input, LazyLogits):
            input = computed(input, "linear")
        weight, bias = module.weight, module.bias
        if not module.training or _is_seen(module):
            return plain(module, input)
        if not (_C.is_plain_head(input, weight, bias) or _may_wait(input, weight, bias)):
            return plain(module, input)
        return lazy_logits(self.path, input, weight, bias)


def is_head(module: nn.Module) -> bool:
    """Whether `convert` made its logits lazy."""
    return isinstance(swap_of(module), HeadSwap)


def _may_wait(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this is a call of training whose logits memopt's ops know. `_C.is_plain_head` says so
    of most of them; this is for all.
    """
    if not torch.is_grad_enabled() or in_jit_trace() or not supports(input, weight, bias):
        return False
    has_gradient = input.requires_grad or weight.requires_grad
    is_linear = input.dim() > 0 and weight.dim() == 2 and min(weight.shape) > 1
    return has_gradient and is_linear and input.shape[-1] == weight.shape[1]


def _is_seen(module: nn.Module) -> bool:
    """Whether hooks other than memopt's, which look at no element, get the output or its
    gradient.
    """
    for hooks in (module._forward_hooks, torch_module._global_forward_hooks):
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith("memopt."):
                return True
    return bool(module._backward_hooks or module._backward_pre_hooks)


def find_heads(model: nn.Module, skipped: Collection[nn.Module]) -> dict[nn.Module, FoundHead]:
    """The heads that the structure of a model shows."""
    linears = _linears(model, skipped)
    words: dict[int, str] = {}
    weights: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            words.setdefault(module.num_embeddings, path)
            weights.setdefault(module.weight, path)
    found: dict[nn.Module, FoundHead] = {}

    def add(module: nn.Linear, why: str) -> None:
        if module in linears and module not in found:
            found[module] = FoundHead(linears[module], module.out_features, why)

    for module in linears:
        if module.weight in weights:
            add(module, f"its weight is {weights[module.weight]}'s")
    for module in model.modules():
        asked = getattr(type(module), "get_output_embeddings", None)
        if callable(asked):
            head = _answer(asked, module)
            if isinstance(head, nn.Linear):
                add(head, "the model's output embeddings")
    if not found:
        alike = [m for m in linears if m.out_features in words and m.out_features >= _LEAST_WORDS]
        if len(alike) == 1:
            add(alike[0], f"as many classes as {words[alike[0].out_features]} has words")
    return found


def _answer(asked: Any, module: nn.Module) -> Any:
    try:
        return asked(module)
    except Exception:  # one that has none may say so by any error
        return None


def _linears(model: nn.Module, skipped: Collection[nn.Module]) -> dict[Any, str]:
    """Linears that can be heads, with their paths."""
    return {
        module: path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and original_class(type(module)).forward is nn.Linear.forward
        and not isinstance(module, SwappedModule)
        and not is_parametrized(module)
        and "forward" not in module.__dict__
        and not module._modules
        and not _is_seen(module)
        and module not in skipped
    }


def probed_heads(
    model: nn.Module, batch: Any, skipped: Collection[nn.Module]
) -> dict[nn.Module, FoundHead]:
    """The heads that one forward with a batch shows. The model is afterwards as before."""
    linears = _linears(model, skipped)
    if not any(module.training for module in linears):
        return {}
    try:
        uses = _uses_in(model, batch, linears)
    except Exception:  # of one that is no head, whose output gets what none may
        most = max(module.out_features for module in linears)
        widest = {m: path for m, path in linears.items() if m.out_features == most}
        try:
            uses = _uses_in(model, batch, widest)
        except Exception:  # the model's own, if it is raised without heads too
            return {}
    reached: dict[str, int] = {}
    for use in uses:
        if use.losses and not use.were_made:
            reached[use.path] = max(use.nbytes, reached.get(use.path, 0))
    return {
        module: FoundHead(path, module.out_features, "its output reaches a loss")
        for module, path in linears.items()
        if reached.get(path, 0) > module.weight.nbytes
    }


def make_lazy(model: nn.Module, heads: Mapping[nn.Module, str]) -> None:
    """Have these modules of `model`, with their paths, return lazy logits."""
    apply_swaps(model, [(module, HeadSwap(path)) for module, path in heads.items()])


def with_uses(heads: Iterable[FoundHead], uses: Iterable[HeadUse]) -> tuple[FoundHead, ...]:
    """The heads with the bytes of the second of two forwards: the first is a rehearsal."""
    uses = list(uses)
    uses = uses[len(uses) // 2 :]
    return tuple(_with_use(head, [use for use in uses if use.path == head.path]) for head in heads)


def _with_use(head: FoundHead, uses: list[HeadUse]) -> FoundHead:
    made = [use.by for use in uses if use.were_made]
    return head._replace(
        nbytes=sum(use.nbytes for use in uses),
        made_by=made[0] if made else "",
        losses=sum(use.losses for use in uses),
    )


def _uses_in(model: nn.Module, batch: Any, linears: dict[Any, str]) -> list[HeadUse]:
    """Return what becomes of the outputs of linears, all of which are heads for one forward."""
    args, kwargs = arguments_of(batch)
    for module, path in linears.items():
        HeadSwap(path).apply(module)
    try:
        with (
            watched_heads() as uses,
            unchanged(model, args, kwargs, written=Written()) as before,
            torch.enable_grad(),
        ):
            before.rehearse(lambda: model(*args, **kwargs))
    finally:
        for module in linears:
            undo_swap(module)
    return uses
