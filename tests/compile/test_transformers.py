"""Proves: of unmodified models of transformers, compiled with memopt, backward holds less than
compiled by torch.compile alone, and about what it holds of the converted model in eager mode; its
results are as accurate as the eager model's.

The graphs are those that Inductor would generate code for; they run op by op.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from torch import fx, nn
from torch._functorch.partitioners import _size_of, min_cut_rematerialization_partition

import memopt
from benchmarks.convert_models.models import MODELS
from memopt._compile._inductor import Partitioner
from memopt._compile.ops import base
from memopt.memory.allocator import LiveBytes
from tests.compile.support import op_by_op
from tests.convert.support import DRAWS, assert_as_accurate, exact_step, step

pytest.importorskip("transformers")

# Every name that their configurations have for it.
DROPOUT = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout", "dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "dropout_rate"),
    "activation_dropout",
)


def make(name: str, dropout: float) -> nn.Module:
    model = MODELS[name].make()
    if dropout:
        model = MODELS[name].make(**{k: dropout for k in DROPOUT if hasattr(model.config, k)})
    model.config.use_cache = False
    return model


def held(model: nn.Module, inputs: Any) -> int:
    """Bytes of the outputs and of what is saved for backward, in the second step."""
    model(**inputs).loss.backward()
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        output = model(**inputs)
        live.mark()
        output.loss.backward()
    model.zero_grad(set_to_none=True)
    return live.marks[0].nbytes


class Beside(Partitioner):
    """Notes what torch.compile alone would hold of the same graphs. (To compile them once more
    would take as long again.)
    """

    held_by_torch = 0

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        forward, _ = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        (output,) = forward.graph.find_nodes(op="output")
        kept = {base(node) for node in output.args[0] if isinstance(node, fx.Node)}
        self.held_by_torch += sum(_size_of(node) for node in kept if node.op == "call_function")
        return super().__call__(gm, joint_inputs, **kwargs)


@pytest.mark.slow
@pytest.mark.usefixtures("minimum_cut")
@pytest.mark.parametrize(
    ("name", "dropout"),
    [(name, 0.1 if place % 2 else 0.0) for place, name in enumerate(MODELS)],
)
def test_bytes_and_results(name: str, dropout: float) -> None:
    model, plain, inputs = make(name, dropout), make(name, dropout), MODELS[name].inputs()
    partitioner = Beside(None)
    options = memopt.compile.options() | {"custom_partitioner_fn": partitioner}
    model.compile(backend=op_by_op(options))
    ours = held(model, inputs)
    assert ours < 0.9 * partitioner.held_by_torch
    if not dropout:
        draws = []
        for seed in DRAWS:
            weights = MODELS[name].make(seed=seed).state_dict()
            for one in (model, plain):
                one.load_state_dict(weights)
            draws.append((step(model, inputs), step(plain, inputs), exact_step(plain, inputs)))
        assert_as_accurate(draws)
    memopt.convert(plain)
    assert ours <= 1.03 * held(plain, inputs)
