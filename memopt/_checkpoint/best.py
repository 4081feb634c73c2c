"""The modules whose regions give a step the least peak, by its tree of calls.

A storage that is kept for backward has a home: the innermost call that contains its maker and all
that keep it. A region around that call drops it. Without one it stays, whatever regions are inside
of the call or next to it: whatever keeps it is outside of regions, or it is an argument of one. So
the bytes that stay with a set of regions, none inside another, are a sum over the tree: of storages
at home in modules that no region covers, and of arguments that only regions keep.

The peak is the bytes that stay, plus the most that one region takes when it is recomputed, with its
backward. For each bound on the latter the least that stays is found from the leaves to the root: a
module is a region, or its children are looked at. The set with the least sum is taken, or one of
the next that a predicted step shows to be lower (predicted_best.py): in backward bytes are let go
one after another, and the sum does not know which are gone when a region is recomputed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memopt.memory.calls.tree import CallTree, ModuleCall
from memopt.memory.paths import outermost_paths, paths_around

_LEAST_SHARE = 0.25
"""The share of the bytes that a module returns that its region has to drop more than."""
_WORTH_LIFTING = 0.02
"""The share of a step's bytes that a module which several others call has to keep."""
_MOST_CUTS = 12
"""The number of bounds on what a region may take that are looked at closely, the best by sums
first."""

CallContext = tuple[str, ...]
"""A module with those around its calls, from the outermost one."""


@dataclass
class ModulePlace:
    """A module's calls in one context."""

    path: str
    own: int = 0
    """Bytes that stay if no region is around it, and it is none."""
    inside: int = 0
    """Bytes as in `own`, with those of the places inside."""
    returned: int = 0
    working: int = 0
    """The most that a region takes in backward."""
    may_be_region: bool = False
    arguments: dict[int, int] = field(default_factory=dict)
    """Storages that regions keep and nothing else does, by number, and their bytes."""
    extra: int = 0
    """Bytes of those that no region outside of it can keep."""
    shared: int = 0
    """Bytes of those of others that are made here, or are passed on here, to several inside."""
    children: list[ModulePlace] = field(default_factory=list)


@dataclass(frozen=True)
class RegionSet:
    """A set of modules, none inside another, as regions."""

    paths: tuple[str, ...]
    stays: int
    """Bytes that are kept for backward then."""
    working: int
    """The most that one of them takes in backward, or an operator does in any case."""

    @property
    def peak(self) -> int:
        return self.stays + self.working


def best_cut(tree: CallTree, without: Collection[str] = (), limit: int | None = None) -> RegionSet:
    """The cut with the least peak by these sums; of several the one that keeps least.

    Args:
        without: paths of modules that are no regions.
        limit: a cut that keeps no more bytes goes before one that does.
    """
    return best_cuts(tree, without, limit)[0]


def best_cuts(
    tree: CallTree, without: Collection[str] = (), limit: int | None = None
) -> list[RegionSet]:
    """The best cut, and others that had the least sums under some bound, the best first."""
    ways: list[Mapping[str, CallContext]] = [{}]
    if lifted := _lifted(tree):
        ways.append(lifted)
    floor = _floor(tree)
    roots = (root for way in ways for root in _roots(tree, without, way))
    cuts = [cut for root in roots for cut in _best(root, floor, limit) if _none_inside(cut)]
    cuts.sort(key=lambda cut: (limit is not None and cut.stays > limit, cut.peak, cut.stays))
    return list({frozenset(cut.paths): cut for cut in reversed(cuts)}.values())[::-1]


def _none_inside(cut: RegionSet) -> bool:
    return len(outermost_paths(cut.paths)) == len(cut.paths)


def _roots(
    tree: CallTree, without: Collection[str], lifted: Mapping[str, CallContext]
) -> Iterator[ModulePlace]:
    """The root of the modules in their contexts. A module that another one calls than it is inside
    of by its path may not be a region beside that one: then also the roots without either of them.
    """
    root = places_of(tree, without, lifted)
    yield root
    possible = {place.path for place in _from_leaves(root) if place.may_be_region}
    inside: set[str] = set()
    around: set[str] = set()
    todo: list[tuple[ModulePlace, frozenset[str]]] = [(root, frozenset())]
    while todo:
        place, above = todo.pop()
        if place.may_be_region:
            if others := possible.intersection(paths_around(place.path)) - above:
                inside.add(place.path)
                around |= others
            above |= {place.path}
        todo += [(child, above) for child in place.children]
    for those in (inside, around) if inside else ():
        yield places_of(tree, those.union(without), lifted)


