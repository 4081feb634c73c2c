"""Modules with torch.nn's constructor arguments, repr and state_dict keys, on memopt's ops."""

from memopt.nn.add_norm import AddLayerNorm, AddRMSNorm
from memopt.nn.gelu import GELU
from memopt.nn.layer_norm import LayerNorm
from memopt.nn.layer_norm_gelu import LayerNormGELU
from memopt.nn.rms_norm import RMSNorm

__all__ = ["GELU", "LayerNorm", "LayerNormGELU"]
__all__ += ["AddLayerNorm", "AddRMSNorm", "RMSNorm"]
