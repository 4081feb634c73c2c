"""Host time of whole models: a training step of tiny transformers in every way, against eager.

Eight layers of width 32, eight tokens, one thread, the CPU: kernels take next to no time, and what
is left is what the host does. Where a GPU waits for its host, this is the step.

- **time**: of the processor, the ways in turns as in harness.py; the ratio to eager is taken within
  a round.
- **instructions**: of one step, by valgrind's callgrind, with Python's garbage collector off. They
  do not depend on what else the machine does. Left out where there is no valgrind.

`python -m benchmarks.host_time [--quick] [--filter MODEL] [--out FILE.json]` writes the JSON and
prints the table. Needs transformers.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from benchmarks import record
from benchmarks.cli import in_time, parse_ways
from benchmarks.clocks import CpuClock
from benchmarks.harness import QUICK, Effort, alternate, spread
from benchmarks.summary import describe, quartiles, table

LAYERS, WIDTH, TOKENS = 8, 32, 8
EAGER = "eager"
FULL = Effort(rounds=41, min_rounds=15, case_seconds=12.0)
WARM_UP = 4  # steps: the first ones fill caches of PyTorch's and of transformers'

Inputs = dict[str, Tensor]
_COMMON = {"hidden_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": LAYERS}


def _make(architecture: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, architecture)(getattr(transformers, config)(**settings))
    return made.train()


def _words() -> Inputs:
    ids = torch.arange(TOKENS).unsqueeze(0)
    return {"input_ids": ids, "labels": ids}


def _gpt2() -> nn.Module:
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 2, "n_positions": TOKENS}
    ids = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    return _make("GPT2LMHeadModel", "GPT2Config", use_cache=False, **sizes, **ids)


def _llama() -> nn.Module:
    sizes = {**_COMMON, "intermediate_size": 64, "vocab_size": 64}
    return _make("LlamaForCausalLM", "LlamaConfig", use_cache=False, **sizes)


def _bert() -> nn.Module:
    return _make("BertForMaskedLM", "BertConfig", **_COMMON, intermediate_size=64, vocab_size=64)


def _t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_heads": 2, "vocab_size": 64}
    layers = {"num_layers": LAYERS // 2, "num_decoder_layers": LAYERS // 2}
    return _make(
        "T5ForConditionalGeneration", "T5Config", use_cache=False, pad_token_id=0,
        decoder_start_token_id=0, **sizes, **layers,
    )  # fmt: skip


def _vit() -> nn.Module:
    sizes = {**_COMMON, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
    return _make("ViTForImageClassification", "ViTConfig", **sizes)


def _image() -> Inputs:
    return {"pixel_values": torch.ones(1, 3, 16, 16), "labels": torch.zeros(1, dtype=torch.long)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "GPT-2": (_gpt2, _words),
    "Llama": (_llama, _words),
    "BERT": (_bert, _words),
    "T5": (_t5, _words),
    "ViT": (_vit, _image),
}


def _regions(model: nn.Module) -> None:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in (block for blocks in lists if len(blocks) >= LAYERS // 2 for block in blocks):
        memopt.checkpoint_wrapper(block)


def _convert_and_regions(model: nn.Module) -> None:
    memopt.convert(model)
    _regions(model)


WAYS: dict[str, Callable[[Any], object]] = {
    EAGER: lambda model: None,
    "convert": memopt.convert,
    "convert without recipes": lambda model: memopt.convert(model, recipes=False),
    "regions": _regions,
    "convert and regions": _convert_and_regions,
    "torch.utils.checkpoint": lambda model: model.gradient_checkpointing_enable(
        {"use_reentrant": False}
    ),
}


def steps(name: str) -> dict[str, Callable[[], object]]:
    """A training step of the model in each way, each of a copy of its own."""
    make_model, make_inputs = MODELS[name]
    torch.manual_seed(0)
    plain, made = make_model(), {}
    for way, change in WAYS.items():
        model = copy.deepcopy(plain)
        change(model)
        made[way] = _step(model, make_inputs())
    return made


def _step(model: nn.Module, inputs: Inputs) -> Callable[[], object]:
    def step() -> None:
        model(**inputs).loss.backward()

    return step


def count(name: str) -> None:
    """Run a step of each way under callgrind, which writes a file for each. For a process that
    valgrind runs.
    """
    runs = steps(name)
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    gc.collect()
    gc.disable()
    subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True)
    for run in runs.values():
        run()
        torch._C._valgrind_toggle()
        run()
        torch._C._valgrind_toggle_and_dump_stats()


def instructions(name: str) -> dict[str, int]:
    """The instructions of one step of each way; empty where there is no valgrind."""
    if shutil.which("valgrind") is None or not torch._C._valgrind_supported_platform():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        program = f"from benchmarks import host_time; host_time.count({name!r})"
        command = [*tool, f"--callgrind-out-file={out}", sys.executable, "-c", program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        files = [out.with_name(f"out.{number}") for number in range(1, 1 + len(WAYS))]
        return {way: total(file.read_text()) for way, file in zip(WAYS, files, strict=True)}


def total(text: str) -> int:
    """The instructions that a file of callgrind's adds up to."""
    found = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"host_time: callgrind's file must say a sum, got {text[:200]!r}")
    return int(found[1])


