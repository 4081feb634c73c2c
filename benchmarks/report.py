"""The tables and figures of the README and docs/, from benchmarks/results.

`python -m memopt bench --report` (or `python -m benchmarks.report`) writes every table between
`<!-- begin: NAME -->` and `<!-- end -->` anew, draws the figures that a JSON file is enough for,
and fails if something is not backed by a result: a table without one, a picture without a JSON of
its name, a sentence of CLAIMS with other figures than the results give, a result that names no
machine, versions or command. `--check` writes nothing, and fails as well where something would
change.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import checkpoint_overhead, compile, convert_bytes, hero
from benchmarks.cli import RESULTS, op_results
from benchmarks.summary import describe, geometric_mean, measured, operation, table

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- begin: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
NAMED_BY_ALL = ("machine", "versions")

Run = dict[str, Any]


class Missing(Exception):
    """A result that a page needs is not there."""


def result(name: str) -> Run:
    """benchmarks/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise Missing(f"no result {path.name}")
    run: Run = json.loads(path.read_text())
    return run


def under(run: Run, *parts: str) -> str:
    """Tables under the line that says where and when they were measured."""
    return "\n\n".join([f"*{describe(run)}*", *parts]) + "\n"


def by_threads(names: Sequence[str], labels: dict[tuple[str, str], str]) -> str:
    """The ratio PyTorch's time / memopt's, of each op of `labels`: its name and direction."""
    settings = [(dtype, threads) for dtype in ("float32", "bfloat16") for threads in (1, 2)]
    head = ["op", "direction", "goal", *(f"{d}, {t} thread{'s'[: t - 1]}" for d, t in settings)]
    rows, described = [], None
    for name in names:
        run = result(name)
        described = described or describe(run)
        for (op, direction), label in labels.items():
            cases = [c for c in measured(run) if (operation(c), c["direction"]) == (op, direction)]
            if not cases:
                continue
            goal = run["goals"].get(direction)
            row = [label, direction, "" if goal is None else f"{goal:.1f}x"]
            for dtype, threads in settings:
                found = [c for c in cases if (c["dtype"], c["threads"]) == (dtype, threads)]
                ratios = [c["variants"]["memopt"]["ratio"]["median"] for c in found]
                row.append(
                    f"**{geometric_mean(ratios):.2f}x** ({min(ratios):.2f}x to {max(ratios):.2f}x)"
                )
            rows.append(row)
    return f"*{described}*\n\n{table(head, rows)}\n"


def kernels() -> str:
    both = ("forward", "backward")
    labels = {("layer_norm", d): "layer_norm" for d in both}
    for form, label in (("none", "erf"), ("tanh", "tanh")):
        labels[f"layer_norm_gelu, {form}", "forward+backward"] = f"layer_norm_gelu, {label}"
        labels |= {(f"gelu, {form}", d): f"gelu, {label}" for d in both}
    return by_threads(("cpu_layer_norm", "cpu_layer_norm_gelu", "cpu_gelu"), labels)


def blocks() -> str:
    names = ("add_norm", "gated", "dropout", "layer_norm_linear", "gelu_linear", "mlp")
    ops = {
        "add_layer_norm": "add_layer_norm",
        "add_rms_norm": "add_rms_norm",
        "swiglu": "swiglu",
        "geglu": "geglu, tanh",
        "dropout": "dropout",
        "gelu_dropout": "gelu_dropout",
        "dropout_add_layer_norm": "dropout_add_layer_norm",
        "layer_norm_linear": "layer_norm_linear",
        "gelu_linear, tanh": "gelu_linear, tanh",
        "gelu_linear, none": "gelu_linear, erf",
        "mlp_gpt2": "mlp, GPT-2's",
        "mlp_llama": "mlp, Llama's",
    }
    labels = {(op, "forward+backward"): label for op, label in ops.items()}
    return by_threads([f"cpu_{name}" for name in names], labels)


def demo() -> str:
    run = result("cpu_demo")
    rows = []
    eager = run["modes"][0]["figures"]
    for mode in run["modes"]:
        row = [mode["mode"]]
        for name, digits in (("step_ms", 1), ("saved_mb", 1), ("peak_mb", 1)):
            value = mode["figures"][name]
            share = "" if mode["mode"] == "eager" else f" ({value / eager[name]:.2f}x)"
            row.append(f"{value:.{digits}f}{share}")
        agreed = mode["agreement"]
        if agreed is not None:
            exact = agreed["largest_difference"] == 0
            how = "every bit" if exact else f"within {agreed['largest_difference']:.1e}"
        row.append("" if agreed is None else f"{agreed['reference']}'s, {how}")
        rows.append(row)
    where = f"{run['machine']['processor']}, {run['machine']['cores']} cores"
    head = ["mode", "step, ms", "saved, MB", "peak, MB", "losses of all steps"]
    return f"*{where}; torch {run['versions']['torch']}.*\n\n{table(head, rows)}\n"


def host_time() -> str:
    run = result("cpu_checkpoint_overhead")
    ways = {
        checkpoint_overhead.OURS: "`memopt.checkpoint`",
        checkpoint_overhead.TORCH: "`torch.utils.checkpoint`",
        "torch, reentrant": "its reentrant kind",
        checkpoint_overhead.FAIRSCALE: "FairScale",
    }
    rows = []
    for case in run["cases"].values():
        row = [case["name"], str(case["saved_tensors"])]
        for name in ways:
            found = case["variants"].get(name, {})
            if "beyond_us" not in found:
                row.append("")
                continue
            share = found.get("beyond_over_torch")
            row.append(
                f"{found['beyond_us']['median']:.1f} us"
                + (f" ({share['median']:.2f}x)" if share else "")
            )
        rows.append(row)
    return under(run, table(["module", "saved tensors", *ways.values()], rows))


