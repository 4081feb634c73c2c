"""The tables of the README and docs/, each from its results. report.py writes them into pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    channel_norm,
    checkpoint_overhead,
    compile,
    conv,
    convert_bytes,
    cuda_resources,
    models,
)
from benchmarks import head as language_head
from benchmarks import host_time as whole_steps
from benchmarks import longest_sequence as sequences
from benchmarks.cli import RESULTS
from benchmarks.ops import CONVOLUTIONAL
from benchmarks.summary import describe, geometric_mean, measured, operation, quartiles, table

Run = dict[str, Any]


class Missing(Exception):
    """A result that a page needs is not there."""


def result_file(name: str) -> Path:
    """benchmarks/results/NAME.json, which is there."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise Missing(f"no result {path.name}")
    return path


def result(name: str) -> Run:
    """Reads the results' file of that name."""
    run: Run = json.loads(result_file(name).read_text())
    return run


def under(run: Run, *parts: str) -> str:
    """Tables under the line that says where and when they were measured."""
    return "\n\n".join([f"*{describe(run)}*", *parts]) + "\n"


def by_threads(names: Sequence[str], labels: dict[tuple[str, str], str]) -> str:
    """The ratio PyTorch's time / memopt's, of each op of `labels`: its name and direction."""
    runs = [result(name) for name in names]
    threads = sorted({case["threads"] for run in runs for case in measured(run)})
    settings = [(dtype, count) for dtype in ("float32", "bfloat16") for count in threads]
    head = ["op", "direction", "goal", *(f"{d}, {t} thread{'s'[: t - 1]}" for d, t in settings)]
    rows = []
    for run in runs:
        for (op, direction), label in labels.items():
            cases = [c for c in measured(run) if (operation(c), c["direction"]) == (op, direction)]
            if not cases:
                continue
            goal = run["goals"].get(direction)
            row = [label, direction, "" if goal is None else f"{goal:.1f}x"]
            for setting in settings:
                found = [c for c in cases if (c["dtype"], c["threads"]) == setting]
                ratios = [c["variants"]["memopt"]["ratio"]["median"] for c in found]
                row.append(
                    f"**{geometric_mean(ratios):.2f}x** ({min(ratios):.2f}x to {max(ratios):.2f}x)"
                )
            rows.append(row)
    return f"*{describe(*runs)}*\n\n{table(head, rows)}\n"


def kernels() -> str:
    both = ("forward", "backward")
    labels = {(op, d): op for op in ("layer_norm", "rms_norm") for d in both}
    for form, label in (("none", "erf"), ("tanh", "tanh")):
        labels[f"layer_norm_gelu, {form}", "forward+backward"] = f"layer_norm_gelu, {label}"
        labels |= {(f"gelu, {form}", d): f"gelu, {label}" for d in both}
    names = ("layer_norm", "rms_norm", "layer_norm_gelu", "gelu")
    return by_threads([f"cpu_{name}" for name in names], labels)


def activations() -> str:
    ops = ("silu", "relu", "quick_gelu", "relu_squared", "sigmoid", "softcap")
    return by_threads(
        ("cpu_activation",), {(op, d): op for op in ops for d in ("forward", "backward")}
    )


def convolutional_activations() -> str:
    directions = ("forward", "backward")
    return by_threads(
        ("cpu_conv_activation",), {(op, d): op for op in CONVOLUTIONAL for d in directions}
    )


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


def gpu_cases(run: Run, op: str, direction: str) -> list[dict[str, Any]]:
    """An op's variants in bfloat16, of rows that are whole vectors."""
    return [
        case["variants"]
        for case in measured(run)
        if (operation(case), case["direction"], case["dtype"]) == (op, direction, "bfloat16")
        and case["cols"] % 8 == 0
    ]


def gpu_kernels() -> str:
    """The ratio PyTorch's time / memopt's in bfloat16, the share of a copy's bandwidth, and
    Liger-Kernel's time / memopt's.
    """
    names = ("layer_norm", "rms_norm", "add_norm", "layer_norm_gelu", "gelu", "activation")
    rows = []
    runs = [result(f"cuda_{name}") for name in (*names, "gated", "dropout")]
    for run in runs:
        ops = dict.fromkeys(operation(case) for case in measured(run))
        for op in ops:
            row = [op]
            for direction in ("forward", "backward", "forward+backward"):
                cases = gpu_cases(run, op, direction)
                if not cases:
                    row.append("")
                    continue
                ours = [case["memopt"] for case in cases]
                ratios = [found["ratio"]["median"] for found in ours]
                share = geometric_mean([found["fraction_of_copy"] for found in ours])
                row.append(f"**{geometric_mean(ratios):.2f}x**, {100 * share:.0f} %")
            liger = [
                case["liger"]["us"]["median"] / case["memopt"]["us"]["median"]
                for case in cases
                if "liger" in case
            ]
            rows.append([*row, f"{geometric_mean(liger):.2f}x" if liger else ""])
    head = ["op", "forward", "backward", "forward+backward", "the same over Liger-Kernel"]
    return f"*{describe(*runs)}*\n\n{table(head, rows)}\n"


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
    head = ["mode", "step, ms", "kept, MB", "peak, MB", "losses of all steps"]
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


