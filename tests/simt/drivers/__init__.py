"""How each family's launchers are called: a module with TENSORS, forward and
backward for each, as kernels.py documents them, over run.Run.
"""

from __future__ import annotations

from types import ModuleType

from tests.support.cases import ACTIVATION_CASES, CHANNEL_NORM_CASES, FURTHER_ACTIVATION_CASES

from . import (
    activation,
    activation_dropout,
    add_norm,
    channel_norm,
    dropout_add_norm,
    gated,
    layer_norm,
    rms_norm,
)

# By OpCase.family. A family of the table of ops that is not here has no kernel of its own.
DRIVERS: dict[str, ModuleType] = {
    **dict.fromkeys(
        (case.family for case in (*ACTIVATION_CASES, *FURTHER_ACTIVATION_CASES)), activation
    ),
    **dict.fromkeys(("gated", "swiglu", "geglu"), gated),
    **dict.fromkeys(("gated_packed", "swiglu_packed", "geglu_packed"), gated),
    **dict.fromkeys((case.family for case in CHANNEL_NORM_CASES), channel_norm),
    "layer_norm": layer_norm,
    "layer_norm_gelu": layer_norm,
    "rms_norm": rms_norm,
    "add_layer_norm": add_norm,
    "add_rms_norm": add_norm,
    "activation_dropout": activation_dropout,
    "dropout_add_layer_norm": dropout_add_norm,
    "dropout_add_rms_norm": dropout_add_norm,
}
