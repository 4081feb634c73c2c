"""Peaks of a model of transformers, compiled whole: `python -m tests.compile.peaks BERT 0.1`, where
the number is the share that dropouts zero.

Its tests run it in a process of its own, and whole: a budget is that of one graph, and behind
thousands of other tests the model was seen to be compiled as several. Why is not known.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

import memopt
from benchmarks.convert_models.model_terms import model_and_inputs
from benchmarks.convert_models.sizes import Sizes
from tests.compile.support import no_kernels, step_bytes

SIZES = Sizes(n=1, h=32, heads=4, kv_heads=2, m=96, words=128, tokens=32)


def most(name: str, dropout: float, compile: Callable[..., Any], share: float = 1.0) -> int:
    """The most bytes of a step by the allocator's count, with PyTorch's own budget at `share`."""
    torch.manual_seed(0)
    model, inputs = model_and_inputs(name, SIZES)
    model.float()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    settings = {"activation_memory_budget": share, "enable_autograd_cache": False}
    with no_kernels(), torch._functorch.config.patch(settings):
        compiled = compile(lambda: model(**inputs).loss, fullgraph=True)
        return step_bytes(compiled, model).most


def main(name: str, dropout: float) -> None:
    half = most(name, dropout, torch.compile, 0.5)
    within_half = functools.partial(memopt.compile, budget=half)
    peaks = {
        "torch": most(name, dropout, torch.compile),
        "memopt": most(name, dropout, memopt.compile),
        "torch at half": half,
        "memopt within that": most(name, dropout, within_half),
    }
    print(json.dumps(peaks))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], float(sys.argv[2]))
