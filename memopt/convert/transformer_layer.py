"""The activation function of torch.nn's transformer layers, which is an attribute and no module.

The layers' fast path in evaluation asks for the attribute `activation_relu_or_gelu`, which their
constructor sets, and not for the function: it is taken as before.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from memopt import functional
from memopt.convert.eligible import takes

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def gelu(input: Tensor) -> Tensor:
    """memopt.functional.gelu, or PyTorch's where that does not take the call."""
    return functional.gelu(input) if takes(input) else F.gelu(input)


def relu(input: Tensor) -> Tensor:
    """memopt.functional.relu, or PyTorch's where that does not take the call."""
    return functional.relu(input) if takes(input) else F.relu(input)


_SWAPS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {F.gelu: gelu, F.relu: relu}
_ORIGINALS = {ours: theirs for theirs, ours in _SWAPS.items()}


def activation_function(module: nn.Module) -> str | None:
    """ "gelu" or "relu" if `module` is a transformer layer with that function of PyTorch's."""
    function = _function(module)
    return function.__name__ if function in _SWAPS else None


def swap_function(module: nn.Module) -> None:
    """Give a layer for which there is an `activation_function` memopt's."""
    module.__dict__["activation"] = _SWAPS[module.__dict__["activation"]]


def revert_function(module: nn.Module) -> None:
    """Undo `swap_function` where it was done."""
    function = _function(module)
    if function in _ORIGINALS:
        module.__dict__["activation"] = _ORIGINALS[function]


def _function(module: nn.Module) -> Callable[..., Tensor] | None:
    return module.__dict__.get("activation") if isinstance(module, _LAYERS) else None
