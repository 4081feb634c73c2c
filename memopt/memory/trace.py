"""A summary of a ledger, to read and to process: moments, a timeline, shares."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from memopt.memory.ledger import Ledger
from memopt.memory.pieces import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    OFFLOADED,
    RECIPE,
    RECOMPUTED,
    Entry,
    Mark,
    Piece,
)

# A drawing has no more points than this.
_MOST_POINTS = 1500
_MOST_LARGEST = 25
# A page says of so many tensors when they are alive, the largest.
_MOST_LIVES = 1000


@dataclass(frozen=True)
class Moment:
    """The memory that is alive at one time."""

    name: str
    total: int
    by_category: dict[str, int]
    """Bytes; they sum to `total`."""
    op: str
    """The operator that had run last."""
    phase: str
    module: str
    """The module whose forward or backward ran it, as far as it made something."""
    line: str
    margin: int = 0
    """Bytes of the total that may not be allocated: a kernel's scratch that has only a bound."""


@dataclass(frozen=True)
class Share:
    """A share of the peak: what one module, or one operator, has made of one category."""

    path: str
    """The module's path; in `by_op` the operator's name."""
    category: str
    nbytes: int
    pieces: int


@dataclass(frozen=True)
class Large:
    """One of the largest pieces of memory at the peak."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    fate: str
    module: str
    op: str
    line: str


@dataclass(frozen=True)
class Life:
    """One of the largest tensors of the step, and when it is alive."""

    name: str
    """The parameter's or input's name, or the operator that returned it."""
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    module: str
    line: str
    first: int
    """The number of the operator from which on it counts."""
    last: int
    """The number of the last one at which it counts."""


@dataclass(frozen=True)
class Phase:
    """A part of the step, on the timeline."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class KindOfWork:
    """The work that operators of one kind do in one module, in one phase."""

    module: str
    kind: str
    phase: str
    calls: int
    flops: int
    nbytes: int

    @property
    def intensity(self) -> float:
        """Floating-point operations by byte moved."""
        return self.flops / self.nbytes if self.nbytes else 0.0


@dataclass(frozen=True)
class Trace:
    """One step's memory."""

    peak: Moment
    moments: tuple[Moment, ...]
    """End of forward; the first gradient (the loss and the head have run backward); the most in
    backward; the most in the optimizer's step. Those that there are."""
    fates: dict[str, int]
    """Bytes of the activations at the end of forward by fate: kept, region input. And those not
    allocated then: recomputed from recipes or by regions, or offloaded, in the whole step."""
    timeline: tuple[tuple[int, ...], ...]
    """The number of an operator, and the bytes of each category of CATEGORIES then. Where there are
    many, each point is the largest of its neighbours'."""
    operators: tuple[str, ...]
    """The operator of each point of the timeline."""
    lives: tuple[Life, ...]
    """The largest tensors of the step, in the order in which they begin: at each point of the
    timeline those that are alive add up to its bytes, as far as they are not among the smallest."""
    phases: tuple[Phase, ...]
    by_module: tuple[Share, ...]
    by_op: tuple[Share, ...]
    largest: tuple[Large, ...]
    """The largest pieces at the peak, the most bytes first."""
    work: tuple[KindOfWork, ...]
    instants: int
    seconds: float = 0.0

    def moment(self, name: str) -> Moment:
        return next(moment for moment in (self.peak, *self.moments) if moment.name == name)

    def category_peaks(self) -> dict[str, int]:
        """The most bytes of each category at any time."""
        columns = zip(*(point[1:] for point in self.timeline), strict=True)
        return dict(zip(CATEGORIES, map(max, columns), strict=True))

    def flops(self, *phases: str) -> int:
        return sum(row.flops for row in self.work if not phases or row.phase in phases)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Point(NamedTuple):
    """The most bytes at an operator."""

    total: int
    totals: dict[str, int]
    place: int
    """The number of lines that the log has then."""


@dataclass
class _Span:
    """A piece is alive from one operator's point to another's."""

    piece: Piece
    first: int
    last: int


