"""Sentences with figures, made from the results; report.py looks for them in README and docs/."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks import models
from benchmarks.checkpoint_overhead import FAIRSCALE, OURS, TORCH
from benchmarks.report_tables import gpu_cases, result
from benchmarks.summary import geometric_mean, measured


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
    def times(case: str) -> tuple[str, str]:
        ways = result("cpu_plan")["cases"][case]["variants"]
        names = ("plan at checkpoint every block", "checkpoint every block")
        ours, uniform = (f"{ways[name]['over_plain']['median']:.2f}" for name in names)
        return ours, uniform

    (alike, uniform), (unlike, uniform_too) = times("chain"), times("encoder-decoder")
    return (
        f"takes {alike} of eager's time instead of {uniform}, with the unlike blocks of an "
        f"encoder-decoder {unlike} instead of {uniform_too}"
    )


def claim_of_dropout() -> str:
    ways = result("cpu_models")["cases"]["GPT-2, dropout"]["variants"]
    eager = ways[models.EAGER]["peak_bytes"]

    def of(name: str) -> tuple[str, str]:
        way = ways[name]
        return f"{way['over_eager']['median']:.2f}", f"{way['peak_bytes'] / eager:.2f}x"

    recipes, both, torch_s = map(
        of, ("memopt.convert", "convert and regions", "torch.utils.checkpoint")
    )
    return (
        f"recipes take {recipes[0]} of eager's time at {recipes[1]} of its peak, with regions as "
        f"well {both[0]} at {both[1]}, where `torch.utils.checkpoint` takes {torch_s[0]} at "
        f"{torch_s[1]}"
    )


def claim_of_gpu() -> str:
    said = []
    for name, op in (("layer_norm", "layer_norm"), ("rms_norm", "rms_norm"), ("gated", "swiglu")):
        cases = gpu_cases(result(f"cuda_{name}"), op, "forward+backward")
        ratios = [case["memopt"]["ratio"]["median"] for case in cases]
        said.append(f"{op} {geometric_mean(ratios):.2f}x")
    return f"{', '.join(said)} PyTorch's speed"


def claim_of_build() -> str:
    found = result("cpu_build")["cases"]["wheel"]["variants"]["memopt"]
    return f"{math.ceil(found['processor_seconds'] / 60)} minutes of processor time"


def _host_us(case: str, way: str) -> float:
    ways = result("cpu_checkpoint_overhead")["cases"][case]["variants"]
    return float(ways[way]["beyond_us"]["median"])


def claim_of_empty_regions() -> str:
    ours, torch_s, fairscale = (_host_us("empty", way) for way in (OURS, TORCH, FAIRSCALE))
    return (
        f"an empty region costs {ours:.1f} us of host time, PyTorch's {torch_s:.0f} us, "
        f"FairScale's {fairscale:.0f} us"
    )


def claim_of_regions() -> str:
    empty, block = ((_host_us(case, OURS), _host_us(case, TORCH)) for case in ("empty", "block"))
    return (
        f"{empty[0]:.1f} us instead of {empty[1]:.0f} for an empty one, {block[0]:.0f} instead of "
        f"{block[1]:.0f} for a transformer block, beyond its second forward"
    )


def claim_of_hooks() -> str:
    cases = result("cpu_recipes_overhead")["cases"]

    def us(case: str) -> str:
        way = cases[case]["variants"]["memopt.recipes()"]
        return f"{way['over_identity_us']['median']:.1f} us"

    return (
        f"On the host {us('saved inputs')} for each saved tensor beyond hooks that do nothing, "
        f"{us('gelu in front of each op')} for one that is made again"
    )


CLAIMS: dict[str, tuple[Callable[[], str], ...]] = {
    "README.md": (
        claim_of_bytes,
        claim_of_plans,
        claim_of_dropout,
        claim_of_compiled,
        claim_of_gpu,
        claim_of_build,
    ),
    "checkpointing.md": (claim_of_empty_regions,),
    "from-torch-checkpoint.md": (claim_of_regions,),
    "recipes.md": (claim_of_hooks,),
}
"""By page; each must stand in its own, bold or not."""
