"""The table of ops under test.

A property that all ops promise is tested once, over OP_CASES; a new op joins those tests by a
module of this folder that says how it is called (op.py says what to fill in), and a line here.
"""

from __future__ import annotations

from .activation import ACTIVATION_CASES, FURTHER_ACTIVATION_CASES, GELU_CASES
from .add_norm import ADD_NORM_CASES
from .call import Call, Results, as_tuple, evaluate
from .channel_norm import (
    BATCH_NORM_CASES,
    CHANNEL_NORM_ACTIVATION_CASES,
    CHANNEL_NORM_CASES,
    GROUP_NORM_CASES,
)
from .dropout import (
    ACTIVATION_DROPOUT_CASES,
    ALL_DROPOUT_ADD_NORM_CASES,
    DROPOUT_ADD_NORM_CASES,
    DROPOUT_CASES,
)
from .gated import FURTHER_GATED_CASES, GATED_CASES, PACKED_CASES
from .layer_norm import NORM_CASES
from .op import OpCase
from .rms_norm import RMS_NORM_CASES

OP_CASES: tuple[OpCase, ...] = (
    *ACTIVATION_CASES,
    *GATED_CASES,
    *PACKED_CASES,
    *NORM_CASES,
    *RMS_NORM_CASES,
    *ADD_NORM_CASES,
    *DROPOUT_CASES,
)

# Those that compute further functions in the same kernels join the tests of values.
FURTHER_CASES: tuple[OpCase, ...] = (*FURTHER_ACTIVATION_CASES, *FURTHER_GATED_CASES)
VALUE_CASES: tuple[OpCase, ...] = (*OP_CASES, *FURTHER_CASES)

# All that normalise rows: of layer_norm's family, rms_norm's, and with a residual in front.
NORMALIZING_CASES: tuple[OpCase, ...] = (*NORM_CASES, *RMS_NORM_CASES, *ADD_NORM_CASES)

# The first case of every function: for what does not depend on the keyword choices.
FAMILIES = tuple({case.family: case for case in reversed(VALUE_CASES)}.values())[::-1]

# The first case of every dispatcher op: for what PyTorch does around an op, whatever it computes.
EACH_OP = tuple({case.public_op: case for case in reversed(OP_CASES)}.values())[::-1]

__all__ = [
    "ACTIVATION_CASES",
    "ACTIVATION_DROPOUT_CASES",
    "ADD_NORM_CASES",
    "ALL_DROPOUT_ADD_NORM_CASES",
    "BATCH_NORM_CASES",
    "CHANNEL_NORM_ACTIVATION_CASES",
    "CHANNEL_NORM_CASES",
    "DROPOUT_ADD_NORM_CASES",
    "DROPOUT_CASES",
    "EACH_OP",
    "FAMILIES",
    "FURTHER_ACTIVATION_CASES",
    "FURTHER_CASES",
    "GATED_CASES",
    "GELU_CASES",
    "GROUP_NORM_CASES",
    "NORMALIZING_CASES",
    "NORM_CASES",
    "OP_CASES",
    "PACKED_CASES",
    "RMS_NORM_CASES",
    "VALUE_CASES",
    "Call",
    "OpCase",
    "Results",
    "as_tuple",
    "evaluate",
]
