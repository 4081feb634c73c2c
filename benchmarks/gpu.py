"""Everything that wants a GPU, in one command and one sitting: `python -m benchmarks.gpu`.

Whole steps first, in the order of their importance: a chain of blocks, models of the widths that
people train in every way, offloading. Then the tests, the ops, the demo and the rest of the tests,
within `--minutes`; the first tables are there in 9. `--only a,b` runs steps of these names. Each
step is a process with a time budget of its own, so a hang or a crash costs that step alone. A file
for each benchmark, written as soon as a case is done, goes to the folder that the environment
variable OUT names (default: benchmarks/results/gpu); summary.txt is the one to read first.

Exit status: 0 if all tests passed, 1 if a test failed, 2 if there is no GPU, 3 if the tests did not
end in time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import cli, summary

ROOT = Path(__file__).parent.parent
LOG = "log.txt"  # of all steps, in OUT


@dataclass(frozen=True)
class Step:
    """One process."""

    name: str
    command: Sequence[str]
    seconds: float
    """Budget; less where less is left of the whole."""
    is_test: bool = False


@dataclass(frozen=True)
class Outcome:
    step: Step
    status: str
    """`passed`, `failed (exit status N)` or `out of time`."""
    seconds: float
    last_line: str


# Rows of a row kernel's whole range: a warp, some warps, a whole block, and of no whole vectors.
SHAPES = "16384x1024,16384x4096,8192x16384,16384x769"
# With elementwise kernels the row's length says nothing.
FLAT_SHAPES = "16384x1024,16384x8192"
NORMS = ("layer_norm", "rms_norm", "add_norm", "layer_norm_gelu")
ELEMENTWISE = ("gated", "gelu", "activation", "dropout")


def steps(out: Path, demo_out: Path) -> list[Step]:
    """The steps in the order of importance: the last ones may find no time left."""

    def tests(name: str, seconds: float, *options: str) -> Step:
        quiet = ["-q", "--tb=short", "--maxfail=100", "--durations=15", "-p", "no:cacheprovider"]
        # Each process has the GPU's context and some libraries in its memory, half a GiB.
        several = ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"]
        return Step(name, ["-m", "pytest", *quiet, *several, *options], seconds, is_test=True)

    def benchmark(op: str, seconds: float, *options: str) -> Step:
        file = ["--out", str(out / f"cuda_{op}.json")]
        # A case takes up to half a minute with all that compiles; it ends what has begun.
        limit = ["--minutes", f"{max(0.1, (seconds - 30) / 60):.2f}"]
        command = [*cli.command(op).split()[1:], "--device", "cuda", *options, *file, *limit]
        return Step(op, command, seconds)

    def of_op(op: str) -> Step:
        shapes = SHAPES if op in NORMS else FLAT_SHAPES
        seconds = 75.0 if op == "activation" else 60.0
        options = ("--peers", "liger,apex,flash_attn", "--shapes", shapes, "--resume")
        return benchmark(op, seconds, *options)

    demo = ["-m", "memopt", "demo", "--device", "cuda", "--out", str(demo_out)]
    return [
        benchmark("plan", 120),
        benchmark("gpu_models", 900),
        benchmark("offload", 110),
        tests("tests on the GPU", 150, "-k", "cuda"),
        of_op("layer_norm"),
        of_op("gated"),
        benchmark("models", 240),
        *(of_op(op) for op in (*NORMS[1:], *ELEMENTWISE[1:])),
        benchmark("head", 60),
        Step("demo", demo, 120),
        tests("all other tests", 240, "-k", "not cuda"),
    ]


def run(step: Step, out: Path, seconds: float) -> Outcome:
    """Runs a step for at most `seconds`, its output to the log and its last line to the summary."""
    started = time.monotonic()
    with open(out / LOG, "a+") as log:
        log.write(f"\n=== {step.name}: python {' '.join(step.command)}\n")
        log.flush()
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the step and what it started
            process.wait()
            code = None
        log.seek(0)
        lines = [text.strip() for text in log if text.strip()]
    status = {0: "passed", None: "out of time"}.get(code, f"failed (exit status {code})")
    return Outcome(step, status, time.monotonic() - started, lines[-1][:160])


def write_summary(out: Path, outcomes: Sequence[Outcome], note: str) -> str:
    """Writes summary.txt and returns its text: the steps, then what has been measured so far."""
    # Only now: they import memopt, see unable().
    from benchmarks import gpu_models, head, models, offload, plan

    reports = {each.OP: each.report for each in (plan, gpu_models, offload, models, head)}
    rows = [[o.step.name, o.status, f"{o.seconds:.0f} s", o.last_line] for o in outcomes]
    runs = summary.load(sorted(out.glob("cuda_*.json")))
    ops = [run for run in runs if run["op"] not in reports]
    parts = [summary.table(["step", "outcome", "time", "last line of its output"], rows), note]
    parts += [summary.report(ops)] if ops else []
    parts += [reports[run["op"]](run) for run in runs if run["op"] in reports]
    text = "\n\n".join(part.rstrip("\n") for part in parts) + "\n"
    (out / "summary.txt").write_text(text)
    return text


def chosen(all_steps: Sequence[Step], names: str) -> list[Step]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := set(wanted) - {step.name for step in all_steps}:
        raise SystemExit(
            f"benchmarks.gpu: --only must name steps of {', '.join(s.name for s in all_steps)}, "
            f"got {', '.join(sorted(unknown))}"
        )
    return [step for step in all_steps if not wanted or step.name in wanted]


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """The exit status of the tests alone: a benchmark that fails shows in the summary."""
    statuses = [outcome.status for outcome in outcomes if outcome.step.is_test]
    if any(status.startswith("failed") for status in statuses):
        return 1
    return 3 if "out of time" in statuses or "no time left" in statuses else 0


def unable() -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no CUDA device here"
    import memopt  # only now: without a GPU the line above is all there is to say

    if not memopt.build_info()["cuda"]:
        return "this build of memopt has no CUDA kernels; build it with MEMOPT_CUDA=1"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="for everything; default: 30")
    add("--only", default="", metavar="A,B", help="of the steps; default: all")
    add("--started", type=float, default=time.time(), help="Unix time from which they count")
    args = parser.parse_args()
    if (reason := unable()) is not None:
        print(f"benchmarks.gpu: {reason}", file=sys.stderr)
        return 2

    out = Path(os.environ.get("OUT") or ROOT / "benchmarks/results/gpu").resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / LOG).unlink(missing_ok=True)  # it is appended to
    deadline = args.started + 60 * args.minutes - 10  # ten seconds for a slow exit
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for step in chosen(steps(out, Path(folder)), args.only):
            seconds = min(step.seconds, deadline - time.time())
            if seconds < 20:
                outcomes.append(Outcome(step, "no time left", 0.0, ""))
                continue
            print(f"{step.name} ...", flush=True)
            outcome = run(step, out, seconds)
            print(f"  {outcome.status}, {outcome.seconds:.0f} s: {outcome.last_line}", flush=True)
            outcomes.append(outcome)
            write_summary(out, outcomes, "Still running.")
        for kind in ("json", "png"):
            for result in sorted(Path(folder).glob(f"*.{kind}"))[:1]:
                shutil.copy(result, out / f"demo.{kind}")
    took = (time.time() - args.started) / 60
    print(write_summary(out, outcomes, f"Took {took:.1f} minutes."))
    return exit_status(outcomes)


if __name__ == "__main__":
    sys.exit(main())
