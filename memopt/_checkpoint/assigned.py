"""The regions of an assignment, put on a model and taken off it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from memopt._checkpoint.joined import Joined
from memopt._checkpoint.sequential import checkpoint_sequential
from memopt._checkpoint.wrapper import (
    Settings,
    checkpoint_wrapper,
    set_settings,
    settings_of,
    unwrap_itself,
)
from memopt.assignment import KEEP, Assignment, Choice, Paths

# On a module whose region is to be undone without the `PutRegion`, of a copy of the model say: the
# settings it had before, or None.
_SETTINGS_BEFORE = "_memopt_settings_before"


@dataclass(frozen=True)
class PutRegion:
    """A module that was made a region, and what it was before."""

    module: nn.Module
    settings: Settings
    before: Settings | None
    """The settings of a region that it was already."""

    def take_off(self) -> None:
        """Give the module what it had. Settings that it got from elsewhere since stay."""
        noted = self.module.__dict__.get(_SETTINGS_BEFORE)
        if noted is self.settings:
            self.module.__dict__[_SETTINGS_BEFORE] = self.before
        if settings_of(self.module) is self.settings:
            _give(self.module, self.before)

    def note(self) -> None:
        """Have the module itself know what it was, for `revert_region`."""
        self.module.__dict__.setdefault(_SETTINGS_BEFORE, self.before)


def revert_region(module: nn.Module) -> None:
    """Give `module` what it had before the first region that was noted on it; nothing without."""
    if _SETTINGS_BEFORE in module.__dict__:
        before = module.__dict__.pop(_SETTINGS_BEFORE)
        if before is not None or settings_of(module) is not None:  # else it was unwrapped since
            _give(module, before)


def _give(module: nn.Module, settings: Settings | None) -> None:
    if settings is None:
        unwrap_itself(module)
    else:
        set_settings(module, settings)


def region_choices(paths: Iterable[str], segments: Iterable[Paths]) -> dict[Paths, Choice]:
    """The choices of regions, some of which are joined in segments."""
    region = Choice(checkpoint=True)
    of_first = {segment[0]: segment for segment in segments}
    inside = {path for segment in of_first.values() for path in segment}
    return {
        of_first.get(path, (path,)): region
        for path in paths
        if path in of_first or path not in inside
    }


def join_regions(model: nn.Module, at: Paths) -> None:
    """Have modules that are regions, and are called one after another, share one."""
    joined = Joined(at)
    for number, path in enumerate(at):
        _share(model.get_submodule(path), joined, number, alone=False)


def _share(module: nn.Module, joined: Joined, number: int, **changes: Any) -> None:
    """Have a module that is a region run in one that others share."""
    _change(module, joined=joined, number=number, **changes)


def _change(module: nn.Module, **changes: Any) -> None:
    settings = settings_of(module)
    assert settings is not None
    set_settings(module, replace(settings, **changes))


def put_regions(
    model: nn.Module, assignment: Assignment, or_whole: bool = False, **options: Any
) -> list[PutRegion]:
    """Make each module whose choice is a checkpoint a region, and each part of a module that is to
    be one, in place.

    Args:
        or_whole: calls that cannot run in chunks run whole.
        options: of `checkpoint_wrapper`, for all of them.

    Raises:
        TypeError, ValueError, OSError: as `checkpoint_wrapper`. Those before it are regions then.
    """
    put: dict[str, PutRegion] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for at, choice in assignment.choices.items():
        place = _place(assignment, choice)
        regions = dict.fromkeys(below(at, choice.parts), None if choice.checkpoint else place)
        if choice.checkpoint and len(at) == 1:
            regions[at[0]] = place
        in_chunks = _in_chunks(at, choice)
        for path, where in regions.items():
            module = modules[path]
            before = settings_of(module)
            is_whole = path == at[0]
            checkpoint_wrapper(
                module,
                offload=where,
                chunks=choice.chunks if path in in_chunks else None,
                keep_decisions=choice.keep_decisions and is_whole,
                **options,
            )
            if or_whole and path in in_chunks:
                _change(module, or_whole=True)
            put[path] = _put(module, before)
    for at, choice in assignment.choices.items():
        if _is_joined(at, choice):
            joined = Joined(at)
            for number, path in enumerate(at):
                module = modules[path]
                if number and module in [modules[other] for other in at[:number]]:
                    continue  # called twice: the second call begins anew
                alone = path in put
                before = put[path].before if alone else settings_of(module)
                if not alone:
                    checkpoint_wrapper(module, **options)
                place = _place(assignment, choice)
                _share(module, joined, number, alone=alone, offload=place)
                put[path] = _put(module, before)
    return list(put.values())


def _put(module: nn.Module, before: Settings | None) -> PutRegion:
    settings = settings_of(module)
    assert settings is not None
    return PutRegion(module, settings, before)


def _in_chunks(at: Paths, choice: Choice) -> Paths:
    """The paths of the regions that run in chunks."""
    return () if choice.chunks is None else below(at, choice.in_chunks)


def below(at: Paths, parts: Iterable[str]) -> Paths:
    """The paths of parts of modules, whose own are from there; the empty one is the module."""
    return tuple(f"{path}.{part}".strip(".") for path in at for part in parts)


def _is_joined(at: Paths, choice: Choice) -> bool:
    """Whether several modules share one region."""
    return choice.checkpoint and len(at) > 1 and choice.segments == 1


@dataclass(frozen=True)
class PutSegments:
    """An nn.Sequential that calls some of its elements as regions of several."""

    chain: nn.Sequential
    forward: InSegments

    def take_off(self) -> None:
        """Give the chain its own forward. Another one that it got since stays."""
        if self.chain.__dict__.get("forward") is self.forward:
            del self.chain.__dict__["forward"]


class InSegments:
    """The forward of an nn.Sequential whose elements run in turn, some of them as one."""

    def __init__(self, calls: list[Callable[[Any], Any]]) -> None:
        self._calls = calls

    def __call__(self, input: Any) -> Any:
        for call in self._calls:
            input = call(input)
        return input


def put_segments(model: nn.Module, assignment: Assignment) -> list[PutSegments]:
    """Run modules that share several regions in these, in place.

    Raises:
        ValueError: they are not neighbours in an nn.Sequential that calls them in turn, or their
            inputs are to be offloaded.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    by_chain: dict[str, dict[str, tuple[Paths, Choice]]] = {}
    for at, choice in assignment.choices.items():
        if choice.checkpoint and len(at) > 1 and choice.segments != 1:
            _check(modules, at, choice, assignment)
            by_chain.setdefault(_holder(at), {})[at[0]] = at, choice
    put = []
    for path, shared in by_chain.items():
        chain = modules[path]
        assert isinstance(chain, nn.Sequential)
        calls: list[Callable[[Any], Any]] = []
        left = list(paths_in(path, chain))
        while left:
            at, choice = shared.get(left[0], ((left[0],), KEEP))
            stages = [modules[path] for path in at]
            in_regions = partial(checkpoint_sequential, stages, choice.segments)
            calls.append(in_regions if len(at) > 1 else stages[0])
            left = left[len(at) :]
        forward = InSegments(calls)
        chain.__dict__["forward"] = forward
        put.append(PutSegments(chain, forward))
    return put


