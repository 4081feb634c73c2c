"""Proves what the benchmark harness promises, without timing anything: the order in which variants
alternate, that bytes are counted exactly, what the JSON file holds, and that a resumed run keeps
what it may keep and no more.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import cpu, gpu, ops, runner, summary
from benchmarks.cli import OPS
from benchmarks.clocks import CpuClock, Thunk
from benchmarks.harness import Case, Effort, Variant, alternate, measure, round_orders, spread
from benchmarks.memory import peak_bytes, saved_bytes

CPU = torch.device("cpu")
QUICK_AND_SMALL = ["--quick", "--shapes", "4x8", "--dtype", "float32", "--threads", "1"]


class ScriptedClock:
    """Calls each variant as a real clock would, and reports the seconds that it was told to."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.seconds = {name: iter(values) for name, values in seconds.items()}

    def calibrate(self, fn: Thunk, min_seconds: float) -> int:
        return 1

    def sample(self, fn: Thunk, calls: int) -> float:
        return next(self.seconds[str(fn())])

    def copy_bandwidth(self) -> float:
        return 1e9


def make_case(variants: Sequence[Variant]) -> Case:
    return Case("op", "forward", 2, 4, torch.float32, None, "cpu", 1, 1000, lambda: variants)


def test_every_round_has_every_variant_once_in_an_order_that_the_seed_decides() -> None:
    names = ["a", "b", "c"]
    orders = round_orders(names, rounds=30, seed=1)
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)  # none always starts
    assert {(order[0], order[1]) for order in orders} >= {("a", "b"), ("c", "b")}
    assert orders == round_orders(names, rounds=30, seed=1)
    assert orders != round_orders(names, rounds=30, seed=2)


def test_variants_alternate_within_each_round() -> None:
    calls: list[str] = []

    class CountingClock(ScriptedClock):
        def sample(self, fn: Thunk, calls_per_sample: int) -> float:
            calls.append(str(fn()))
            return 1.0

    effort = Effort(rounds=6, min_rounds=6, seed=3)
    seconds, _ = alternate({"a": lambda: "a", "b": lambda: "b"}, CountingClock({}), effort)
    assert [calls[i : i + 2] for i in range(0, 12, 2)] == round_orders(["a", "b"], 6, seed=3)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 6, "b": 6}


def test_ratios_are_taken_within_rounds_so_that_drift_cancels() -> None:
    # The machine gets slower from round to round; the variant always takes half the time.
    clock = ScriptedClock({"base": [1e-3, 2e-3, 4e-3], "half": [0.5e-3, 1e-3, 2e-3]})
    case = make_case([Variant("base", lambda: "base"), Variant("half", lambda: "half")])
    found = measure(case, clock, Effort(rounds=3, min_rounds=3), copy_bandwidth=1e6)
    half = found["variants"]["half"]
    assert half["ratio"] == {"median": 2.0, "q1": 2.0, "q3": 2.0}
    assert half["us"] == {"median": 1000.0, "q1": 750.0, "q3": 1500.0}
    assert half["fraction_of_copy"] == 1.0  # 1000 bytes in 1 ms, where a copy moves 1e6 bytes/s
    assert found["rounds"] == 3


def test_a_peer_that_fails_is_recorded_and_our_own_failure_is_not_swallowed() -> None:
    def fail() -> None:
        raise RuntimeError("no such size")

    base = Variant("base", lambda: "base")
    effort = Effort(rounds=1, min_rounds=1)
    peer = make_case([base, Variant("peer", fail, is_peer=True)])
    found = measure(peer, ScriptedClock({"base": [1.0]}), effort, copy_bandwidth=1.0)
    assert found["failed"] == {"peer": "RuntimeError: no such size"}
    assert list(found["variants"]) == ["base"]
    with pytest.raises(RuntimeError, match="no such size"):
        measure(make_case([base, Variant("ours", fail)]), ScriptedClock({}), effort, 1.0)


