"""Modules with torch.nn's constructor arguments, repr and state_dict keys, on memopt's ops."""

from memopt.nn.activation import (
    ELU,
    GELU,
    Activation,
    Hardsigmoid,
    Hardswish,
    LeakyReLU,
    Mish,
    QuickGELU,
    ReLU,
    ReLU6,
    ReLUSquared,
    Sigmoid,
    SiLU,
)
from memopt.nn.activation_linear import ActivationLinear, GatedLinear, GELULinear
from memopt.nn.add_norm import AddLayerNorm, AddRMSNorm
from memopt.nn.cross_entropy import LinearCrossEntropy
from memopt.nn.dropout import Dropout
from memopt.nn.dropout_add_norm import DropoutAddLayerNorm, DropoutAddRMSNorm
from memopt.nn.gated import GEGLU, Gated, SwiGLU
from memopt.nn.layer_norm import LayerNorm
from memopt.nn.layer_norm_gelu import LayerNormGELU
from memopt.nn.mlp import MLP
from memopt.nn.norm_linear import LayerNormLinear, RMSNormLinear
from memopt.nn.rms_norm import RMSNorm
from memopt.nn.sync_batch_norm import SyncBatchNorm

__all__ = [
    "ELU",
    "GEGLU",
    "GELU",
    "MLP",
    "Activation",
    "ActivationLinear",
    "AddLayerNorm",
    "AddRMSNorm",
    "Dropout",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "GELULinear",
    "Gated",
    "GatedLinear",
    "Hardsigmoid",
    "Hardswish",
    "LayerNorm",
    "LayerNormGELU",
    "LayerNormLinear",
    "LeakyReLU",
    "LinearCrossEntropy",
    "Mish",
    "QuickGELU",
    "RMSNorm",
    "RMSNormLinear",
    "ReLU",
    "ReLU6",
    "ReLUSquared",
    "SiLU",
    "Sigmoid",
    "SwiGLU",
    "SyncBatchNorm",
]
