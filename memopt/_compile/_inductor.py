"""The only file of memopt.compile that knows PyTorch's internals. Where one of them is missing, its
import fails, and torch.compile decides alone.

Relied upon: Inductor's option `custom_partitioner_fn`, called with the joint graph after Inductor's
passes over it, and pickled and asked for a `uuid` to find compiled graphs again; its option
`layout_optimization`; in
torch._functorch.partitioners `min_cut_rematerialization_partition`, which takes orders as
`node.meta["recompute"]`, `cleanup_recompute_tags`, and `_size_of`; `fx_graph_cse`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx
from torch._functorch import config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import (
    _size_of,
    cleanup_recompute_tags,
    min_cut_rematerialization_partition,
)
from torch._inductor import config as inductor_config
from torch._inductor.config import custom_partitioner_fn  # noqa: F401  must be there
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

from memopt._compile.budget import fit_graph
from memopt._compile.graph import JointGraph, read_joint_graph
from memopt._compile.policy import cut_at, tag
from memopt._compile.timeline import predict_graph

_log = logging.getLogger("memopt.compile")
_FILES = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))


class Partitioner(CustomPartitionerFn):
    """Divides a joint graph into forward and backward as memopt's policy says."""

    def __init__(self, budget: int | float | None) -> None:
        self._budget = budget

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        alone = None
        if isinstance(self._budget, float):
            # Before the graph is read: the partitioner puts another in its place.
            alone = _kept(_partition(gm, joint_inputs, kwargs)[0])
        joint = _read(gm, kwargs)
        plan = fit_graph(joint, self._bytes(joint, alone))
        for node, policy in tag(joint, plan.cut).items():
            node.meta["recompute"] = policy
        _log.info(
            "a graph of %d nodes: %d bytes kept for backward, %d at the peak as predicted, %d "
            "products recomputed",
            *(len(joint.nodes), plan.bytes.kept, plan.bytes.most, plan.run_again),
        )
        return _partition(gm, joint_inputs, kwargs)

    def _bytes(self, joint: JointGraph, alone: frozenset[str] | None) -> int:
        """The budget in bytes. `alone` are the nodes that torch.compile alone would keep."""
        if self._budget is None:
            return sys.maxsize
        if alone is None:
            return int(self._budget)
        kept = frozenset(node for node in joint.nodes if node.name in alone)
        return int(self._budget * predict_graph(joint, cut_at(joint, kept)).most)

    def uuid(self) -> Any:
        return get_hash_for_files(_FILES, repr(self._budget))


def _read(gm: fx.GraphModule, kwargs: dict[str, Any]) -> JointGraph:
    """The graph as the partitioner itself prepares it, so that the tags are not merged."""
    gm.graph.eliminate_dead_code()
    if config.cse:
        gm.graph = fx_graph_cse(gm.graph)
    cleanup_recompute_tags(gm, is_default_partition=False)
    return read_joint_graph(
        gm.graph,
        forward_outputs=kwargs["num_fwd_outputs"],
        parameters=kwargs.get("static_lifetime_input_indices") or (),
        channels_last=inductor_config.layout_optimization,
        nbytes=_size_of,
    )


def _kept(forward: fx.GraphModule) -> frozenset[str]:
    """The names of what a forward returns, which is its outputs and what it keeps."""
    (output,) = forward.graph.find_nodes(op="output")
    return frozenset(value.name for value in output.args[0] if isinstance(value, fx.Node))


def _partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
