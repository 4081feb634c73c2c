"""memopt for models that nobody rewrites.

After `import memopt`, the attribute `memopt.convert` is the function. The modules of this package:

    api                convert and revert
    patch              patch_functional
    report             what convert returns
    known              which swap a module gets, or why none
    activation, norm, gated   what a module computes, by structure and probes
    transformer_layer  the activation function of torch.nn's transformer layers
    swap, around       how a module's forward changes; recipes around a model's
    eligible           which calls memopt's ops take
    probe              stand-ins for modules
    measure            bytes saved for backward
"""

from memopt.convert.api import convert, revert
from memopt.convert.patch import patch_functional
from memopt.convert.report import Report

__all__ = ["Report", "convert", "patch_functional", "revert"]
