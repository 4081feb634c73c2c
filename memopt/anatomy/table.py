"""An anatomy as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from memopt._sizes import as_text
from memopt.anatomy import sections
from memopt.anatomy.findings import Findings
from memopt.anatomy.pieces import CATEGORIES
from memopt.anatomy.sections import Section
from memopt.anatomy.trace import Share

_MOST_ROWS = 12


def text_of(anatomy: Findings) -> str:
    return sections.text_of(title_of(anatomy), sections_of(anatomy), _lines(anatomy))


def title_of(anatomy: Findings) -> str:
    peak = anatomy.peak
    return (
        f"{anatomy.model}: {anatomy.parameters / 1e6:,.1f} million parameters, batch of "
        f"{anatomy.rows}, {anatomy.options}, on {anatomy.device}\n"
        f"peak {as_text(peak.total)}, {'measured' if anatomy.measured else 'predicted'}, in {peak.phase}"
        f"{f' of {peak.module}' if peak.module else ''} ({peak.op}"
        f"{f', {peak.line}' if peak.line else ''})"
    )


def sections_of(anatomy: Findings) -> Iterator[Section]:
    """The tables of text and page."""
    yield _categories(anatomy)
    yield _moments(anatomy)
    trace = anatomy.trace
    if trace.fates:
        rows = [[fate, as_text(nbytes)] for fate, nbytes in trace.fates.items()]
        yield Section("Activations, by fate", ("Fate", "bytes"), rows)
    yield Section("At the peak, by module", ("Module", "bytes", "Most of it"), _modules(anatomy))
    rows = [
        [as_text(p.nbytes), "x".join(map(str, p.shape)), p.dtype, p.category, p.module, p.op, p.line]
        for p in trace.largest[:_MOST_ROWS]
    ]
    pieces = ("Bytes", "shape", "dtype", "Category", "Module", "Op", "Line")
    yield Section("The largest pieces at the peak", pieces, rows)
    yield _work(anatomy)
    if anatomy.advice:
        rows = [
            [as_text(a.peak), as_text(a.saved), f"{a.slower:+.1%}", a.what, a.how] for a in anatomy.advice
        ]
        columns = ("Peak", "saved", "time, estimated", "What", "How")
        yield Section("What would help", columns, rows)


def _categories(anatomy: Findings) -> Section:
    headings = ["Category", "predicted", "measured", "error", "formula", "its error"]
    rows = []
    for row in anatomy.categories():
        values = [row.predicted, row.measured, row.error, row.formula, row.formula_error]
        rows.append([row.category, *map(_cell, values)])
    totals = [
        anatomy.predicted.peak.total if anatomy.predicted else None,
        anatomy.measured.peak.total if anatomy.measured else None,
    ]
    formula = sum(anatomy.formula.values()) if anatomy.formula else None
    known = totals[1] if totals[1] is not None else totals[0]
    error = (totals[0] - totals[1]) / totals[1] if totals[0] and totals[1] else None
    off = (formula - known) / known if formula and known else None
    rows.append(["total", *map(_cell, (*totals, error, formula, off))])
    return _without_empty(Section("At the peak, by category", headings, rows))


def _moments(anatomy: Findings) -> Section:
    moments = (*anatomy.trace.moments, anatomy.trace.peak)
    headings = ("Moment", "total", *CATEGORIES)
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
        rows.append([path or "(the model)", as_text(sum(nbytes.values())), f"{most} ({share:.0%})"])
    return rows


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
            f"PyTorch's allocator: {as_text(row.peak_allocated)} at its peak, {as_text(row.peak_reserved)} "
            f"reserved (the difference is fragmentation); when the step began {as_text(row.before)}, "
            f"of which {as_text(row.in_ledger)} are in the ledger. The CUDA context comes on top"
        )
    return [*lines, *anatomy.notes]


def _without_empty(section: Section) -> Section:
    filled = [any(row[i] for row in section.rows) for i in range(len(section.headings))]
    return Section(
        section.title,
        [h for h, keep in zip(section.headings, filled, strict=True) if keep],
        [[c for c, keep in zip(row, filled, strict=True) if keep] for row in section.rows],
    )


def _cell(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:+.2%}" if isinstance(value, float) else as_text(value)

