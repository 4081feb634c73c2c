"""The tables of benchmarks/offload.py, and whether its goals were reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.offload_ways import WHOLE
from benchmarks.summary import describe, table

GOAL_TIME = 1.005  # of a step without offload, where the link hides it all
GOAL_PEAK_ERROR = 0.05


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown: a table for each case."""
    head = ["", "step", "over the first", "peak, MB", "formula", "away and back, MB"]
    head += ["GB/s out, back", "stall", "same bits"]
    parts = [describe(dict(run))]
    for key, case in run["cases"].items():
        if "variants" not in case:
            parts += [f"{key}: not measured: {case['error']}"]
            continue
        rows = []
        for name, found in case["variants"].items():
            ratio = found["over_baseline"]
            peak = found["peak_bytes"]
            rates = stall = predicted = ""
            if "out_stall_seconds" in found:
                rates = " ".join(
                    f"{found[f'{way}_bytes_per_second'] / 1e9:.3g}" for way in ("out", "back")
                )
                waited = found["out_stall_seconds"] + found["back_stall_seconds"]
                stall = f"{1e3 * waited:.3g} ms"
            if "formula_bytes" in found:
                predicted = f"{found['formula_bytes'] / 1e6:,.0f} ({found['formula_error']:+.1%})"
            rows.append(
                [
                    name,
                    f"{1e3 * found['seconds']['median']:.4g} ms",
                    f"{ratio['median']:.3f} ({ratio['q1']:.3f}-{ratio['q3']:.3f})",
                    "" if peak is None else f"{peak / 1e6:,.0f}",
                    predicted,
                    f"{found['bytes_out'] / 1e6:,.0f}, {found['bytes_back'] / 1e6:,.0f}",
                    rates,
                    stall,
                    "yes" if found["same_bits"] else "no",
                ]
            )
        rows += [[name, f"failed: {why}", *[""] * 7] for name, why in case["failed"].items()]
        parts += [f"**{key}**: {verdict(case)}", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def verdict(case: Mapping[str, Any]) -> str:
    """Sums up the arithmetic, and whether the goals were reached, in one line."""
    found = case["arithmetic"]
    whole, variants = case["stack"] == WHOLE, case["variants"]
    speed = (
        f"F = {found['operations_per_second'] / 1e12:.3g} T operations/s, "
        f"B = {found['link_bytes_per_second']['out'] / 1e9:.3g} GB/s"
    )
    ours = [name for name in variants if name.startswith("memopt")]
    if whole:
        hidden = True  # the last of them offloads what the link hides
        words = [f"{speed}: the link hides {found['fraction_of_whole']:.0%} of what is saved"]
    else:
        hidden = found["hides_inputs"]
        says = "can" if hidden else "cannot"
        words = [
            f"{speed}; (12 h + s) 2 / e = {found['left']:,.0f}, F / B = {found['right']:,.0f}: "
            f"the link {says} hide the inputs"
        ]
    if case["device"] != "cpu" and ours:
        last = variants[ours[-1]]
        if hidden:
            median = last["over_baseline"]["median"]
            reached = "reached" if median <= GOAL_TIME else "missed"
            words.append(f"time: {median - 1:+.1%}, goal {GOAL_TIME - 1:+.1%} {reached}")
        if not whole:
            reached = "reached" if abs(last["formula_error"]) <= GOAL_PEAK_ERROR else "missed"
            words.append(
                f"peak: formula {last['formula_error']:+.1%}, goal {GOAL_PEAK_ERROR:.0%} {reached}"
            )
    return "; ".join(words) + "."