def trace_of(ledger: Ledger, seconds: float, entries: Sequence[Entry] | None = None) -> Trace:
    """The trace of a closed ledger.

    Args:
        entries: read in place of the ledger's own log, for another order of events.
    """
    log = _with_scratch(ledger) if entries is None else _merged(entries, ledger)
    late = [Entry(0, 1, piece) for piece in ledger.late]
    marks = [_moved(mark, ledger) for mark in ledger.marks] if entries is None else []
    totals = dict.fromkeys(CATEGORIES, 0)
    points: dict[int, _Point] = {}
    best: dict[str, tuple[int, Mark]] = {}
    total = sum(piece.nbytes for piece in ledger.late)
    for piece in ledger.late:
        totals[piece.category] += piece.nbytes
    first = None
    for place, entry in enumerate(log, 1):
        change = entry.sign * entry.piece.nbytes
        phase = ledger.phases[entry.instant]
        # A phase begins with what the one before has left: its first line may be an end.
        most = f"most in {phase}"
        best.setdefault(most, (total, Mark(most, entry.instant, place - 1)))
        total += change
        totals[entry.piece.category] += change
        if entry.instant not in points or total >= points[entry.instant].total:
            points[entry.instant] = _Point(total, dict(totals), place)
        for name in ("peak", most):
            if name not in best or total > best[name][0]:
                best[name] = (total, Mark(name, entry.instant, place))
        is_gradient = entry.piece.category == GRADIENTS and phase == "backward"
        if first is None and is_gradient and entry.sign > 0:
            first = Mark("first gradient", entry.instant, place)
    if not marks and "most in backward" in best:
        instant = ledger.marks[-1].instant
        place = sum(1 for entry in log if entry.instant <= instant)
        marks = [Mark("end of forward", instant, place)]
    chosen = [*marks[-1:], *([first] if first else [])]
    chosen += [best[k][1] for k in ("most in backward", "most in optimizer") if k in best]
    of_peak = best["peak"][1]
    alive = partial(_alive, [*late, *log])
    peak = alive(len(late) + of_peak.place)
    timeline = _thinned(points)
    return Trace(
        peak=_moment(ledger, log, of_peak, peak),
        moments=tuple(_moment(ledger, log, mark, alive(len(late) + mark.place)) for mark in chosen),
        fates=_fates(log, marks[-1].place if marks else len(log)),
        timeline=timeline,
        operators=tuple(ledger.ops[point[0]] for point in timeline),
        lives=_lives([*late, *log], len(late), points, len(ledger.ops)),
        phases=tuple(_phases(ledger.phases)),
        by_module=_shares((piece.module, piece) for piece in peak),
        by_op=_shares((piece.op, piece) for piece in peak),
        largest=tuple(map(_large, sorted(peak, key=lambda piece: -piece.nbytes)[:_MOST_LARGEST])),
        work=tuple(_work(ledger)),
        instants=len(ledger.ops),
        seconds=seconds,
    )


def _with_scratch(ledger: Ledger) -> list[Entry]:
    """The log, with lines for scratch."""
    log: list[Entry] = []
    done = 0
    for place, piece in ledger.scratch:
        log += ledger.log[done:place]
        log += [Entry(piece.born, 1, piece), Entry(piece.born, -1, piece)]
        done = place
    return log + ledger.log[done:]


def _moved(mark: Mark, ledger: Ledger) -> Mark:
    before = sum(place < mark.place for place, _ in ledger.scratch)
    return mark._replace(place=mark.place + 2 * before)


def _merged(entries: Sequence[Entry], ledger: Ledger) -> list[Entry]:
    """The given entries, with lines for scratch: when an operator's results are allocated, and
    before anything ends.
    """
    waiting = deque(piece for _, piece in ledger.scratch)
    log: list[Entry] = []
    for entry in entries:
        while waiting and (
            waiting[0].born < entry.instant or (waiting[0].born == entry.instant and entry.sign < 0)
        ):
            piece = waiting.popleft()
            log += [Entry(piece.born, 1, piece), Entry(piece.born, -1, piece)]
        log.append(entry)
    return log


def _alive(log: Sequence[Entry], place: int) -> list[Piece]:
    alive: dict[int, list[Piece]] = {}
    for entry in log[:place]:
        if entry.sign > 0:
            alive.setdefault(id(entry.piece), []).append(entry.piece)
        else:
            alive[id(entry.piece)].pop()
    return [piece for pieces in alive.values() for piece in pieces]


