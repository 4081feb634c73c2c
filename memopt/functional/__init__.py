"""memopt's ops with torch.nn.functional's signatures.

Each is one fused kernel forward and one backward, on the CPU and on CUDA, and saves for backward
only what its docstring says: backward computes the rest again. Results match
torch.nn.functional's within rounding; statistics and sums are float32 (float64 for float64 tensors)
whatever the dtype. All run dispatcher ops (torch.ops.memopt.*): they work under torch.compile,
autocast, checkpointing and double backward. Forward-mode differentiation and torch.func.grad raise
an error.

Common rules. `input` is float32, float16, bfloat16 or float64, on the CPU or a CUDA device, of any
strides. Parameters have input's dtype or float32. Outputs have the strides that PyTorch's own ops
give them.

Under autocast activations, gated units, dropout and norms return their input's dtype, as PyTorch's
do on the CPU; of tensors of several dtypes, the widest. (On CUDA autocast has layer_norm and
rms_norm return float32 for 16-bit input as well.) So a float32 residual stream stays float32. What
is saved for the next linear is its 16-bit copy of such an output, and memopt.recipes() makes that
again. With a linear behind them the ops compute in the autocast dtype and return it. To have a norm
compute in 16 bits, cast its input.
"""

from memopt.functional.activation import *  # noqa: F403
from memopt.functional.activation import __all__ as _activations
from memopt.functional.channel_norm import batch_norm, group_norm, instance_norm
from memopt.functional.cross_entropy import (
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
    linear_logsumexp,
)
from memopt.functional.dropout import (
    activation_dropout,
    dropout,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    gelu_dropout,
)
from memopt.functional.gated import (
    gated,
    gated_packed,
    geglu,
    geglu_packed,
    swiglu,
    swiglu_packed,
)
from memopt.functional.linear import (
    activation_linear,
    gated_linear,
    gated_packed_linear,
    gelu_linear,
    layer_norm_linear,
    rms_norm_linear,
    swiglu_linear,
)
from memopt.functional.mlp import mlp
from memopt.functional.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_gelu,
    rms_norm,
)
from memopt.functional.sync_batch_norm import sync_batch_norm

__all__ = [
    "activation_dropout",
    "activation_linear",
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "cross_entropy",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "gated",
    "gated_linear",
    "gated_packed",
    "gated_packed_linear",
    "geglu",
    "geglu_packed",
    "gelu_dropout",
    "gelu_linear",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "layer_norm_gelu",
    "layer_norm_linear",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_logsumexp",
    "mlp",
    "rms_norm",
    "rms_norm_linear",
    "swiglu",
    "swiglu_linear",
    "swiglu_packed",
    "sync_batch_norm",
]
__all__ += _activations
