"""The file of memopt.compile that hands the policy to PyTorch. It, _inductor_code.py,
_inductor_head.py and _inductor_sizes.py alone know PyTorch's internals. Where one of those is
missing that this relies upon, its import fails, and torch.compile decides alone.

Relied upon: Inductor's option `custom_partitioner_fn`, called with the joint graph after Inductor's
passes over it, and pickled and asked for a `uuid` to find compiled graphs again; its option
`layout_optimization`; in torch._functorch.partitioners `min_cut_rematerialization_partition`, which
takes orders as `node.meta["recompute"]`, and `cleanup_recompute_tags`; `fx_graph_cse`.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from torch import fx
from torch._functorch import config, partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import (
    cleanup_recompute_tags,
    min_cut_rematerialization_partition,
)
from torch._inductor import config as inductor_config
from torch._inductor.config import custom_partitioner_fn  # noqa: F401  must be there
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

from memopt._compile._inductor_sizes import (
    compile_anew_beyond,
    largest_sizes,
    own_sizes,
    without_guards,
)
from memopt._compile.budget import OwnCuts
from memopt._compile.candidates import (
    EXACT,
    PYTORCH_AGAIN,
    Candidate,
    about_as_fast,
    candidate,
    freely,
    kept_by,
    lowest,
    within,
)
from memopt._compile.graph import JointGraph, read_joint_graph
from memopt._compile.ops import Sizes, sizes_are
from memopt._compile.policy import Cut, cut_at, tag

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
        ways = _Ways(gm, joint_inputs, kwargs)
        own, largest = own_sizes(ways.joint), largest_sizes(ways.joint)
        try:
            return self._divided(ways, largest)
        except ValueError:
            if own == largest:
                raise
            # It keeps the budget for this batch, but for none that is larger.
            return self._divided(_Ways(gm, joint_inputs, kwargs), own)

    def _divided(self, ways: _Ways, sizes: Sizes) -> _Halves:
        with sizes_are(sizes):
            chosen = _chosen(ways, self._budget)
            halves = ways.halves(chosen)
        if isinstance(self._budget, int):
            compile_anew_beyond(ways.joint, sizes)
        _log.info(
            "a graph of %d nodes: %d bytes kept for backward, %d at the peak (%s), %d products "
            "recomputed, the cut is %s, the peak is at %s",
            *(len(ways.joint.nodes), chosen.kept, chosen.most),
            *(chosen.how, chosen.again, chosen.name, chosen.where),
        )
        return halves

    def uuid(self) -> Any:
        return get_hash_for_files(_FILES, repr(self._budget))


class _Ways:
    """The candidates for a graph, with the halves that they divide it into. The partitioner changes
    what it divides, and gets copies.
    """

    def __init__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]
    ) -> None:
        self._whole, self._inputs, self._kwargs = gm, joint_inputs, kwargs
        self._untouched = copy.deepcopy(gm.graph)
        self.joint = _read(gm, kwargs)
        self._prepared = gm.graph
        self.own_share = _asked_share(gm.graph)
        self._halves: dict[Cut, _Halves] = {}
        self._seen: dict[Cut, Candidate] = {}

    def pytorchs(self, share: float) -> Candidate:
        """The choice of PyTorch's partitioner with this share of what it would save."""
        graph = copy.deepcopy(self._untouched)
        # At its own the graph is as the user has it, whose mistakes PyTorch tells.
        with nullcontext() if share == self.own_share else _at(share):
            halves = self._partition(graph)
        names = [node.name for node in halves[1].graph.find_nodes(op="placeholder")]
        cut = cut_at(self.joint, kept_by(names, self.joint))
        self._halves[cut] = halves
        error = EXACT if share == 1 else PYTORCH_AGAIN
        return candidate(f"PyTorch's at {share}", self.joint, cut, error)

    def halves(self, way: Candidate) -> _Halves:
        """Forward and backward as this candidate divides them."""
        if way.cut not in self._halves:
            graph = copy.deepcopy(self._prepared)
            orders = tag(self.joint, way.cut)
            for node, of_copy in zip(self._prepared.nodes, graph.nodes, strict=True):
                if node in orders:
                    of_copy.meta["recompute"] = orders[node]
            with _at(1.0):  # the tags say all
                self._halves[way.cut] = self._partition(graph)
        return self._halves[way.cut]

    def count(self, way: Candidate) -> Candidate:
        """The candidate with the peak of the code that Inductor generates for it. Where there are
        parts of Inductor that are not known, with what was predicted.
        """
        if way.cut not in self._seen:
            self._seen[way.cut] = self._count(way)
        return self._seen[way.cut]

    def counted(self) -> list[Candidate]:
        """Returns those that were counted."""
        return list(self._seen.values())

    def _count(self, way: Candidate) -> Candidate:
        try:
            from memopt._compile._inductor_code import peak_of_code

            number = self._kwargs["num_fwd_outputs"]
            with without_guards(self.joint):
                peak = peak_of_code(*self.halves(way), number)
        except Exception as error:  # not the user's, and no reason to fail
            _log.info("peaks are predicted, and not counted in Inductor's code: %r", error)
            return way
        return way._replace(most=peak.most, least=peak.most, where=peak.where, how="counted")

    def _partition(self, graph: fx.Graph) -> _Halves:
        module = fx.GraphModule(self._whole, graph)
        return min_cut_rematerialization_partition(module, self._inputs, **self._kwargs)


def _chosen(ways: _Ways, budget: int | float | None) -> Candidate:
    """The way that the graph is divided.

    Raises:
        ValueError: none is within the budget.
    """
    own = ways.pytorchs(ways.own_share)
    cuts = OwnCuts(ways.joint, own.cut)
    less = (ways.pytorchs(share) for share in _SHARES if share < ways.own_share)
    if budget is None:
        fast = itertools.takewhile(lambda way: about_as_fast(way, own), less)
        return freely(
            own, [*cuts.without_products(), *fast], ways.joint.is_whole_step(), ways.count
        )
    most = int(budget * ways.count(own).most) if isinstance(budget, float) else budget
    pytorchs = [own, *(ways.pytorchs(share) for share in _SHARES if share != ways.own_share)]
    chosen = within(most, lambda aim: [*cuts.fitting(aim), *pytorchs], ways.count)
    if chosen is not None:
        return chosen
    # PyTorch's, whose predictions err most, among those that are counted: no budget is refused that
    # one of them keeps.
    floor = lowest(cuts.tried(), [*pytorchs, *ways.counted()], ways.count)
    if floor.most > most:
        raise ValueError(
            f"compile: budget must be at least {floor.most:,} bytes for this graph, even with all "
            f"of its {cuts.contractions} matrix products, convolutions and attentions "
            f"recomputed, got {most:,}; the least has its peak at {floor.where}"
        )
    return floor


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
    )
