"""Gradients with respect to lazy logits: a loss that was computed in chunks of rows has gone around
the logits, which get no gradient of it. Who asks for that one is told so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from memopt._errors import warn

GONE_AROUND = (
    "convert: a gradient with respect to logits must be of a loss that was made of the logits "
    "themselves, and this one was computed in chunks of rows, without them; call retain_grad() on "
    "the logits before the loss is computed, or convert with head=False"
)
WRITTEN = (
    "convert: logits that are computed when they are asked for must not be written in place by an "
    "autograd Function (mark_dirty), whose gradient they would miss; convert with head=False"
)
_UNSEEN = (
    "convert: {} of logits sees nothing of a loss that was computed before in chunks of rows, "
    "without them; {}, or convert with head=False"
)
# Their hooks are on all outputs of a model, so on the loss as well, and look at no gradient.
_ON_ALL_OUTPUTS = ("lightning.", "lightning_fabric.", "pytorch_lightning.", "torch.distributed.")


def warn_of_hook(hook: Any) -> None:
    """Warns of a hook on logits that a loss has gone around, unless a library has put it on all
    outputs of a model.
    """
    function = getattr(hook, "func", hook)  # of a partial
    if not (getattr(function, "__module__", None) or "").startswith(_ON_ALL_OUTPUTS):
        warn(_UNSEEN.format("a hook for the gradient", "register it before the loss is computed"))


def warn_of_node() -> None:
    """Warns of the node of logits that a loss has gone around."""
    warn(_UNSEEN.format("the node", "ask for it before the loss is computed"))


def check_around(roots: Iterable[Any], around: Collection[tuple[str, int]]) -> None:
    """Raises RuntimeError if one of these nodes, which have gone around logits, is behind roots.

    Args:
        roots: tensors, and edges of the graph.
    """
    todo = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    seen = set()
    while todo and around:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if (node.name(), node._sequence_nr()) in around:
            raise RuntimeError(GONE_AROUND)
        seen.add(node)
        todo.extend(after for after, _ in node.next_functions)