def calls_in_turn(module: nn.Module) -> bool:
    """Whether `module` is an nn.Sequential, with the forward of one."""
    is_own = type(module).forward is nn.Sequential.forward and "forward" not in module.__dict__
    return isinstance(module, nn.Sequential) and is_own


def paths_in(path: str, chain: nn.Module) -> Paths:
    """The paths of a chain's elements, in the order of their calls."""
    return tuple(f"{path}.{name}".lstrip(".") for name in chain._modules)


def _holder(at: Paths) -> str:
    return at[0].rpartition(".")[0]


def _check(
    modules: Mapping[str, nn.Module], at: Paths, choice: Choice, assignment: Assignment
) -> None:
    chain = modules.get(_holder(at))
    paths = paths_in(_holder(at), chain) if chain is not None and calls_in_turn(chain) else ()
    first = paths.index(at[0]) if at[0] in paths else 0
    if paths[first : first + len(at)] != at:
        raise ValueError(
            "assign: modules that share several regions must be neighbours in an nn.Sequential, "
            f"got {', '.join(at)}"
        )
    if _place(assignment, choice) is not None:
        raise ValueError(
            "assign: segments must be 1 where a region's inputs are offloaded, got "
            f"{choice.segments!r}, whose regions keep their inputs"
        )


def _place(assignment: Assignment, choice: Choice) -> Any:
    return assignment.place if choice.offload else None
