"""Modules with torch.nn's constructor arguments, repr and state_dict keys, on memopt's ops."""

from memopt.nn.gelu import GELU
from memopt.nn.layer_norm import LayerNorm
from memopt.nn.layer_norm_gelu import LayerNormGELU

__all__ = ["GELU", "LayerNorm", "LayerNormGELU"]
