"""The rest that a converted model still saves for backward, where, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from memopt._checkpoint.wrapper import settings_of
from memopt._convert.recipes import has_functions, has_recipes
from memopt.memory.attribution import Attributed


class Remaining(NamedTuple):
    """Storages that are saved for the same reason in modules of one class."""

    nbytes: int
    what: str
    op: str
    """The autograd node that saved them first, or, of an activation's or norm's output that memopt
    would compute again, the node that made them; empty for what regions keep."""

    from_class: str
    """The class of the innermost module whose forward saved or made them."""

    paths: tuple[str, ...]
    """The paths of these modules; empty for the model itself."""

    help: str
    """A way to save most of these bytes; empty if memopt has nothing but regions."""


# By autograd node, in the words of the report. The first that fits is taken.
_WORDS = (
    ("memopt SummedHead", "gradients of the head, which its loss made in forward"),
    ("memopt ", "inputs of memopt's ops"),
    ("Addmm", "inputs of linears"),
    ("Mm", "inputs of linears"),
    ("Linear", "inputs of linears"),
    ("Bmm", "factors of batched matrix products"),
    ("Baddbmm", "factors of batched matrix products"),
    ("ScaledDotProduct", "queries, keys, values and output of attention"),
    ("SafeSoftmax", "softmax weights"),
    ("Softmax", "softmax weights"),
    ("LogSoftmax", "log-probabilities"),
    ("Convolution", "inputs of convolutions"),
    ("MkldnnConvolution", "inputs of convolutions"),
    ("SlowConv", "inputs of convolutions"),
    ("NativeBatchNorm", "inputs of batch norms"),
    ("NativeGroupNorm", "inputs of group norms"),
    ("NativeLayerNorm", "inputs of layer norms"),
    ("FusedRmsNorm", "inputs of RMS norms"),
    ("NativeDropout", "masks of dropout"),
    ("Gelu", "inputs of gelu"),
    ("Silu", "inputs of silu"),
    ("Relu", "outputs of relu"),
    ("Hardswish", "inputs of hardswish"),
    ("Hardsigmoid", "inputs of hardsigmoid"),
    ("Hardtanh", "inputs of hardtanh"),
    ("LeakyRelu", "inputs of leaky_relu, or outputs in place"),
    ("Elu", "inputs of elu, or outputs in place"),
    ("Mish", "inputs of mish"),
    ("Sigmoid", "outputs of sigmoid"),
    ("Embedding", "indices of embeddings"),
    ("Mul", "factors of products"),
)

# Nodes of PyTorch whose output a recipe of memopt would compute again.
_COMPUTED_AGAIN = {
    "GeluBackward0": "gelu",
    "SiluBackward0": "silu",
    "HardswishBackward0": "hardswish",
    "HardsigmoidBackward0": "hardsigmoid",
    "MishBackward0": "mish",
    "NativeLayerNormBackward0": "layer_norm",
    "NativeGroupNormBackward0": "group_norm",
    "NativeBatchNormBackward0": "batch_norm",
    "FusedRmsNormBackward0": "rms_norm",
}

_ATTENTION = (
    "F.scaled_dot_product_attention keeps no weights where a fused kernel takes the call "
    '(transformers: attn_implementation="sdpa")'
)
_ATTENTION_DROPOUT = (
    "on a CPU PyTorch computes attention with dropout step by step: 0 as the dropout of attention"
)
_RECIPES = "convert with recipes=True, or memopt.recipes() around the call"
_NORM = "if it is a norm that memopt has: memopt.functional, or memopt.convert.register_rule"


def remaining(model: nn.Module, attributed: Iterable[Attributed]) -> tuple[Remaining, ...]:
    """Everything that a run of the model saved, the most bytes first."""
    modules = dict(model.named_modules())
    names = _Names(
        {path: type(module).__qualname__ for path, module in modules.items()},
        frozenset(path for path, module in modules.items() if settings_of(module) is not None),
        has_recipes(model),
        has_functions(model),
    )
    return grouped(attributed, names)


class _Names(NamedTuple):
    """The facts that the words depend on."""

    classes: Mapping[str, str]
    """Names of the modules' classes, by path."""

    regions: frozenset[str]
    """Paths of the modules whose forwards are checkpointed regions."""

    recipes: bool
    """Whether recipes are on in the model."""

    functions: bool
    """Whether PyTorch's functions are memopt's in it."""


def grouped(saved: Iterable[Attributed], names: _Names) -> tuple[Remaining, ...]:
    """One entry for all that is saved for the same reason in modules of one class."""
    composed = _composed_norms(saved := list(saved))
    groups: dict[tuple[str, str, str, str], tuple[int, dict[str, None]]] = {}
    for storage in saved:
        path, op, what, help = _reason(storage, names, composed)
        key = (what, op, names.classes.get(path, ""), help)
        nbytes, paths = groups.setdefault(key, (0, {}))
        groups[key] = (nbytes + storage.nbytes, {**paths, path: None})
    found = [
        Remaining(nbytes, what, op, from_class, tuple(paths), help)
        for (what, op, from_class, help), (nbytes, paths) in groups.items()
    ]
    return tuple(sorted(found, key=lambda entry: -entry.nbytes))


def _reason(
    storage: Attributed, names: _Names, composed: frozenset[str]
) -> tuple[str, str, str, str]:
    """Path, node, words and help."""
    op, path, classes = storage.op, storage.module, names.classes
    if path in names.regions:
        return path, "", "inputs of checkpointed regions", ""
    again = _COMPUTED_AGAIN.get(storage.made_by)
    if again is not None and not storage.op.startswith("memopt "):
        where = classes.get(storage.made_in, "")
        return (
            storage.made_in,
            storage.made_by,
            f"output of {again}, which `{where}` computes by itself",
            _function(again, names),
        )
    made_by_memopt = storage.made_by.startswith("memopt ")
    if made_by_memopt and not op.startswith("memopt ") and not names.recipes:
        return path, op, "output of a memopt op, made where no recipes are on", _RECIPES
    if path in composed and not op.startswith("memopt "):
        where = classes.get(path, "")
        return path, "RsqrtBackward0", f"`{where}` computes a root of a mean by itself", _NORM
    if op.startswith("MulBackward") and not storage.made_by and "Softmax" in storage.behind:
        return path, op, "masks of dropout on softmax weights", _ATTENTION_DROPOUT
    if storage.function == "dropout" or op.startswith("NativeDropout"):
        return path, op, "masks of dropout", _function("dropout", names)
    what = next((words for name, words in _WORDS if op.startswith(name)), f"saved by {op}")
    help = _ATTENTION if what == "softmax weights" else ""
    return path, op, what if op else "saved by what the output does not lead to", help


def _function(name: str, names: _Names) -> str:
    own = f"memopt.functional.{name} in its forward"
    return own if names.functions else f"convert with functional=True, or {own}"


def _composed_norms(saved: Iterable[Attributed]) -> frozenset[str]:
    """Paths of modules that call rsqrt, as norms do that are written as a formula."""
    return frozenset(s.module for s in saved if any(op.startswith("Rsqrt") for op in s.savers))
