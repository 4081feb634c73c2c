"""memopt's own rules, in the order in which they are asked.

The first that answers decides. Rules that a user registered (memopt.convert.register_rule) are
asked before these. To teach `convert` something new, write a rule in a file of this folder and
enter it here.
"""

from memopt._convert.match import Rule
from memopt._convert.rules.activation import activation_module, other_function
from memopt._convert.rules.gated import gated_unit
from memopt._convert.rules.norm import norm
from memopt._convert.rules.torch_nn import (
    calls_function,
    memopts_own,
    other_module_of_torch,
    torch_module,
    transformer_layer,
)

RULES: tuple[Rule, ...] = (
    # By class.
    memopts_own,  # left, without a word
    transformer_layer,  # the activation function that torch.nn's layers hold in an attribute
    torch_module,  # torch.nn's LayerNorm, GELU, ... and subclasses that keep the forward
    calls_function,
    other_module_of_torch,  # left
    # By structure and by what they compute, whatever the class is called: stand-ins are probed.
    norm,  # at most two vectors: layer norm or RMS norm
    activation_module,  # no tensors: one of memopt's activations
    gated_unit,  # at most three linears: down(f(gate(x)) up(x)), and parts of it
    other_function,  # left
)
