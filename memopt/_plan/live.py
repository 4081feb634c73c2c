"""A model that is being planned: its step, looked at, timed, and watched with a plan on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import nn

from memopt._checkpoint.blocks import is_layer
from memopt._checkpoint.chosen_modules import Modules, as_predicate, choose_modules
from memopt._checkpoint.measured import idle_modules
from memopt._checkpoint.row_stand_ins import are_predicted, row_modules_among
from memopt._convert.head import find_heads, probed_heads
from memopt._extension import HAS_NATIVE
from memopt._plan import ranks
from memopt._plan.choices import ONLY_RECIPES
from memopt._plan.found import cannot_be_regions, found_blocks
from memopt._plan.observe import Observed, predicted, watched
from memopt._plan.parts import BlockParts, block_parts, chunks_for, row_candidates
from memopt._plan.profile import Profile, StepSeconds, check_skips_some
from memopt._plan.samples import profile_of
from memopt._plan.seconds import TimedStages, measured_seconds
from memopt._plan.terms import Terms, uniform
from memopt.applied import assigned
from memopt.assignment import KEEP, Assignment
from memopt.memory.allocator import free_bytes, most_above
from memopt.memory.asked import has_values
from memopt.memory.batches import Unheld
from memopt.memory.calls.measure import without_optimizer
from memopt.memory.parallel import bucket_bytes, is_sharded, used_map_bytes
from memopt.memory.paths import is_inside
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.predicted.predict import Looks
from memopt.memory.speed import speed_of
from memopt.memory.step import Step, with_its_tensors
from memopt.memory.unchanged import Written, unchanged

BlocksLike = Modules | Sequence[str] | None

_SLACK = 0.05
"""A share of the bytes of a step that is timed: choices change places, which moves its peak a
little.
"""


@dataclass
class Live:
    """A step of a model, and how to look at it."""

    step: Step
    blocks: tuple[str, ...]
    target: str
    """The device that is predicted for."""
    steps: int
    """How many are timed for each sample; 0: times are estimated."""
    runs: bool = True
    """Whether the model and the batch have values, and are where the plan is for."""
    predictable: bool = True
    _plain: Observed | None = None
    _heads: tuple[str, ...] | None = None
    entry: nn.Module | None = None
    """The module that runs the model: DistributedDataParallel around it; None: the model itself."""
    looks: Looks = field(default_factory=Looks)
    written: Written = field(default_factory=Written)
    """Everything that steps which were looked at write of what is there before: where time and an
    allocator's bytes are measured, no mode may be on that sees it.
    """

    chunks: bool = HAS_NATIVE
    """Whether the head and parts of blocks may run in chunks of rows."""

    no_regions: dict[str, str] = field(default_factory=dict)
    """Blocks that cannot be recomputed as they ran, and why, once that is known."""
    no_parts: set[str] = field(default_factory=set)
    """Parts of blocks of which that is known."""
    _unheld: Unheld | None = None
    """The batch, once its memory was let go of."""
    _ran: bool = False
    """Whether the step runs with that batch."""
    _is_probed: bool = False

    def at(self, step: Step) -> Live:
        """Return this with another step of its model, without times."""
        runs = self.runs and has_values(step.model, step.batch)
        return replace(self, step=step, steps=0, runs=runs, _plain=None)

    def let_go(self) -> None:
        """Hold no memory of the batch any more: it would be there beside those of training. What is
        predicted from then on is without its values, and nothing runs; see `take_back`.
        """
        if self._unheld is None:
            self._unheld, self._ran = Unheld(self.step.batch), self.runs
        self.step, self.runs = replace(self.step, batch=self._unheld.without_values), False

    def take_back(self) -> None:
        """Have the batch again, if somebody else has held it."""
        batch = None if self._unheld is None else self._unheld.found()
        if batch is not None:
            self.step, self.runs, self._unheld = replace(self.step, batch=batch), self._ran, None

    def _check_batch(self, error: Exception | None = None) -> None:
        """Raises ValueError where a step has to run, or needs values, and the batch is gone."""
        if self._unheld is not None and not self.runs:
            raise ValueError(
                f"{self.step.who}: the batch that the plan was made with must still be there, "
                f"since a step of {type(self.step.model).__name__} looks at values, got none: "
                "nobody has held it since the plan was applied; make the plan anew"
            ) from error

    def probe(self) -> None:
        """Find the blocks that cannot be regions, by a forward of the model, once. Nothing where it
        has no values, or its parameters are gathered for each call.
        """
        if not self._is_probed:
            self.no_regions, self._is_probed = self._cannot_run_again(self.blocks), True

    def _cannot_run_again(self, paths: Sequence[str]) -> dict[str, str]:
        return cannot_be_regions(self.step, paths) if self.runs else {}

    def look(self, assignment: Assignment) -> Observed:
        """A step with an assignment: predicted, or where it asks for values watched. The most bytes
        of all ranks, which then ask for the same steps.
        """
        possible = assignment.without_regions(self.no_regions)
        return self._looked(lambda: self._look(possible))

    def _looked(self, look: Callable[[], Observed]) -> Observed:
        observed = self.looks.depth.run(look, lambda o: len(o.ledger.ops), check_skips_some)
        self.written.add(observed.written.tensors)
        nbytes, buckets = observed.nbytes, bucket_bytes(self.entry)
        used = used_map_bytes(self.entry)  # above the base, where a step that runs has it
        nbytes = replace(
            nbytes,
            base=nbytes.base + buckets,
            above=nbytes.above + used,
            peak=nbytes.peak + buckets + used,
        )
        kinds, sites, follows = ranks.first((observed.kinds, observed.sites, observed.follows))
        return replace(
            observed,
            kinds=kinds,
            sites=sites,
            follows=follows,
            nbytes=ranks.with_most(nbytes),
            no_regions=tuple(self.no_regions),
        )

    def plain(self) -> Observed | None:
        """The step without a plan; None where it would have to run: there may be no room for it."""
        if self._plain is None and self.predictable:
            try:
                self._plain = self._looked(self._predicted_plain)
            except DependsOnValues:
                if not self.runs:
                    raise
                self.predictable = False
        return self._plain

    def _predicted_plain(self) -> Observed:
        keep = Assignment(dict.fromkeys(self.blocks, KEEP))
        return predicted(self.step, keep, self.blocks, self.target, self.looks, with_tree=True)

    def heads(self) -> tuple[str, ...]:
        """The linears outside of blocks whose logits can be computed in chunks with their loss."""
        if self._heads is None:
            self._heads = ranks.first(self._found_heads() if self.chunks else ())
        return self._heads

    def _found_heads(self) -> tuple[str, ...]:
        step = self.step
        found = find_heads(step.model, ())
        if not found and self.runs and step.function is None and not is_sharded(step.model):
            found = probed_heads(step.model, step.batches()[0], ())
        return tuple(
            head.path
            for module, head in found.items()
            if module.training
            and not any(head.path == path or is_inside(head.path, path) for path in self.blocks)
        )

    def parts(self) -> dict[str, BlockParts]:
        """The parts of blocks that are worth a region of their own; none where no step can be
        predicted. Blocks of one kind have the same, and one of them is probed.
        """
        plain = self.plain()
        if plain is None or plain.tree is None:
            return {}
        kinds: dict[str, int] = {}
        for path, kind in zip(plain.paths, plain.kinds, strict=True):
            kinds.setdefault(path, kind)
        first = {kind: path for path, kind in reversed(kinds.items())}
        speed, again = speed_of(self.step, self.target), self.no_parts.union(plain.tree.again)
        found = block_parts(plain.tree, speed, first.values(), again)
        rows = self._rows(plain, first.values(), again)
        inside = [f"{path}.{part}" for path, one in found.items() for part in one.every]
        if bad := self._cannot_run_again(inside):
            self.no_parts.update(bad)
            found = block_parts(plain.tree, speed, first.values(), again.union(bad))
        modules = dict(self.step.model.named_modules())
        there = {}
        for path, kind in kinds.items():
            mine = replace(found[first[kind]], **rows.get(first[kind], {}))
            is_there = all(f"{path}.{part}".strip(".") in modules for part in mine.every)
            if (mine.levels or mine.rows) and is_there:
                there[path] = mine
        return ranks.first(there)

    def _rows(
        self, plain: Observed, blocks: Iterable[str], without: Collection[str]
    ) -> dict[str, dict[str, Any]]:
        """The parts of blocks that work on each row alone, and in how many chunks they are to run,
        by block.
        """
        tree, modules = plain.tree, dict(self.step.model.named_modules())
        if tree is None or not self.chunks or not are_predicted(self.step.batch):
            return {}
        found = {}
        for block in blocks:
            candidates = {
                path: modules[path]
                for path in row_candidates(tree, block, without)
                if path == block or not is_layer(modules[path])
            }
            paths = row_modules_among(self.step.who, candidates, plain.given, self.step.autocast)
            if paths:
                chunks = max(chunks_for(tree, path) for path in paths)
                parts = tuple(path[len(block) + 1 :] for path in paths)
                found[block] = {"rows": parts, "chunks": chunks}
        return found

    def _look(self, assignment: Assignment) -> Observed:
        if self.predictable:
            try:
                return predicted(self.step, assignment, self.blocks, self.target, self.looks)
            except DependsOnValues as error:
                self._check_batch(error)
                if not self.runs:
                    raise
                self.predictable = False
        self._check_batch()
        with self.looks.facts(self.step), assigned(self.step.model, assignment.staying()):
            return watched(self.step, self.blocks)

    def profile(self) -> Profile:
        """Bytes and seconds, of all ranks."""
        self.probe()
        parts = self.parts()
        profile, samples = profile_of(self.blocks, self.look, parts, self.heads(), self.plain())
        if self.runs and self.steps:
            above = [(sample, observed.nbytes.above) for sample, observed in samples]
            # Where some blocks have recipes the others pay as well, since what they save passes a
            # hook too. So each is timed without the other.
            for choice in dict.fromkeys((KEEP, ONLY_RECIPES)):
                # The head, which is in chunks in the samples, is whole in these.
                whole = uniform(profile, choice, Terms()).peak - profile.base
                above.append((profile.uniform(choice), whole))
            room = free_bytes(next(self.step.model.parameters()).device)
            fitting = [
                sample
                for sample, nbytes in above
                if ranks.least(int(room is None or (1 + _SLACK) * nbytes <= room))
            ]
            times = list(self._timed(profile, fitting))
            if times and len(times[0].stages) != len(profile.paths) + 2:
                # A function that the model keeps calls blocks by a reference of its own: the copy
                # that is predicted with does not show them.
                self.predictable, self._plain = False, None
                return self.profile()
            if times:
                profile.set_seconds(times, is_timed=True)
        return profile

    def _timed(self, profile: Profile, samples: Sequence[Assignment]) -> Iterator[StepSeconds]:
        """Time samples in turns, so that what changes while they run changes all of them; each
        after a step of its own, as in training. The longest of all ranks.
        """
        for number in range(self.steps):
            for sample in samples:
                assignment = profile.handed_on(sample, number)
                with self.looks.facts(self.step), assigned(self.step.model, assignment):
                    self._seconds()
                    timed = self._seconds()
                stages = ranks.with_longest(timed.stages)
                yield StepSeconds(assignment, stages, number, timed.behind)

    def _seconds(self) -> TimedStages:
        return self.looks.depth.run(
            lambda: measured_seconds(self.step, self.blocks, self.written),
            lambda timed: len(timed.stages),
        )

    def watch(self) -> int:
        """The most bytes above what is there already, in a real forward and backward of the model
        as it is; the most of all ranks.
        """
        device = next(self.step.model.parameters()).device
        if device.type == "cpu":  # without buckets, which are in the base
            observed = self.looks.depth.run(
                lambda: watched(self.step, self.blocks), lambda o: len(o.ledger.ops)
            )
            return ranks.most(observed.nbytes.above)
        step = self.step if self.entry is None else replace(self.step, model=self.entry)

        def run() -> None:
            for batch in step.batches():
                step.forward_and_backward(batch)

        with unchanged(*step.roots, written=self.written):
            above = with_its_tensors(
                step.model,
                lambda: self.looks.depth.run(lambda: most_above(device, run), lambda above: above),
            )
        return ranks.most(above)


def blocks_of(step: Step, blocks: BlocksLike, target: str, runs: bool = False) -> tuple[str, ...]:
    """The paths of a model's blocks: given, or found (found.py).

    Raises:
        TypeError, ValueError: there are none, one is inside another, or one that was given never
            runs, or without gradients alone.
    """
    model = step.model
    if isinstance(blocks, (list, tuple)) and all(isinstance(path, str) for path in blocks):
        paths = _given(step, blocks)
    elif blocks is None:
        paths = found_blocks(step, target, runs)
        if not paths:
            raise ValueError(
                "plan: model must have modules that it calls with gradients, or blocks= must name "
                f"some, got {type(model).__name__} without"
            )
    else:
        predicate = as_predicate("plan: blocks", cast("Modules | None", blocks))
        paths = tuple(
            path for path, _ in choose_modules(replace(step, batch=None), predicate).modules
        )
    if not paths:
        raise ValueError(
            f"plan: blocks must choose submodules of the model, got none in {type(model).__name__}"
        )
    for path in paths:
        around = next((other for other in paths if is_inside(path, other)), None)
        if around is not None:
            raise ValueError(
                f"plan: no block may be inside another, got {path!r} inside {around!r}"
            )
    return paths


def _given(step: Step, blocks: Sequence[Any]) -> tuple[str, ...]:
    modules = dict(step.model.named_modules())
    missing = [path for path in blocks if path not in modules or not path]
    if missing or not blocks:
        raise ValueError(
            "plan: blocks must be paths of the model's submodules, got "
            f"{missing[0] if missing else 'none'!r}"
        )
    twice = next((path for path, count in Counter(blocks).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"plan: blocks must name each module once, got {twice!r} twice")
    idle = idle_modules(without_optimizer(step), blocks)
    if idle:
        path, why = next(iter(idle.items()))
        raise ValueError(
            "plan: blocks must be called in the model's forward with gradients enabled, got "
            f"{path!r}, which the batch {why}"
        )
    return tuple(map(str, blocks))
