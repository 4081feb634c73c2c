"""An anatomy as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import compress

from memopt._anatomy.findings import Findings
from memopt.memory.pieces import CATEGORIES, FUNCTIONALITY, in_words
from memopt.memory.sizes import as_text
from memopt.memory.trace import Share, Trace
from memopt.show.sections import Section, Tables

_MOST_ROWS = 12
_OF_LOSSES = ("loss", "log_softmax", "logsumexp", "cross_entropy")
"""Parts of the names of operators."""


def anatomy_tables(anatomy: Findings, formula: bool = False) -> Tables:
    """The whole report.

    Args:
        formula: whether closed formulas are shown next to the prediction.
    """
    sections = (*step_sections(anatomy, formula), *_advice(anatomy))
    return Tables(anatomy_title(anatomy), sections, _lines(anatomy))


def anatomy_title(anatomy: Findings) -> str:
    peak = anatomy.peak
    known = "measured" if anatomy.measured else "predicted"
    return (
        f"{anatomy.model}: {anatomy.parameters / 1e6:,.1f} million parameters, batch of "
        f"{anatomy.rows}, {anatomy.options}, on {anatomy.device}\n"
        f"peak {as_text(peak.total)}, {known}, in {peak.phase}"
        f"{f' of {peak.module}' if peak.module else ''} ({peak.op}"
        f"{f', {peak.line}' if peak.line else ''})"
        + (
            f"\nup to {as_text(peak.margin)} of it may not be allocated: "
            "a bound of kernels' scratch"
            if peak.margin
            else ""
        )
    )


def step_sections(anatomy: Findings, formula: bool = False) -> Iterator[Section]:
    """The tables, but for what would help."""
    yield _categories(anatomy, formula)
    yield _moments(anatomy)
    trace = anatomy.trace
    if trace.fates:
        rows = [[fate, as_text(nbytes)] for fate, nbytes in trace.fates.items()]
        yield Section("Activations, by fate", ("Fate", "bytes"), rows)
    yield Section("At the peak, by module", ("Module", "bytes", "Most of it"), _modules(anatomy))
    rows = [
        [
            as_text(p.nbytes),
            "x".join(map(str, p.shape)),
            p.dtype,
            in_words(p.category),
            p.module,
            p.op,
            p.line,
        ]
        for p in trace.largest[:_MOST_ROWS]
    ]
    pieces = ("Bytes", "shape", "dtype", "Category", "Module", "Op", "Line")
    yield Section("The largest pieces at the peak", pieces, rows)
    yield _work(anatomy)


def _advice(anatomy: Findings) -> Iterator[Section]:
    """The advice, if it was asked for and there is some."""
    if anatomy.advice:
        rows = [
            [as_text(a.peak), as_text(a.saved), f"{a.slower:+.1%}", a.what, a.how]
            for a in anatomy.advice
        ]
        columns = ("Peak", "less", "time, estimated", "What", "How")
        yield Section("What would help", columns, rows, is_urgent=True)


def _categories(anatomy: Findings, formula: bool) -> Section:
    headings = ["Category", "predicted", "measured", "error", "formula", "its error"]
    rows = []
    for row in anatomy.categories():
        values = [row.predicted, row.measured, row.error, row.formula, row.formula_error]
        rows.append([in_words(row.category), *map(_cell, values)])
    totals = [
        anatomy.predicted.peak.total if anatomy.predicted else None,
        anatomy.measured.peak.total if anatomy.measured else None,
    ]
    by_formula = sum(anatomy.formula.values()) if anatomy.formula else None
    known = totals[1] if totals[1] is not None else totals[0]
    error = (totals[0] - totals[1]) / totals[1] if totals[0] and totals[1] else None
    off = (by_formula - known) / known if by_formula and known else None
    rows.append(["total", *map(_cell, (*totals, error, by_formula, off))])
    if not formula:
        headings, rows = headings[:-2], [row[:-2] for row in rows]
    return _without_empty(Section("At the peak, by category", headings, rows))


def _moments(anatomy: Findings) -> Section:
    moments = (*anatomy.trace.moments, anatomy.trace.peak)
    headings = ("Moment", "total", *map(in_words, CATEGORIES))
    rows = [
        [m.name, as_text(m.total), *(as_text(m.by_category[category]) for category in CATEGORIES)]
        for m in moments
    ]
    return Section("Moments of the step", headings, rows)


def by_depth(shares: Sequence[Share], most: int = _MOST_ROWS) -> dict[str, dict[str, int]]:
    """Bytes by module and category, of modules as deep as gives at most `most` of them."""
    found: dict[str, dict[str, int]] = {}
    for depth in range(1, 12):
        deeper: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        for share in shares:
            path = ".".join(share.path.split(".")[:depth])
            deeper[path][share.category] += share.nbytes
        if found and (len(deeper) > most or len(deeper) == len(found)):
            break
        found = {path: dict(nbytes) for path, nbytes in deeper.items()}
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def _modules(anatomy: Findings) -> list[list[str]]:
    rows = []
    modules = by_depth(anatomy.trace.by_module, most=40)
    for path, nbytes in list(modules.items())[:_MOST_ROWS]:
        most = max(nbytes, key=lambda category: nbytes[category])
        share = nbytes[most] / sum(nbytes.values()) if nbytes[most] else 0
        total = as_text(sum(nbytes.values()))
        rows.append([module_name(path, anatomy.trace), total, f"{in_words(most)} ({share:.0%})"])
    return rows


def module_name(path: str, trace: Trace) -> str:
    """A module by its path. What belongs to no submodule by the largest of it: the loss and the
    logits that it reads, inputs, or what the model's own forward computes.
    """
    if path:
        return path
    own = next((piece for piece in trace.largest if not piece.module), None)
    if own is not None and own.category == FUNCTIONALITY:
        return in_words(FUNCTIONALITY)
    is_loss = own is not None and any(word in own.op for word in _OF_LOSSES)
    return "loss / logits" if is_loss else "the model's own forward"


def _work(anatomy: Findings) -> Section:
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in anatomy.trace.work:
        for place, value in enumerate((row.calls, row.flops, row.nbytes)):
            sums[row.kind, row.phase][place] += value
    rows = [
        [
            kind,
            phase,
            f"{calls:,}",
            f"{flops / 1e9:,.1f}",
            f"{nbytes / 1e9:,.2f}",
            f"{flops / nbytes:,.1f}" if nbytes else "",
        ]
        for (kind, phase), (calls, flops, nbytes) in sorted(sums.items())
    ]
    headings = ("Kind", "phase", "calls", "gflop", "gb moved", "flop/byte")
    return Section("Kinds of operators", headings, rows)


def _lines(anatomy: Findings) -> list[str]:
    """The lines below the tables."""
    lines = []
    trace = anatomy.trace
    if anatomy.flops_6nd:
        counted = trace.flops("forward", "backward")
        lines.append(
            f"counted {counted / 1e9:,.1f} GFLOP in forward and backward, 6ND is "
            f"{anatomy.flops_6nd / 1e9:,.1f} ({counted / anatomy.flops_6nd:.2f}x)"
        )
    if anatomy.overhead is not None:
        lines.append(f"the measured step took {anatomy.overhead:.2f}x its time without the ledger")
    if anatomy.allocator is not None:
        row = anatomy.allocator
        lines.append(
            f"PyTorch's allocator: {as_text(row.peak_allocated)} at its peak, "
            f"{as_text(row.peak_reserved)} reserved (the difference is fragmentation); when the "
            f"step began {as_text(row.before)}, of which {as_text(row.in_ledger)} are in the "
            "ledger. The CUDA context is not in either"
        )
    return [*lines, *anatomy.notes]


def _without_empty(section: Section) -> Section:
    filled = [any(row[i] for row in section.rows) for i in range(len(section.headings))]
    headings, *rows = (list(compress(row, filled)) for row in (section.headings, *section.rows))
    return Section(section.title, headings, rows)


def _cell(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:+.2%}" if isinstance(value, float) else as_text(value)
