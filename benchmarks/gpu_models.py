"""Models of the widths that people train, in bfloat16, from a batch that waits for the host to one
that waits for the device: eager, memopt's ways, and those of others.

Of each model first the ways that need no compiler, then those whose tensors wait in the host's
memory, then the compiled ones, which take the longest: a case of its own each, kept as soon as it
is there, in the order of their importance. Ways: transformers' own gradient checkpointing (the
model's, `gradient_checkpointing_enable`), **convert**, **regions**, both, plans for half and a
quarter of eager's peak, and Liger-Kernel where it is installed and knows the model; offloaded:
memopt's regions, PyTorch's `save_on_cpu` and transformers' `{"offload": True}`; compiled:
`torch.compile` at several of its `activation_memory_budget`s, and `memopt.compile`, also with the
peak of each as its budget. A way that a model does not take is left out, and the file says why.

Columns: peak in GB beyond the weights; step over eager's in the same round; tokens (or patches) a
second; the longest sequence that has eager's peak.

`python -m benchmarks.gpu_models [--device cuda] [--quick] [--minutes N] [--filter TEXT] [--out
FILE.json]`. `--quick`: the smallest sizes, on any device, to see that all of it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import memopt
from benchmarks import record
from benchmarks.cli import has_device, in_time, parse_ways
from benchmarks.clocks import StepClock
from benchmarks.compile import begin_compiling
from benchmarks.convert_models.sizes import Sizes
from benchmarks.harness import Effort, compared, effort_of
from benchmarks.model_ways import (
    COMPILED_WAYS,
    EAGER,
    Change,
    Made,
    Way,
    both,
    every_block,
    maker,
    measured,
    planned,
)
from benchmarks.models import fits
from benchmarks.summary import describe, quartiles, table

OP = "gpu_models"
EFFORT = Effort(rounds=9, min_rounds=3, case_seconds=6.0, sample_seconds=0.1)


@dataclasses.dataclass(frozen=True)
class Model:
    """One to measure: its family in convert_models (or "DiT"), sizes, and pairs of sequences."""

    family: str
    sizes: Sizes
    pairs: tuple[int, ...]


MODELS = {
    "Llama, 1B widths": Model("Llama", Sizes(4, 2048, 32, 8, 8192, 32768, 1024), (4, 1)),
    "Llama, 8B widths": Model("Llama", Sizes(2, 4096, 32, 8, 14336, 32768, 1024), (4, 1)),
    "GPT-2 medium": Model("GPT-2", Sizes(24, 1024, 16, 16, 4096, 50257, 1024), (4, 1)),
    "ViT-L": Model("ViT", Sizes(24, 1024, 16, 16, 4096, 2, 577), (8, 1)),
    "DiT-XL": Model("DiT", Sizes(14, 1152, 16, 16, 4608, 0, 257), (16, 1)),
}
SMALLEST = Sizes(n=2, h=64, heads=4, kv_heads=2, m=128, words=99, tokens=17)
LIGER = {"Llama": "apply_liger_kernel_to_llama"}


class DiT(nn.Module):
    """diffusers' transformer of DiT with a loss of its own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        transformer = import_module("diffusers").DiTTransformer2DModel
        side = 2 * int(sizes.tokens**0.5)
        self.transformer = transformer(
            num_attention_heads=sizes.heads,
            attention_head_dim=sizes.h // sizes.heads,
            num_layers=sizes.n,
            sample_size=side,
        )

    def gradient_checkpointing_enable(self, options: Mapping[str, Any]) -> None:
        if set(options) - {"use_reentrant"}:
            raise ValueError("diffusers has no such option")
        self.transformer.enable_gradient_checkpointing()

    def forward(self, latents: Tensor, times: Tensor, labels: Tensor) -> SimpleNamespace:
        noise = self.transformer(latents, times, labels).sample
        return SimpleNamespace(loss=noise.float().square().mean())


def make_dit(sizes: Sizes, rows: int, device: torch.device) -> Made:
    torch.manual_seed(0)
    side = 2 * int(sizes.tokens**0.5)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = torch.arange(rows)
    batch = {"latents": torch.randn(rows, 4, side, side, dtype=dtype), "times": ids, "labels": ids}
    model = DiT(sizes).to(device, dtype).train()
    return model, {name: tensor.to(device) for name, tensor in batch.items()}


def _own_checkpointing(model: Any, batch: object, **options: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False, **options})


def _saved_on_cpu(model: nn.Module, batch: Mapping[str, Tensor]) -> Callable[..., Any]:
    device = next(model.parameters()).device

    def call(**inputs: Tensor) -> Any:
        with save_on_cpu(pin_memory=True, device_type=device.type):
            return model(**inputs)

    return call