def _moment(ledger: Ledger, log: Sequence[Entry], mark: Mark, alive: Sequence[Piece]) -> Moment:
    """The moment of a mark. `alive`: the pieces that are alive then."""
    by_category = dict.fromkeys(CATEGORIES, 0)
    for piece in alive:
        by_category[piece.category] += piece.nbytes
    last = next((e.piece for e in reversed(log[: mark.place]) if e.sign > 0), None)
    at_instant = last is not None and last.born == mark.instant
    return Moment(
        mark.name,
        sum(by_category.values()),
        by_category,
        ledger.ops[mark.instant],
        ledger.phases[mark.instant],
        last.module if last is not None and at_instant else "",
        last.line if last is not None and at_instant else "",
        sum(piece.margin for piece in alive),
    )


def _fates(log: Sequence[Entry], place: int) -> dict[str, int]:
    fates: Counter[str] = Counter()
    for piece in _alive(log, place):
        if piece.category == ACTIVATIONS and piece.fate:
            fates[piece.fate] += piece.nbytes
    seen = {id(e.piece): e.piece for e in log if e.piece.fate in (RECIPE, RECOMPUTED, OFFLOADED)}
    for piece in seen.values():
        fates[piece.fate] += piece.nbytes
    return dict(fates)


def _thinned(points: dict[int, _Point]) -> tuple[tuple[int, ...], ...]:
    every = -(-len(points) // _MOST_POINTS)
    ordered = sorted(points.items())
    groups = (ordered[start : start + every] for start in range(0, len(ordered), every))
    chosen = (max(group, key=lambda point: point[1].total) for group in groups)
    return tuple((instant, *point.totals.values()) for instant, point in chosen)


def _lives(
    log: Sequence[Entry], late: int, points: dict[int, _Point], instants: int
) -> tuple[Life, ...]:
    """The largest lives. An operator's point is its most bytes: what begins behind it counts from
    the next operator on, and what ends before it until the one before.

    Args:
        log: begins with `late` lines that have no number.
    """
    spans: list[_Span] = []
    alive: defaultdict[int, list[_Span]] = defaultdict(list)
    for place, entry in enumerate(log, 1 - late):
        is_behind = place > 0 and place > points[entry.instant].place
        if entry.sign > 0:
            spans.append(_Span(entry.piece, entry.instant + is_behind, instants - 1))
            alive[id(entry.piece)].append(spans[-1])
        else:
            alive[id(entry.piece)].pop().last = entry.instant - (not is_behind)
    seen = [span for span in spans if span.piece.nbytes and span.first <= span.last]
    least = sorted((span.piece.nbytes for span in seen), reverse=True)[:_MOST_LIVES][-1:]
    return tuple(_life(span) for span in seen if span.piece.nbytes >= least[0])[:_MOST_LIVES]


def _life(span: _Span) -> Life:
    piece = span.piece
    return Life(
        piece.op,
        piece.nbytes,
        piece.shape,
        str(piece.dtype).removeprefix("torch."),
        piece.category,
        piece.module,
        piece.line,
        span.first,
        span.last,
    )


def _phases(names: Sequence[str]) -> Iterable[Phase]:
    begin = 0
    for instant in range(1, len(names) + 1):
        if instant == len(names) or names[instant] != names[begin]:
            yield Phase(names[begin], begin, instant - 1)
            begin = instant


def _shares(named: Iterable[tuple[str, Piece]]) -> tuple[Share, ...]:
    nbytes: Counter[tuple[str, str]] = Counter()
    pieces: Counter[tuple[str, str]] = Counter()
    for name, piece in named:
        nbytes[name, piece.category] += piece.nbytes
        pieces[name, piece.category] += 1
    return tuple(Share(*key, count, pieces[key]) for key, count in nbytes.most_common())


def _large(piece: Piece) -> Large:
    dtype = str(piece.dtype).removeprefix("torch.")
    return Large(
        piece.nbytes,
        piece.shape,
        dtype,
        piece.category,
        piece.fate,
        piece.module,
        piece.op,
        piece.line,
    )


def _work(ledger: Ledger) -> Iterable[KindOfWork]:
    sums: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for work in ledger.work:
        row = sums[work.module, work.kind, work.phase]
        row[0] += 1
        row[1] += work.flops
        row[2] += work.nbytes
    for key, values in sums.items():
        yield KindOfWork(*key, *values)
