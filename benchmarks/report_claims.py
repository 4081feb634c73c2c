"""Sentences with figures, made from the results; report.py looks for them in README and docs/."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import compile, models
from benchmarks.checkpoint_overhead import FAIRSCALE, OURS, TORCH
from benchmarks.report_tables import gpu_cases, result
from benchmarks.summary import geometric_mean, measured


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def claim_of_compiled() -> str:
    held, peaks, times = _compiled()
    return (
        f"{_span(held)} of the bytes that `torch.compile` holds when forward ends, {_span(peaks)} "
        f"of its peak, at {geometric_mean(times):.2f} of its time"
    )


def claim_of_compiled_families() -> str:
    held, peaks, times = _compiled()
    return (
        f"{_span(held)} of the bytes held when forward ends, {_span(peaks)} of the peak, "
        f"{geometric_mean(times):.2f} of the time (geometric mean; {_span(times)})"
    )


def claim_of_compiled_budgets() -> str:
    cases = [c["variants"] for c in result("cpu_compile")["cases"].values()]
    cases = [ways for ways in cases if compile.has_budgets(ways)]
    peaks = sum(len(compile.torchs_of(ways)) for ways in cases)
    missed = sum(len(compile.missed_peaks(ways)) for ways in cases)
    lowest = [compile.over_lowest(ways) for ways in cases]
    return (
        f"{peaks - missed} of the {peaks} peaks that torch.compile has with its budgets, in no "
        f"more than {compile.GOAL} of its time beyond the spread; the lowest peak is "
        f"{_span(lowest)} of torch.compile's lowest"
    )


def _compiled() -> tuple[list[float], list[float], list[float]]:
    """Ratios of memopt.compile to torch.compile, for each family: bytes held, peaks and times."""
    cases = [c["variants"] for n, c in result("cpu_compile")["cases"].items() if n != "curve"]
    pairs = [(ways["memopt.compile"], ways["torch.compile"]) for ways in cases]
    return (
        [ours["held_bytes"] / theirs["held_bytes"] for ours, theirs in pairs],
        [ours["most_bytes"] / theirs["most_bytes"] for ours, theirs in pairs],
        [ours["over_torch"]["median"] for ours, _ in pairs],
    )


def claim_of_bytes() -> str:
    cases = result("cpu_convert_bytes")["cases"]
    share = {n: f"{c['after_bytes'] / c['before_bytes']:.2f}x" for n, c in cases.items()}
    others = ", ".join(f"{name} {share[name]}" for name in ("GPT-2", "BERT", "ViT", "T5"))
    return (
        f"Llama: {share['Llama']} of the bytes kept for backward, at {_times(LLAMA)} of eager's "
        f"time; {others}"
    )


def claim_of_peaks() -> str:
    cases = result("cpu_models")["cases"]

    def share(name: str) -> str:
        ways = cases[name]["variants"]
        return f"{ways['memopt.convert']['peak_bytes'] / ways[models.EAGER]['peak_bytes']:.2f}x"

    others = " and ".join(f"{share(name)} ({name})" for name in ("GPT-2", "BERT"))
    return f"falls to {share('Llama')} (Llama), {others}"


def claim_of_families() -> str:
    cases = result("cpu_convert_bytes")["cases"]
    shares = sorted((c["after_bytes"] / c["before_bytes"], name) for name, c in cases.items())
    (least, low), *_, (most, high) = shares
    return f"{least:.2f}x ({low}) to {most:.2f}x ({high})"


LLAMA, GPT2 = "convert_llama", "convert_gpt2"


def _converted(op: str) -> list[dict[str, Any]]:
    return [c["variants"] for c in measured(result("cpu_convert")) if c["op"] == op]


def _times(op: str) -> str:
    return _span([1 / ways["memopt"]["ratio"]["median"] for ways in _converted(op)])


def claim_of_converted_steps() -> str:
    return f"GPT-2 {_times(GPT2)} of eager's, Llama {_times(LLAMA)}"


def claim_of_all_converted_steps() -> str:
    ways = [*_converted(GPT2), *_converted(LLAMA)]
    within = sum(way["memopt"]["us"]["median"] <= way["eager"]["us"]["q3"] for way in ways)
    again = [1 / way["torch.utils.checkpoint"]["ratio"]["median"] for way in ways]
    return (
        f"converted GPT-2 takes {_times(GPT2)} of eager's time, Llama {_times(LLAMA)}, within "
        f"eager's spread or faster in {within} of {len(ways)} cases; `torch.utils.checkpoint` "
        f"around each block takes {_span(again)}"
    )


def claim_of_chain_on_a_gpu() -> str:
    ways = result("cuda_plan")["cases"]["chain"]["variants"]
    recipes, plan, checkpoint = (
        f"{ways[name]['over_plain']['median']:.2f}"
        for name in (
            "recipes in every block",
            "plan at checkpoint every block",
            "checkpoint every block",
        )
    )
    return (
        f"recipes in every block take {recipes} of eager's time, a plan at the peak of "
        f"`torch.utils.checkpoint` around each block {plan} instead of {checkpoint}"
    )


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
    norms = (("layer_norm",) * 2, ("rms_norm",) * 2)
    others = (("gated", "swiglu"), ("gelu", "gelu, none"), ("activation", "silu"))
    for name, op in (*norms, *others):
        cases = gpu_cases(result(f"cuda_{name}"), op, "forward+backward")
        ratios = [case["memopt"]["ratio"]["median"] for case in cases]
        said.append(f"{op.partition(',')[0]} {geometric_mean(ratios):.2f}x")
    return f"{', '.join(said)} eager PyTorch's speed"


def claim_of_rotor_on_a_gpu() -> str:
    ways = result("cuda_plan")["cases"]["chain"]["variants"]
    times = {name: way["over_plain"]["median"] for name, way in ways.items()}
    every = "checkpoint every block"
    rotor = [times[f"plan at {name}"] / times[name] for name in times if name.startswith("rotor")]
    return (
        f"a plan takes {times[f'plan at {every}'] / times[every]:.2f} of its time, at rotor's "
        f"peaks {_span(rotor)} of rotor's"
    )


def claim_of_depth() -> str:
    ways = result("cpu_checkpoint_depth")["cases"]["checkpoint_depth/64/cpu"]["variants"]
    mb = {name: way["peak_bytes"] / 1e6 for name, way in ways.items()}
    return (
        f"at 64 blocks the peak is {mb['none']:.0f} MB without regions, {mb['sqrt']:.0f} with "
        f"sqrt(64) segments (memopt's and PyTorch's), {mb['every']:.0f} with each block a region, "
        f'{mb["optimal"]:.1f} with `"optimal"`, which recomputes '
        f"{ways['optimal']['forwards_again']} of the 64 blocks"
    )


def claim_of_build() -> str:
    found = result("cpu_build")["cases"]["wheel"]["variants"]["memopt"]
    return f"{math.ceil(found['processor_seconds'] / 60)} minutes of processor time"


def _host_us(case: str, way: str) -> float:
    ways = result("cpu_checkpoint_overhead")["cases"][case]["variants"]
    return float(ways[way]["beyond_us"]["median"])


def claim_of_host_time() -> str:
    ways = [case["variants"]["convert"] for case in result("cpu_host_time")["cases"].values()]
    return (
        "A step of tiny models, which shows the host's part, takes "
        f"{_span([way['instructions_over_eager'] for way in ways])} of eager's instructions and "
        f"{_span([way['over_eager']['median'] for way in ways])} of its time when it is converted"
    )


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
    return (
        f"On the host {_hook_us('saved inputs')} for each tensor that an op of the usual kinds "
        f"saves, {_hook_us('saved inputs, hooked')} for one that passes a hook, "
        f"{_hook_us('gelu in front of each op')} for one that is recomputed"
    )


def claim_of_recipes_on_the_host() -> str:
    return (
        f"Recipes take {_hook_us('saved inputs')} of host time for each tensor that an op of the "
        f"usual kinds saves, {_hook_us('saved inputs, hooked')} for one that passes a hook, "
        f"{_hook_us('gelu in front of each op')} for one that is recomputed"
    )


def _hook_us(case: str) -> str:
    way = result("cpu_recipes_overhead")["cases"][case]["variants"]["memopt.recipes()"]
    return f"{way['added_us']['median']:.1f} us"


CLAIMS: dict[str, tuple[Callable[[], str], ...]] = {
    "README.md": (
        claim_of_bytes,
        claim_of_peaks,
        claim_of_plans,
        claim_of_dropout,
        claim_of_compiled,
        claim_of_compiled_budgets,
        claim_of_host_time,
        claim_of_gpu,
        claim_of_chain_on_a_gpu,
        claim_of_build,
    ),
    "benchmarks.md": (
        claim_of_all_converted_steps,
        claim_of_depth,
        claim_of_recipes_on_the_host,
        claim_of_rotor_on_a_gpu,
    ),
    "compile.md": (claim_of_compiled_families, claim_of_compiled_budgets),
    "convert.md": (claim_of_converted_steps, claim_of_families),
    "checkpointing.md": (claim_of_empty_regions,),
    "from-torch-checkpoint.md": (claim_of_regions,),
    "recipes.md": (claim_of_hooks,),
}
"""Claims by page; each must stand in its own, bold or not."""