PLAIN_WAYS: dict[str, Change] = {
    EAGER: lambda model, batch: None,
    "memopt.convert": lambda model, batch: memopt.convert(model) and None,
    "regions": lambda model, batch: every_block(model, memopt.checkpoint_wrapper),
    "convert and regions": both,
    "the model's own checkpointing": _own_checkpointing,
    "memopt.plan, half": functools.partial(planned, share=0.5),
    "memopt.plan, a quarter": functools.partial(planned, share=0.25),
}
OFFLOADED_WAYS: dict[str, Change] = {
    EAGER: PLAIN_WAYS[EAGER],
    "convert and regions, offloaded": functools.partial(both, offload="cpu"),
    "transformers' offload": functools.partial(_own_checkpointing, offload=True),
    "save_on_cpu": _saved_on_cpu,
}
COMPILED = ", compiled"
COMPILED_MODELS = ("Llama, 1B", "GPT-2")
"""Each compiled way takes half a minute."""
GROUPS: dict[str, dict[str, Change]] = {
    "": PLAIN_WAYS,
    ", offloaded": OFFLOADED_WAYS,
    COMPILED: {EAGER: PLAIN_WAYS[EAGER], **COMPILED_WAYS},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at one batch, in one group of ways."""

    model: Model
    pairs: int
    group: str

    def make(self, device: torch.device) -> Callable[[], Made]:
        family, sizes = self.model.family, self.model.sizes
        if family == "DiT":
            return functools.partial(make_dit, sizes, 2 * self.pairs, device)
        return maker(family, sizes, 0.0, device, self.pairs)

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return 2 * self.pairs * self.model.sizes.tokens


def cases_of(models: Mapping[str, Model], device: torch.device) -> dict[str, Case]:
    """Every model's plain ways at its largest batch first, then those at the others; then the other
    groups, at the largest batch. The compiled ways are left out where there is no compiler, and but
    for two models.
    """
    most = max(len(model.pairs) for model in models.values())
    cases = {}
    for group in GROUPS:
        for place in range(1 if group else most):
            for name, model in models.items():
                is_left_out = group == COMPILED and (
                    device.type not in ("cpu", "cuda") or not name.startswith(COMPILED_MODELS)
                )
                if place < len(model.pairs) and not is_left_out:
                    case = Case(model, model.pairs[place], group)
                    cases[f"{name}, {2 * case.pairs} rows{group}"] = case
    return cases


def measure(case: Case, device: torch.device, effort: Effort) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    make, changes = case.make(device), dict(GROUPS[case.group])
    if not case.group and case.model.family in LIGER and find_spec("liger_kernel") is not None:
        changes["Liger-Kernel"] = _with_liger(case.model.family)
    begin_compiling()
    ways: dict[str, Way] = {}
    stats: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name, change in changes.items():
        memopt.offload.stats(reset=True)
        try:
            model, batch = make()
            ways[name] = measured(model, batch, change(model, batch))
        except Exception as error:  # a way that the model does not take
            if name == EAGER:
                raise
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        if "offloaded" in name:
            found = memopt.offload.stats(wait=True)
            stats[name] = {"offload": str(found)}
    peak = ways[EAGER].peak
    tokens = case.model.sizes.tokens
    about = {
        name: {
            "held_bytes": way.held,
            "peak_bytes": way.peak,
            "tokens_fit": fits(tokens, peak - way.peak, way.token),
            **stats.get(name, {}),
        }
        for name, way in ways.items()
    }
    runs = {name: way.run for name, way in ways.items()}
    found = compared(runs, StepClock(device), effort, EAGER, "over_eager", about)
    for variant in found["variants"].values():
        variant["tokens_per_second"] = round(case.tokens / variant["seconds"]["median"])
    return {**found, "failed": failed}


def _with_liger(family: str) -> Change:
    def change(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        getattr(import_module("liger_kernel.transformers"), LIGER[family])(model=model)

    return change


def tables(run: Mapping[str, Any]) -> str:
    """A table for each case."""
    parts = []
    for name, case in run["cases"].items():
        eager = case["variants"][EAGER]["peak_bytes"]
        rows = []
        for way, found in case["variants"].items():
            over = found["over_eager"]
            rows.append(
                [
                    way,
                    f"{found['peak_bytes'] / 1e9:.3f} GB ({found['peak_bytes'] / eager:.2f}x)",
                    quartiles(over),
                    f"{found['tokens_per_second']:,}",
                    str(found["tokens_fit"] or ""),
                ]
            )
        head = [name, "peak", "time over eager", "tokens a second", "tokens that fit"]
        notes = [f"{way}: {why}" for way, why in case["failed"].items()]
        notes += [f"{w}: {f['offload']}" for w, f in case["variants"].items() if "offload" in f]
        parts += [table(head, rows), *notes]
    return "\n\n".join(parts)


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    title = "# Models of the widths that people train"
    return "\n\n".join([title, describe(dict(run)), tables(run)])


def smallest() -> dict[str, Model]:
    return {n: dataclasses.replace(m, sizes=SMALLEST, pairs=(1,)) for n, m in MODELS.items()}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv, devices=("cpu", "cuda", "sim"))
    if not has_device(OP, args.device):
        return 2
    if find_spec("transformers") is None:
        print(f"{OP}: transformers is not installed", file=sys.stderr)
        return 2
    device = torch.device(args.device)
    models = smallest() if args.quick else MODELS
    if find_spec("diffusers") is None:
        models = {name: model for name, model in models.items() if model.family != "DiT"}
        print(f"{OP}: diffusers is not installed, DiT is left out", flush=True)
    effort = effort_of(args, EFFORT, EFFORT)
    settings = dataclasses.asdict(effort)
    settings["models"] = {name: dataclasses.asdict(model) for name, model in models.items()}
    results = record.begin(args.out, OP, {}, settings, argv, device)
    for name, case in in_time(OP, args, cases_of(models, device)):
        results.add(name, measure(case, device, effort))
        print(f"{tables({'cases': {name: results.cases[name]}})}\n", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"\n{report(results.run)}\n\n{args.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