class ProcessClock(CpuClock):
    """Processor time of a loop of calls: what else the machine does counts less."""

    def sample(self, fn: Callable[[], object], calls: int) -> float:
        fn()  # brings back the caches that the way before filled
        start = time.process_time()
        for _ in range(calls):
            fn()
        return (time.process_time() - start) / calls


def measure(name: str, effort: Effort) -> dict[str, Any]:
    """The record of a model, as it stands in the JSON file."""
    runs = steps(name)
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    seconds, _ = alternate(runs, ProcessClock(), effort)
    return {
        "name": name,
        "rounds": len(seconds[EAGER]),
        "variants": figures(seconds, instructions(name)),
    }


def figures(
    seconds: Mapping[str, Sequence[float]], counted: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Each way's milliseconds and instructions, and both over eager's."""
    found: dict[str, dict[str, Any]] = {}
    for way, times in seconds.items():
        over = [a / b for a, b in zip(times, seconds[EAGER], strict=True)]
        found[way] = {"ms": spread([1e3 * t for t in times]), "over_eager": spread(over)}
        if way in counted:
            share = round(counted[way] / counted[EAGER], 4)
            found[way] |= {"instructions": counted[way], "instructions_over_eager": share}
    return found


def tables(run: Mapping[str, Any]) -> str:
    """Instructions over eager's, where they were counted; and times over eager's with quartiles."""
    cases, ways = run["cases"].values(), [way for way in WAYS if way != EAGER]
    counted = [case for case in cases if "instructions" in case["variants"][EAGER]]
    rows = [
        [
            case["name"],
            f"{case['variants'][EAGER]['instructions'] / 1e6:.1f}",
            *(f"{case['variants'][way]['instructions_over_eager']:.3f}" for way in ways),
        ]
        for case in counted
    ]
    parts = [table(["instructions", "eager, millions", *ways], rows)] if counted else []
    rows = []
    for case in cases:
        times = [case["variants"][way]["over_eager"] for way in ways]
        texts = [quartiles(t) for t in times]
        rows.append([case["name"], f"{case['variants'][EAGER]['ms']['median']:.1f}", *texts])
    return "\n\n".join([*parts, table(["processor time", "eager, ms", *ways], rows)])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways("host_time", argv, devices=("cpu",))
    torch.set_num_threads(1)
    effort = dataclasses.replace(QUICK if args.quick else FULL, seed=args.seed)
    header = record.header(
        "host_time",
        {"convert": 1.05, "convert and regions": 1.55},
        dataclasses.asdict(effort),
        argv,
        torch.device("cpu"),
    )
    results = record.Record(args.out, header, resume=False)
    for name, _ in in_time("host_time", args, MODELS):
        results.add(name, measure(name, effort))
        print(f"{name} measured", flush=True)
    run = {**results.header, "cases": results.cases}
    print(f"\n{describe(run)}\n\n{tables(run)}\n\n{args.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
