"""Everything that wants a GPU, in one command and one sitting: `python -m benchmarks.gpu`.

The tests first, the benchmarks in the order of their importance, then the rest of the tests and the
demo, within `--minutes`. Each step is a process with a time budget of its own, so a hang or a crash
costs that step alone. Eight files, each written as soon as its step is done, go to the folder that
the environment variable OUT names (default: benchmarks/results/gpu); summary.txt is the one to read
first.

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

from benchmarks import summary

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


def steps(out: Path, demo_out: Path) -> list[Step]:
    """In the order of importance: what comes last may find no time left."""

    def tests(name: str, chosen: str, seconds: float, *options: str) -> Step:
        quiet = ["-q", "--tb=short", "--maxfail=25", "--durations=15", "-p", "no:cacheprovider"]
        command = ["-m", "pytest", *quiet, "-k", chosen, *options]
        return Step(name, command, seconds, is_test=True)

    def benchmark(op: str, directions: str, seconds: float, *options: str) -> Step:
        file = ["--out", str(out / f"cuda_{op}.json"), "--resume"]
        limit = ["--minutes", f"{(seconds - 10) / 60:.2f}"]  # ends by itself before it is stopped
        chosen = ["--device", "cuda", "--direction", directions, *options]
        name = " ".join([op, directions, *options])
        return Step(name, ["-m", f"benchmarks.{op}", *chosen, *file, *limit], seconds)

    libraries = ("--peers", "liger,apex,flash_attn")
    # torch.compile takes seconds for each shape, so it takes part at three.
    compiled = ("--dtype", "bfloat16", "--shapes", "16384x1024,16384x4096,16384x8192")
    # A case takes up to half a minute; the last one begun may end beyond the limit.
    offload_seconds = 110.0
    offloading = ["--device", "cuda", "--out", str(out / "cuda_offload.json")]
    offloading += ["--minutes", f"{(offload_seconds - 30) / 60:.2f}"]
    demo = ["-m", "memopt", "demo", "--device", "cuda", "--out", str(demo_out)]
    return [
        tests("tests on the GPU", "cuda", 150, "-vv"),  # the log names each test
        benchmark("layer_norm", "backward", 40, *libraries),
        benchmark("layer_norm_gelu", "forward+backward", 45, *compiled),
        Step("offload", ["-m", "benchmarks.offload", *offloading], offload_seconds),
        benchmark("layer_norm_gelu", "forward+backward,backward,forward", 60, *libraries),
        benchmark("gelu", "backward,forward,forward+backward", 50, *libraries),
        benchmark("layer_norm", "forward+backward", 40, *compiled),
        benchmark("layer_norm", "forward,forward+backward", 50, *libraries),
        tests("all other tests", "not cuda", 240),
        Step("demo", demo, 120),
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
    from benchmarks import offload  # only now: it imports memopt, see unable()

    rows = [[o.step.name, o.status, f"{o.seconds:.0f} s", o.last_line] for o in outcomes]
    runs = summary.load(sorted(out.glob("cuda_*.json")))
    ops = [run for run in runs if run["op"] != offload.OP]
    parts = [summary.table(["step", "outcome", "time", "last line of its output"], rows), note]
    parts += [summary.report(ops)] if ops else []
    parts += [offload.report(run) for run in runs if run["op"] == offload.OP]
    text = "\n\n".join(part.rstrip("\n") for part in parts) + "\n"
    (out / "summary.txt").write_text(text)
    return text


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Of the tests alone: a benchmark that fails shows in the summary."""
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
    add("--minutes", type=float, default=9.0, help="for everything; default: 9")
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
        for step in steps(out, Path(folder)):
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
