"""Rule for torch.nn's transformer layers, whose activation function is an attribute and no module.

The layers' fast path in evaluation looks at the attribute `activation_relu_or_gelu`, which their
constructor sets, and not at the function. So it is taken as before.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from memopt import functional
from memopt._convert.match import Answer, Context
from memopt._convert.supported import supports
from memopt._convert.swap import AttributeSwap, replaces
from memopt.recipes import is_kept_anyway

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@replaces(F.gelu)
def gelu(input: Tensor) -> Tensor:
    """memopt.functional.gelu, or PyTorch's where that does not support the call."""
    return functional.gelu(input) if supports(input) else F.gelu(input)


@replaces(F.relu)
def relu(input: Tensor) -> Tensor:
    """memopt.functional.relu where that is a gain, or PyTorch's."""
    return functional.relu(input) if supports(input) and is_kept_anyway(input) else F.relu(input)


_SWAPS: dict[Callable[..., Tensor], AttributeSwap] = {
    F.gelu: AttributeSwap("activation", gelu),
    F.relu: AttributeSwap("activation", relu, saves_input_for_output=True),
}


def transformer_layer(module: nn.Module, context: Context) -> Answer | None:
    """PyTorch's gelu or relu in the attribute `activation`; other rules swap the modules inside."""
    if not isinstance(module, _LAYERS):
        return None
    function = module.__dict__.get("activation")
    return next((swap for original, swap in _SWAPS.items() if original is function), None)