def cut_of(tree: CallTree, paths: Collection[str]) -> RegionSet:
    """These modules, none inside another, as a set."""
    root = places_of(tree, (), {})
    chosen = [place for place in _from_leaves(root) if place.path in paths]
    working = max((place.working for place in chosen), default=0)
    return RegionSet(tuple(paths), what_stays(root, chosen), max(working, _floor(tree)))


def places_of(
    tree: CallTree, without: Collection[str], lifted: Mapping[str, CallContext]
) -> ModulePlace:
    """The root of the modules in their contexts.

    Args:
        lifted: modules that are called by several others, and the context that these have in
            common. They count there, and what is between is no region. Others that are called by
            several are none.
    """
    contexts = _contexts(tree, lifted)
    places = {context: ModulePlace(context[-1]) for context in dict.fromkeys(contexts)}
    calls: defaultdict[CallContext, list[ModuleCall]] = defaultdict(list)
    receivers: defaultdict[int, dict[CallContext, None]] = defaultdict(dict)
    for context, call in zip(contexts, tree.calls, strict=True):
        places[context].own += call.own_bytes
        calls[context].append(call)
        for number in call.inputs if call.with_gradients else ():
            if not tree.storages[number].savers:
                receivers[number][context] = None
    for number, those in receivers.items():
        nbytes = tree.storages[number].nbytes
        longest = max(those, key=len)
        is_shared = any(longest[: len(each)] != each for each in those)
        for each in those:
            places[each].arguments[number] = nbytes
            places[each].extra += 0 if is_shared else nbytes
        if is_shared:
            around = contexts[tree.storages[number].maker]
            for each in those:
                around = _common(around, each[:-1])
            places[around].shared += nbytes
    between = _between(tree, lifted)
    several = _in_several(contexts)
    for context, place in reversed(places.items()):  # those inside come first
        mine = [call for call in calls[context] if call.with_gradients]
        place.inside += place.own
        place.returned = sum(call.output_bytes for call in mine)
        place.working = max((max(c.forward, c.backward) for c in mine), default=0)
        gain = place.inside - place.extra
        place.may_be_region = (
            bool(place.path and mine)
            and place.path not in without
            and place.path not in several
            and context not in between
            and gain > _LEAST_SHARE * place.returned
        )
        if len(context) > 1:
            parent = places[context[:-1]]
            parent.inside += place.inside
            parent.children.insert(0, place)
    return next(iter(places.values()))


def _contexts(tree: CallTree, lifted: Mapping[str, CallContext]) -> list[CallContext]:
    contexts: list[CallContext] = []
    for call in tree.calls:
        around: CallContext = contexts[call.parent] if call.parent >= 0 else ()
        contexts.append((*lifted.get(call.path, around), call.path))
    return contexts


def _in_several(contexts: Collection[CallContext]) -> set[str]:
    """Paths of modules that have several contexts."""
    found: defaultdict[str, set[CallContext]] = defaultdict(set)
    for context in contexts:
        found[context[-1]].add(context)
    return {path for path, those in found.items() if len(those) > 1 and path}


def _lifted(tree: CallTree) -> dict[str, CallContext]:
    """The outermost modules that several others call, and that keep enough."""
    contexts = _contexts(tree, {})
    several = _in_several(contexts)
    found: dict[str, CallContext] = {}
    kept: defaultdict[str, int] = defaultdict(int)
    for context, call in zip(contexts, tree.calls, strict=True):
        path = call.path
        if path in several and several.isdisjoint(context[:-1]):
            kept[path] += call.kept_bytes
            found[path] = _common(found.get(path, context[:-1]), context[:-1])
    return {
        path: context
        for path, context in found.items()
        if kept[path] >= _WORTH_LIFTING * tree.kept_bytes and path not in context
    }


