"""Closed formulas for the memory of a transformer's training step.

With e bytes an element, tokens T = b s, width h, inner width f, a heads and m bytes an element of a
dropout mask, a pre-norm block saves T (e (8 h + 2 f) + 2 m h) bytes; computed step by step,
attention saves T a s (2 e + m) more. For e = 2, m = 1 and f = 4 h that is s b h (34 + 5 a s / h),
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), eq. 1.
A gated block with g heads of keys and values saves T e (6 h + 2 h g / a + 4 f).

They take each operator to be one kernel. A model that composes its norm, its activation or its
rotary embedding of several saves more: the difference between formula and trace is the price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from memopt.memory.pieces import (
    ACTIVATIONS,
    CATEGORIES,
    FUNCTIONALITY,
    GRADIENTS,
    STATES,
    TEMPORARY,
    WEIGHTS,
)
from memopt.memory.storages import storages, tensors_in
from memopt.whatif.fates import Fates


@dataclass(frozen=True)
class TransformerShape:
    """A transformer's sizes, as the formulas need them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    tokens: int
    """The tokens in a batch."""
    sequence: int
    vocabulary: int
    """The words that logits have, 0 without a language model's head."""
    itemsize: int = 4
    """Bytes of an activation's element."""
    masks: int = 0
    """Bytes of a dropout mask's element; 0 without dropout."""
    attention: bool = False
    """Whether attention's weights are stored."""

    def block_bytes(self, recipes: bool = False) -> int:
        """Saved for backward by one block."""
        e, h, f = self.itemsize, self.hidden, self.ffn
        keys = 2 * h * self.kv_heads // self.heads
        stored = e * (6 * h + keys + (4 if self.gated else 2) * f) + 2 * self.masks * h
        if recipes:  # both norms' outputs, and the activation's with its product
            stored -= e * (2 * h + (2 if self.gated else 1) * f)
        if self.attention:
            dropped = e + self.masks if self.masks else 0
            stored += self.heads * self.sequence * (e + dropped)
        return self.tokens * stored

    def head_bytes(self) -> int:
        """Saved behind the blocks: the last norm's input and output; log-probabilities in float32,
        and logits of 16 bits are read by a cast, which saves nothing.
        """
        return self.tokens * (2 * self.itemsize * self.hidden + 4 * self.vocabulary)

    def input_bytes(self) -> int:
        """Bytes of one block's input."""
        return self.tokens * self.itemsize * self.hidden

    def activation_bytes(self, fates: Fates) -> int:
        """Bytes at the end of forward."""
        block = self.block_bytes(fates.recipes)
        kept = self.layers * block
        if fates.checkpoint == "all":
            kept = self.layers * self.input_bytes()
        elif fates.checkpoint in ("sqrt", "optimal"):
            kept = self.segmented_bytes(self.best_segments(str(fates.checkpoint), block), block)
        elif isinstance(fates.checkpoint, int):
            regions = -(-self.layers // fates.checkpoint)
            kept = regions * self.input_bytes() + (self.layers - regions) * block
        if fates.offload:
            kept = min(kept, self.input_bytes())
        return kept + self.head_bytes()

    def segmented_bytes(self, segments: int, block: int) -> int:
        """Held by `segments` segments, the last of which runs plainly."""
        last = self.layers // segments
        return (segments - 1) * self.input_bytes() + last * block

    def best_segments(self, rule: str, block: int) -> int:
        """Chen et al.'s root of the number of blocks; or that with the least peak,
        sqrt(layers * block / input), since a block saves more than its input.
        """
        ratio = 1.0 if rule == "sqrt" else block / self.input_bytes()
        return min(self.layers, max(1, round(math.sqrt(self.layers * ratio))))

    def temporary_bytes(self, fates: Fates) -> int:
        """The most that backward needs in addition to what is saved: the logits' gradient and that
        of the log-probabilities, or the gradients inside a block.
        """
        inner = self.tokens * self.itemsize * (self.ffn + self.hidden)
        scores = self.tokens * self.heads * self.sequence * self.itemsize if self.attention else 0
        return max(4 * self.tokens * self.vocabulary, inner, 2 * scores)


def shape_of(model: nn.Module, batch: Any, autocast: torch.dtype | None) -> TransformerShape | None:
    """Return the shape of a model with a transformers-like config; None for any other."""
    config: Any = _attribute(model, "config")
    config = _first(config, "text_config") or config
    layers = _whole(config, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _whole(config, "hidden_size", "n_embd", "d_model")
    heads = _whole(config, "num_attention_heads", "n_head", "num_heads")
    if not layers or not hidden or not heads:
        return None
    tokens = _tokens(model, batch, config)
    if tokens is None:
        return None
    named = _first(config, "intermediate_size", "n_inner", "d_ff")
    inner = 4 * hidden if named is None else _whole(config, "intermediate_size", "n_inner", "d_ff")
    keys = _first(config, "num_key_value_heads")
    kv_heads = heads if keys is None else _whole(config, "num_key_value_heads")
    if inner is None or kv_heads is None:
        return None
    dropout = _first(config, "hidden_dropout_prob", "resid_pdrop", "dropout_rate") or 0
    first = next(model.parameters(), None)
    if first is None:
        return None
    dtype = autocast or first.dtype
    activation = str(_first(config, "hidden_act", "activation_function", "dense_act_fn") or "")
    gated = "silu" in activation or bool(_attribute(config, "is_gated_act"))
    words = _whole(config, "vocab_size") or 0
    is_lm = any(isinstance(m, nn.Linear) and m.out_features == words for m in model.modules())
    attention = _attribute(config, "_attn_implementation") == "eager"
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=inner,
        gated=gated,
        tokens=tokens[0] * tokens[1],
        sequence=tokens[1],
        vocabulary=words if is_lm else 0,
        itemsize=dtype.itemsize,
        masks=dtype.itemsize if dropout else 0,
        attention=attention or bool(_first(config, "attention_probs_dropout_prob", "attn_pdrop")),
    )


def _whole(config: Any, *names: str) -> int | None:
    """The first of these that a config has; None where that is no whole number above 0, as of
    models whose stages differ: they are no transformer of one shape.
    """
    found = _first(config, *names)
    return found if type(found) is int and found > 0 else None


def _first(config: Any, *names: str) -> Any:
    return next((v for name in names if (v := _attribute(config, name)) is not None), None)


def _attribute(config: Any, name: str) -> Any:
    """A config is anybody's object: what it raises is its own."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _tokens(model: nn.Module, batch: Any, config: Any) -> tuple[int, int] | None:
    """Rows and length."""
    leaves = tensors_in(batch)
    for leaf in leaves:
        if not leaf.is_floating_point() and leaf.dim() == 2:
            return leaf.shape[0], leaf.shape[1]
    patch = _whole(config, "patch_size")
    for leaf in leaves:
        if leaf.dim() == 4 and patch is not None:
            return leaf.shape[0], leaf.shape[2] // patch * (leaf.shape[3] // patch) + 1
    return None


def formulas(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    fates: Fates,
    *,
    autocast: torch.dtype | None = None,
    micro_batches: int = 1,
    cuda: bool = False,
) -> dict[str, int] | None:
    """Bytes by category at the peak; None for a model of unknown shape.

    That is where backward begins, or the optimizer's step, whichever has more. Gradients come as
    activations go, so they do not count at the first unless micro-batches add them up.
    """
    shape = shape_of(model, batch, autocast)
    if shape is None:
        return None
    shape = replace(
        shape,
        tokens=-(-shape.tokens // micro_batches),
        masks=1 if cuda and shape.masks else shape.masks,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(storages(model.parameters()).values())
    gradients = sum(storages(trained).values())
    inputs = tensors_in(batch)
    casts = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    found = dict.fromkeys(CATEGORIES, 0)
    found[WEIGHTS] = weights
    found[GRADIENTS] = gradients if micro_batches > 1 else 0
    found[STATES] = states_per_parameter(optimizer) * gradients
    found[ACTIVATIONS] = shape.activation_bytes(fates)
    found[TEMPORARY] = shape.temporary_bytes(fates)
    found[FUNCTIONALITY] = sum(storages([*inputs, *model.buffers()]).values())
    in_step = {
        **found,
        GRADIENTS: gradients,
        ACTIVATIONS: 0,
        TEMPORARY: optimizer_bytes(optimizer, trained, cuda),
    }
    found[FUNCTIONALITY] += casts * autocast.itemsize if autocast is not None else 0
    return max(found, in_step, key=lambda bytes_of: sum(bytes_of.values()))


def optimizer_bytes(
    optimizer: torch.optim.Optimizer | None, trained: Sequence[nn.Parameter], cuda: bool
) -> int:
    """Temporary bytes of an optimizer's step: of Adam's kind the root of the second moments, of all
    parameters at once (foreach); or of one after another, and again when it is divided, while a
    variable still holds the one before. Of SGD none.
    """
    group = optimizer.param_groups[0] if optimizer is not None else {}
    if "betas" not in group or group.get("fused"):
        return 0
    sizes = [p.numel() * p.element_size() for p in trained]
    is_foreach = cuda if group.get("foreach") is None else group["foreach"]
    if is_foreach:
        return sum(sizes)
    return max((2 * now + before for before, now in pairwise((0, *sizes))), default=0)


def states_per_parameter(optimizer: torch.optim.Optimizer | None) -> int:
    """How many tensors of a parameter's size an optimizer of torch.optim keeps for it."""
    if optimizer is None:
        return 0
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    return 1