def compiled() -> str:
    run = result("cpu_compile")
    return under(run, compile.tables(run))


def converted() -> str:
    run = result("cpu_convert_bytes")
    return under(run, convert_bytes.readme_table(run["cases"]))


def planned() -> str:
    run = result("cpu_plan")
    titles = {
        "chain": "Twelve equal blocks, as GPT-2's",
        "ladder": "A U-Net of unequal blocks",
        "encoder-decoder": "An encoder-decoder, as T5",
        "wide and narrow": "Wide blocks beside narrow ones",
    }
    parts = []
    for name, case in run["cases"].items():
        plain = case["variants"]["plain"]["peak_bytes"]
        rows = []
        for way, found in case["variants"].items():
            time, predicted = found["over_plain"], found.get("predicted_over_plain")
            rows.append(
                [
                    way,
                    f"{found['peak_bytes'] / plain:.2f}",
                    f"{time['median']:.2f} ({time['q1']:.2f} to {time['q3']:.2f})",
                    "" if predicted is None else f"{predicted:.2f}",
                ]
            )
        head = ["way", "peak over plain", "time over plain (quartiles)", "predicted time"]
        parts += [f"{titles.get(name, name)}:", table(head, rows)]
    return under(run, *parts)


TABLES: dict[str, Callable[[], str]] = {
    "kernels": kernels,
    "ops of blocks": blocks,
    "demo": demo,
    "host time": host_time,
    "compiled models": compiled,
    "bytes of converted models": converted,
    "plans": planned,
}


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def claim_of_compiled() -> str:
    cases = [c["variants"] for n, c in result("cpu_compile")["cases"].items() if n != "curve"]
    held, times = [], []
    for ways in cases:
        held.append(ways["memopt.compile"]["held_bytes"] / ways["torch.compile"]["held_bytes"])
        times.append(ways["memopt.compile"]["over_torch"]["median"])
    return (
        f"{_span(held)} of the bytes that `torch.compile` holds, at {geometric_mean(times):.2f} of "
        "its time"
    )


def claim_of_bytes() -> str:
    cases = result("cpu_convert_bytes")["cases"]
    share = {n: f"{c['after_bytes'] / c['before_bytes']:.2f}x" for n, c in cases.items()}
    others = ", ".join(f"{name} {share[name]}" for name in ("GPT-2", "BERT", "ViT", "T5"))
    return f"Llama: {share['Llama']} of the saved bytes, at {times_of('convert_llama')}; {others}"


def times_of(op: str) -> str:
    cases = [c for c in measured(result("cpu_convert")) if c["op"] == op]
    times = [1 / case["variants"]["memopt"]["ratio"]["median"] for case in cases]
    return f"{_span(times)} of eager's time"


def claim_of_plans() -> str:
    ways = result("cpu_plan")["cases"]["chain"]["variants"]
    uniform = ways["checkpoint every block"]["over_plain"]["median"]
    ours = ways["plan at checkpoint every block"]["over_plain"]["median"]
    return f"takes {ours:.2f} of eager's time instead of {uniform:.2f}"


CLAIMS: dict[str, tuple[Callable[[], str], ...]] = {
    "README.md": (claim_of_bytes, claim_of_plans, claim_of_compiled),
}
"""Sentences with figures, made from the results; each must stand in its page, bold or not."""

FIGURES: dict[str, Callable[[Path], None]] = {
    "cpu_compile": lambda out: compile.draw(result(out.stem)["cases"]["curve"]["variants"], out),
    "cpu_hero": lambda out: hero.draw(result(out.stem)["cases"]["gpt"], out),
}
"""Those that their JSON is enough for. The demo draws its own."""

DRAWN_FROM = {"cpu": [path.name for path in op_results()]}
"""Figures from several results; every other one is drawn from the one of its name."""


def problems() -> list[str]:
    """What the pages show without a result behind it, in words."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for picture in PICTURE.findall(text):
            path = (page.parent / picture).resolve()
            backed = [RESULTS / name for name in DRAWN_FROM.get(path.stem, (f"{path.stem}.json",))]
            if not all(file.exists() for file in (path, *backed)):
                found.append(f"{page.name}: {picture} has no result behind it")
        for name in (match[2] for match in BLOCK.finditer(text)):
            if name not in TABLES:
                found.append(f"{page.name}: nothing makes the table {name!r}")
        for claim in CLAIMS.get(page.name, ()):
            try:
                sentence = claim()
            except Missing as missing:
                found.append(f"{page.name}: {missing}")
                continue
            if sentence not in text.replace("**", ""):
                found.append(f"{page.name}: the results say {sentence!r}")
    for path in sorted(RESULTS.glob("*.json")):
        run = json.loads(path.read_text())
        unnamed = [name for name in NAMED_BY_ALL if not run.get(name)]
        if not (run.get("commands") or run.get("command")):
            unnamed.append("command")
        found += [f"{path.name}: names no {name}" for name in unnamed]
    return found


def redrawn(text: str) -> str:
    """A page with its tables made anew."""
    return BLOCK.sub(
        lambda match: match[1] + TABLES[match[2]]() + match[3] if match[2] in TABLES else match[0],
        text,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m memopt bench --report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    found = problems()
    for page in PAGES:
        text = page.read_text()
        try:
            new = redrawn(text)
        except Missing as missing:
            found.append(f"{page.name}: {missing}")
            continue
        if new != text and check:
            found.append(f"{page.name}: its tables are not those of the results")
        if new != text and not check:
            page.write_text(new)
            print(f"written: {page.name}")
    if not check:
        for name, draw in FIGURES.items():
            try:
                draw(RESULTS / f"{name}.png")
            except Missing as missing:
                found.append(str(missing))
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