def _between(tree: CallTree, lifted: Mapping[str, CallContext]) -> set[CallContext]:
    """The contexts from which lifted modules are called, up to where they count."""
    contexts = _contexts(tree, lifted)
    found: set[CallContext] = set()
    for call in tree.calls:
        if call.path in lifted:
            around = contexts[call.parent]
            while len(around) > len(lifted[call.path]):
                found.add(around)
                around = around[:-1]
    return found


def _common(one: CallContext, other: CallContext) -> CallContext:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


def _best(root: ModulePlace, floor: int, limit: int | None) -> Iterator[RegionSet]:
    """Cuts of which one is the best.

    An argument that several regions would keep is one storage. Whether it stays depends on all of
    them, and is no sum over the tree. So it counts for each, and then where it is made; what really
    stays says which was better.
    """
    places = _from_leaves(root)
    bounds = sorted({floor, *(p.working for p in places if p.may_be_region and p.working > floor)})
    found: dict[tuple[str, ...], RegionSet] = {}
    for once in (True, False):
        stays = _least_that_stays(places, bounds, once)
        ranked = sorted(
            (limit is not None and kept > limit, kept + bound, kept, bound)
            for kept, bound in zip(stays, bounds, strict=True)
        )
        for *_, bound in ranked[:_MOST_CUTS]:
            chosen = _chosen(places, bound, once)
            paths = tuple(dict.fromkeys(place.path for place in chosen))
            if paths not in found:
                working = max((place.working for place in chosen), default=0)
                found[paths] = RegionSet(paths, what_stays(root, chosen), max(working, floor))
    yield from found.values()


def what_stays(root: ModulePlace, chosen: Collection[ModulePlace]) -> int:
    """Bytes that are kept with these regions."""
    regions = set(map(id, chosen))
    arguments: dict[int, int] = {}
    nbytes, todo = 0, [root]
    while todo:
        place = todo.pop()
        if id(place) in regions:
            arguments |= place.arguments
        else:
            nbytes += place.own
            todo += place.children
    return nbytes + sum(arguments.values())


def _floor(tree: CallTree) -> int:
    """The most that an operator's backward takes above what is kept, whichever regions there are:
    by calls in which no other module may be a region. They may call some, as a layer calls what
    parametrizes its weight.
    """
    places = _from_leaves(places_of(tree, (), {}))
    possible = {place.path for place in places if place.may_be_region}
    around: set[int] = set()
    most = 0
    for number, call in reversed(list(enumerate(tree.calls))):  # those inside come first
        if number not in around:
            most = max(most, call.backward - call.kept_bytes)
        if number in around or call.path in possible:
            around.add(call.parent)
    return most


def _from_leaves(root: ModulePlace) -> list[ModulePlace]:
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += found[-1].children
    return found[::-1]


def _own(place: ModulePlace, once: bool) -> int:
    return place.own + place.shared * once


def _extra(place: ModulePlace, once: bool) -> int:
    return place.extra if once else sum(place.arguments.values())


def _least_that_stays(places: list[ModulePlace], bounds: list[int], once: bool) -> list[int]:
    """The least bytes that stay, for each bound on what a region may take.

    Args:
        places: all of them; the root is the last one.
    """
    allowed = torch.tensor(bounds, device="cpu")
    costs: dict[int, Tensor] = {}
    for place in places:
        cost = torch.full((len(bounds),), _own(place, once), device="cpu")
        for child in place.children:
            cost += costs.pop(id(child))
        if place.may_be_region:
            first = int(torch.searchsorted(allowed, place.working))
            cost[first:] = cost[first:].clamp(max=_extra(place, once))
        costs[id(place)] = cost
    found: list[int] = costs[id(places[-1])].tolist()
    return found


def _chosen(places: list[ModulePlace], bound: int, once: bool) -> list[ModulePlace]:
    """The regions of the best cut under one bound, in the order of their calls."""
    costs: dict[int, tuple[int, list[ModulePlace]]] = {}
    for place in places:
        cost, regions = _own(place, once), []
        for child in place.children:
            more, inside = costs.pop(id(child))
            cost += more
            regions += inside
        extra = _extra(place, once)
        if place.may_be_region and place.working <= bound and extra <= cost:  # the outer one of two
            cost, regions = extra, [place]
        costs[id(place)] = cost, regions
    return costs[id(places[-1])][1]
