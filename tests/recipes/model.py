"""A model of memopt's ops and PyTorch's, large enough for copies on the host."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

import memopt.functional as M
from tests.recipes.support import leaf

FEATURES = 32
X = leaf(16, FEATURES)
W, B = leaf(FEATURES, seed=1), leaf(FEATURES, seed=2)
LINEARS = [leaf(FEATURES, FEATURES, seed=3 + i) for i in range(3)]
LEAVES = [X, W, B, *LINEARS]


def model() -> Tensor:
    x = X * 1
    h = M.layer_norm(x, (FEATURES,), W, B)
    q, k, v = (F.linear(h, linear) for linear in LINEARS)
    return F.linear(M.gelu(q + k * v.sigmoid()), LINEARS[0]).square().mean()