def host_time_of_models() -> str:
    run = result("cpu_host_time")
    return under(run, whole_steps.tables(run))


def compiled() -> str:
    run = result("cpu_compile")
    return under(run, compile.tables(run))


def converted() -> str:
    run = result("cpu_convert_bytes")
    return under(run, convert_bytes.readme_table(run["cases"]))


def planned(run_name: str = "cpu_plan") -> str:
    run = result(run_name)
    titles = {
        "chain": "Equal blocks, as GPT-2's",
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
                    quartiles(time),
                    "" if predicted is None else f"{predicted:.2f}",
                ]
            )
        head = ["way", "peak over plain", "time over plain (quartiles)", "predicted time"]
        parts += [f"{titles.get(name, name)}:", table(head, rows)]
    return under(run, *parts)


_WAYS = (("memopt.convert", "convert"), ("memopt.plan, half", "plan for half of that peak"))
_GPU_WAYS = (
    ("recipes in every block", "recipes in every block"),
    ("plan at checkpoint every block", "plan at the peak of checkpoint"),
)


def at_a_glance() -> str:
    """The first table of the README: peaks, times and batches, before and after."""
    head = (
        "model",
        "device",
        "way",
        "peak before",
        "after",
        "time before",
        "after",
        "largest batch",
        "after",
    )
    run, gpu = result("cpu_models"), result("cuda_plan")
    rows = []
    for name in ("Llama", "GPT-2", "BERT"):
        ways = run["cases"][name]["variants"]
        eager = ways[models.EAGER]
        for way, words in _WAYS:
            cpu = f"{run['machine']['cores']} cores"
            after, time = ways[way], ways[way]["over_eager"]
            cells = _before_and_after(eager, after, time["median"])
            rows.append([name, cpu, words, *cells, f"{eager['rows_fit']}", f"{after['rows_fit']}"])
    chain = gpu["cases"]["chain"]["variants"]
    for way, words in _GPU_WAYS:
        cells = _before_and_after(chain["plain"], chain[way], chain[way]["over_plain"]["median"])
        rows.append(["16 blocks", "H100", words, *cells, "", ""])
    return f"{table(head, rows)}\n"


def _before_and_after(before: Run, after: Run, time: float) -> tuple[str, str, str, str]:
    share = after["peak_bytes"] / before["peak_bytes"]
    seconds = before["seconds"]
    return (
        f"{before['peak_bytes'] / 1e6:,.0f} MB",
        f"{after['peak_bytes'] / 1e6:,.0f} MB ({share:.2f}x)",
        f"{1e3 * (seconds['median'] if isinstance(seconds, dict) else seconds):,.0f} ms",
        f"{time:.2f}x",
    )


def channel_norms() -> str:
    run = result("cpu_channel_norm")
    return under(run, channel_norm.tables(run["cases"].values()))


def whole_models() -> str:
    run = result("cpu_models")
    return under(run, models.tables(run))


def convolutional() -> str:
    run = result("cpu_conv")
    return under(run, conv.tables(run["cases"]))


def heads() -> str:
    run = result("cpu_head")
    return under(run, language_head.tables(run))


def longest_sequences() -> str:
    run = result("cpu_longest_sequence")
    version, date = run["versions"]["torch"], run["date"][:10]
    return f"*Predicted with torch {version}; {date}.*\n\n{sequences.tables(run)}\n"


def cuda_resources_of_kernels() -> str:
    run = result("cuda_resources")
    archs = ", ".join(run["settings"]["architectures"])
    return f"*Compiled for {archs}; {run['date'][:10]}.*\n\n{cuda_resources.tables(run)}\n"


TABLES: dict[str, Callable[[], str]] = {
    "at a glance": at_a_glance,
    "kernels": kernels,
    "activations": activations,
    "activations of convolutional networks": convolutional_activations,
    "ops of blocks": blocks,
    "demo": demo,
    "host time": host_time,
    "host time of models": host_time_of_models,
    "compiled models": compiled,
    "bytes of converted models": converted,
    "plans": planned,
    "convolutional networks": convolutional,
    "norms over channels": channel_norms,
    "whole models": whole_models,
    "heads": heads,
    "longest sequences": longest_sequences,
    "ops on a GPU": gpu_kernels,
    "resources of CUDA kernels": cuda_resources_of_kernels,
    "plans on a GPU": lambda: planned("cuda_plan"),
}