def test_spread_is_the_median_and_the_quartiles() -> None:
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}
    assert spread([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0}


def test_calibration_makes_a_sample_at_least_as_long_as_a_call() -> None:
    assert CpuClock().calibrate(lambda: None, min_seconds=1e-4) > 100
    assert CpuClock().calibrate(lambda: torch.ones(1 << 16).exp(), min_seconds=1e-9) == 1


def test_saved_bytes_count_each_storage_whole_once_and_without_the_parameters() -> None:
    x = torch.ones(8, 16, requires_grad=True)
    weight = torch.ones(16, requires_grad=True)
    assert saved_bytes(lambda: x.exp()) == 8 * 16 * 4  # the output
    assert saved_bytes(lambda: x * x) == 8 * 16 * 4  # saved twice
    assert saved_bytes(lambda: x[:1] * 2.0 * x[1:2].detach()) == 8 * 16 * 4  # a view keeps all
    assert saved_bytes(lambda: x * weight) == (8 + 1) * 16 * 4
    assert saved_bytes(lambda: x * weight, parameters=(weight,)) == 8 * 16 * 4
    with torch.no_grad():
        assert saved_bytes(lambda: x.exp()) == 0


def test_peak_bytes_are_what_was_alive_at_once_beyond_what_was_there() -> None:
    x = torch.ones(1024)

    def two_then_one() -> Tensor:
        a = x * x
        b = a * x
        del a
        return b * x

    assert peak_bytes(two_then_one, CPU) == 2 * x.nbytes
    assert peak_bytes(lambda: x.mul_(x), CPU) == 0


@pytest.mark.parametrize(
    "op", ["gelu", "layer_norm", "layer_norm_gelu", "gelu_linear", "layer_norm_linear"]
)
def test_every_benchmark_runs_and_its_file_says_what_how_and_where(
    op: str, tmp_path: Path, restore_num_threads: None
) -> None:
    out = tmp_path / "results.json"
    argv = [*QUICK_AND_SMALL, "--approximate", "tanh", "--out", str(out)]
    assert ops.main([op, *argv]) == 0
    found = json.loads(out.read_text())
    assert found["op"] == op
    assert found["commands"] == [f"python -m benchmarks.ops {op} {' '.join(argv)}"]
    assert found["goals"] == ops.FAMILIES[op].goals
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_gib"] > 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["memopt"]["version"]
    form = "tanh/" if "gelu" in op else ""
    expected = {
        f"{op}/{direction}/4x8/float32/{form}cpu/1"
        for direction in ("forward", "backward", "forward+backward")
    }
    assert set(found["cases"]) == expected
    for case in found["cases"].values():
        assert case["baseline"] == "aten"
        assert set(case["variants"]) >= {"aten", "memopt"}
        for variant in case["variants"].values():
            assert len(variant["samples_us"]) == case["rounds"] >= 3
            assert variant["us"]["q1"] <= variant["us"]["median"] <= variant["us"]["q3"]
            assert variant["peak_bytes"] > 0
    training = found["cases"][f"{op}/forward+backward/4x8/float32/{form}cpu/1"]
    saved = {name: variant["saved_bytes"] for name, variant in training["variants"].items()}
    matrix, statistics = 4 * 8 * 4, 2 * 4 * 4
    expected_saved = {
        "gelu": {"aten": matrix, "memopt": matrix},
        "layer_norm": {"aten": matrix + statistics, "memopt": matrix + statistics},
        "layer_norm_gelu": {"aten": 2 * matrix + statistics, "memopt": matrix + statistics},
        "gelu_linear": {"aten": 8 * matrix, "memopt": 4 * matrix},
        "layer_norm_linear": {"aten": 2 * matrix + statistics, "memopt": matrix + statistics},
    }
    assert saved == expected_saved[op]
    report = summary.report([found])
    again = 0 if op.endswith("_linear") else 1
    # Three directions, the backward that writes the output again, the memory.
    assert report.count(f"| {op}") >= 4 + again
    assert "Not measured" not in report


@pytest.mark.slow
def test_the_cpu_run_measures_every_op_and_sums_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the processes, which cost seconds each: the ops are measured in this one, and what
    has tests of its own is only asked for.
    """
    started: list[tuple[str, list[str]]] = []

    def here(name: str, options: list[str], out: Path) -> bool:
        started.append((name, options))
        return name == "ops" and ops.main([*options, "--out", str(out)]) != 0

    monkeypatch.setattr(cpu, "RESULTS", tmp_path)
    monkeypatch.setattr(cpu, "run", here)
    options = [*QUICK_AND_SMALL, "--direction", "forward"]
    assert cpu.main(options) == 0
    effort = ["--seed", "0", "--quick"]
    expected = [("ops", [op, *options, "--device", "cpu"]) for op in OPS]
    assert started == [*expected, *((name, effort) for name in cpu.OTHERS)]
    files = {f"cpu_{op}.json" for op in OPS} | {"cpu_summary.md", "cpu.png"}
    assert {path.name for path in tmp_path.iterdir()} == files
    text = (tmp_path / "cpu_summary.md").read_text()
    assert text in capsys.readouterr().out
    for name in ("gelu, none", "gelu, tanh", "layer_norm", "layer_norm_gelu, tanh"):
        assert f"| {name} " in text
    with pytest.raises(SystemExit):
        cpu.main(["--dtype", "int8"])


@pytest.mark.slow
def test_a_benchmark_of_the_cpu_run_has_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "gelu.json"
    assert cpu.run("ops", ["gelu", *QUICK_AND_SMALL, "--direction", "forward"], out) is False
    assert json.loads(out.read_text())["op"] == "gelu"
    assert cpu.run("ops", ["no_such_op"], out) is True


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the cases that were measured; measuring is replaced by a constant."""
    measured: list[str] = []

    def fake(case: Case, *_: object) -> dict[str, object]:
        measured.append(case.key)
        if case.direction == "backward" and case.rows == 4:
            raise RuntimeError("broken")
        return {"variants": {}, "failed": {}, "direction": case.direction}

    monkeypatch.setattr(runner, "measure", fake)
    return measured


def test_resume_measures_only_what_is_missing_and_retries_failures(
    counted: list[str], tmp_path: Path, restore_num_threads: None
) -> None:
    def run(*options: str) -> int:
        argv = [*QUICK_AND_SMALL, "--out", str(tmp_path / "r.json"), *options]
        return ops.main(["layer_norm", *argv])

    def keys(rows: int, *directions: str) -> list[str]:
        return [f"layer_norm/{d}/{rows}x8/float32/cpu/1" for d in directions]

    assert run("--filter", "layer_norm/forward/") == 0
    assert counted == keys(4, "forward")
    assert run("--resume") == 1  # the backward fails; the case after it is measured all the same
    assert counted[1:] == keys(4, "backward", "forward+backward")
    assert run("--resume") == 1
    assert counted[3:] == keys(4, "backward")
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["cases"][keys(4, "backward")[0]] == {"error": "RuntimeError: broken"}
    assert len(found["commands"]) == 3
    assert run("--resume", "--shapes", "6x8") == 0
    assert counted[4:] == keys(6, "forward", "backward", "forward+backward")
    assert run("--filter", "forward+backward") == 0  # without --resume the file starts afresh
    found = json.loads((tmp_path / "r.json").read_text())
    assert list(found["cases"]) == keys(4, "forward+backward")


def test_resume_starts_afresh_where_the_file_is_of_another_build(
    counted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    argv = [*QUICK_AND_SMALL, "--out", str(out), "--filter", "layer_norm/forward/"]
    ops.main(["layer_norm", *argv])
    found = json.loads(out.read_text())
    found["versions"]["torch"] = "0.1"
    out.write_text(json.dumps(found))
    ops.main(["layer_norm", *argv, "--resume"])
    assert len(counted) == 2
    assert "has other versions: started afresh" in capsys.readouterr().out


def test_no_case_is_started_after_the_deadline(
    counted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*QUICK_AND_SMALL, "--out", str(tmp_path / "r.json"), "--minutes", "0"]
    assert ops.main(["layer_norm", *argv]) == 0
    assert counted == []
    assert "out of time, 3 cases left" in capsys.readouterr().out


def test_a_speed_up_of_a_group_is_the_geometric_mean_over_its_sizes() -> None:
    def case(rows: int, ratio: float) -> dict[str, object]:
        figures = {"ratio": {"median": ratio}, "fraction_of_copy": 0.5}
        key = {"op": "gelu", "direction": "forward", "dtype": "float32", "threads": 1}
        return {
            **key,
            "approximate": "tanh",
            "rows": rows,
            "cols": 8,
            "variants": {"memopt": figures},
        }

    cases = {"a": case(2, 1.0), "b": case(4, 4.0), "c": {"error": "x"}}
    [row] = summary.speed_rows({"goals": {"forward": 2.5}, "cases": cases})
    assert row[:6] == ["gelu, tanh", "forward", "float32", "1", "**2.00x**", "2.5x missed"]
    assert row[6:] == ["1.00x (2x8)", "4.00x (4x8)", "50 %"]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["passed", "passed"], 0),
        (["passed", "failed (exit status 1)"], 1),
        (["out of time", "failed (exit status 1)"], 1),
        (["passed", "out of time"], 3),
        (["passed", "no time left"], 3),
    ],
)
def test_the_gpu_run_reports_failed_and_unfinished_tests(
    statuses: list[str], expected: int, tmp_path: Path
) -> None:
    steps = [step for step in gpu.steps(tmp_path, tmp_path) if step.is_test]
    outcomes = [gpu.Outcome(s, status, 1.0, "") for s, status in zip(steps, statuses, strict=True)]
    benchmark = dataclasses.replace(steps[0], is_test=False)
    outcomes.append(gpu.Outcome(benchmark, "failed (exit status 1)", 1.0, ""))  # does not count
    assert gpu.exit_status(outcomes) == expected


@pytest.mark.slow
def test_a_step_that_hangs_is_stopped_and_its_last_words_are_kept(tmp_path: Path) -> None:
    code = "import time; print('so far so good', flush=True); time.sleep(60)"
    outcome = gpu.run(gpu.Step("hangs", ["-c", code], 60.0), tmp_path, seconds=3.0)
    assert (outcome.status, outcome.last_line) == ("out of time", "so far so good")
    assert outcome.seconds < 30
    outcome = gpu.run(
        gpu.Step("fails", ["-c", "raise SystemExit(7)"], 60.0), tmp_path, seconds=30.0
    )
    assert outcome.status == "failed (exit status 7)"
