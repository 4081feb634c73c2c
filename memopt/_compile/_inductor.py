"""The only file of memopt.compile that knows PyTorch's internals. Where one of them is missing, its
import fails, and torch.compile decides alone.

Relied upon: Inductor's option `custom_partitioner_fn`, called with the joint graph after Inductor's
passes over it, and pickled and asked for a `uuid` to find compiled graphs again; its option
`layout_optimization`; in
torch._functorch.partitioners `min_cut_rematerialization_partition`, which takes orders as
`node.meta["recompute"]`, `cleanup_recompute_tags`, and `_size_of`; `fx_graph_cse`.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from torch import fx
from torch._functorch import config, partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import (
    _size_of,
    cleanup_recompute_tags,
    min_cut_rematerialization_partition,
)
from torch._inductor import config as inductor_config
from torch._inductor.config import custom_partitioner_fn  # noqa: F401  must be there
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

from memopt._compile.budget import OwnCuts
from memopt._compile.candidates import (
    EXACT,
    PYTORCH_AGAIN,
    Candidate,
    about_as_fast,
    candidate,
    freely,
    kept_by,
    within,
)
from memopt._compile.graph import JointGraph, read_joint_graph
from memopt._compile.policy import cut_at, tag

# Reads the share of torch.autograd.graph.region_activation_memory_budget off a node, where PyTorch
# has that.
_ANNOTATION = "_get_memory_budget_annotation"
_log = logging.getLogger("memopt.compile")
# PyTorch's partitioner is asked for what it keeps with these shares of what it would save.
_SHARES = (1.0, 0.7, 0.5, 0.3, 0.0)
_Halves = tuple[fx.GraphModule, fx.GraphModule]
_FILES = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))


class Partitioner(CustomPartitionerFn):
    """Divides a joint graph into forward and backward as memopt's policy says. Those of the same
    settings are equal, so that blocks that are compiled one by one share their graphs.
    """

    def __init__(self, budget: int | float | None) -> None:
        self._budget = budget

    def __eq__(self, other: object) -> bool:
        # Each call of a block compares them: it takes no hash of files.
        return type(other) is type(self) and repr(other._budget) == repr(self._budget)

    def __hash__(self) -> int:
        return hash(repr(self._budget))

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> _Halves:
        # A partitioner changes what it divides: PyTorch's gets copies.
        untouched = copy.deepcopy(gm.graph)
        joint = _read(gm, kwargs)
        own = _asked_share(gm.graph)
        pytorchs: dict[Candidate, _Halves] = {}

        def ask_pytorch(share: float) -> Candidate:
            graph = fx.GraphModule(gm, copy.deepcopy(untouched))
            # At its own the graph is as the user has it, whose mistakes PyTorch tells.
            with nullcontext() if share == own else _at(share):
                halves = _partition(graph, joint_inputs, kwargs)
            cut = cut_at(joint, kept_by(_inputs(halves[1]), joint))
            error = EXACT if share == 1 else PYTORCH_AGAIN
            found = candidate(f"PyTorch's at {share}", joint, cut, error)
            pytorchs[found] = halves
            return found

        chosen = _chosen(joint, self._budget, own, ask_pytorch)
        _log.info(
            "a graph of %d nodes: %d bytes kept for backward, %d at the peak as predicted, %d "
            "products recomputed, the cut is %s, the peak is at %s",
            *(len(joint.nodes), chosen.kept, chosen.most, chosen.again, chosen.name, chosen.where),
        )
        if chosen in pytorchs:
            return pytorchs[chosen]
        for node, policy in tag(joint, chosen.cut).items():
            node.meta["recompute"] = policy
        with _at(1.0):  # the tags say all
            return _partition(gm, joint_inputs, kwargs)

    def uuid(self) -> Any:
        return get_hash_for_files(_FILES, repr(self._budget))


def _chosen(
    joint: JointGraph,
    budget: int | float | None,
    own: float,
    ask_pytorch: Callable[[float], Candidate],
) -> Candidate:
    """The way that the graph is divided.

    Args:
        own: the share that PyTorch itself would keep.
        ask_pytorch: what its partitioner keeps at a share.

    Raises:
        ValueError: none is within the budget.
    """
    first = ask_pytorch(own)
    cuts = OwnCuts(joint, first.cut)
    if budget is None:
        fast = itertools.takewhile(
            lambda way: about_as_fast(way, first),
            (ask_pytorch(share) for share in _SHARES if share < own),
        )
        return freely(first, [*cuts.without_products(), *fast], joint.is_whole_step())
    most = int(budget * first.most) if isinstance(budget, float) else budget
    pytorchs = [first, *(ask_pytorch(share) for share in _SHARES if share != own)]
    chosen = within(most, [*cuts.fitting(most), *pytorchs])
    if chosen is None:
        floor = min([cuts.lowest(), *pytorchs], key=lambda way: way.most)
        raise ValueError(
            f"compile: budget must be at least {floor.most:,} bytes for this graph, even with all "
            f"of its {cuts.contractions} matrix products, convolutions and attentions "
            f"recomputed, got {most:,}; the least has its peak at {floor.where}"
        )
    return chosen


def _asked_share(graph: fx.Graph) -> float:
    """The share that PyTorch itself would keep: of a region around the graph, or the setting."""
    annotation = getattr(partitioners, _ANNOTATION, _no_share)
    asked = (share for node in graph.nodes if (share := annotation(node)) is not None)
    return float(next(asked, config.activation_memory_budget))


@contextmanager
def _at(share: float) -> Iterator[None]:
    """PyTorch's partitioner keeps this share, whatever a region around the graph asks for."""
    with (
        config.patch(activation_memory_budget=share),
        mock.patch.object(partitioners, _ANNOTATION, _no_share, create=True),
    ):
        yield


def _no_share(node: fx.Node) -> None:
    pass


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


def _inputs(half: fx.GraphModule) -> list[str]:
    return [node.name for node in half.graph.find_nodes(op="placeholder")]


def _partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]
) -> _Halves:
    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
