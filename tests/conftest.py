"""Fixtures of the whole suite.

Tests that take `device` run on the CPU and, where memopt has CUDA kernels and PyTorch sees a GPU,
on that as well: the same suite. What a CPU has no counterpart of (CUDA graphs, streams, CUDA's
rules of autocast and attention) is in files named test_on_cuda.py, whose tests take `cuda`.

`make test` leaves out the tests that bear the mark `slow`, here or in slow.txt: those that take
more than about a third of a second; the interpreter's, which compile the CUDA kernels as C++; of
tests that run over all ops those of a family's further cases, which differ from its first one in a
keyword; and of a test with more than 40 combinations all but every k-th.

`make test-full` leaves out those that bear the mark `thorough`, here or by thorough.txt: of the
tests that take longest some of their combinations, where others show the same behaviour.
`make test-thorough` runs everything.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

# Inductor compiles in the test's own process: workers of its own for each process of tests, which
# import PyTorch first, took half of the compiled models' processor time.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import hypothesis
import pytest
import torch
from _pytest.runner import runtestprotocol

from tests.support.seed import seed

ROOT = Path(__file__).parent
SIMT = ROOT / "simt"


def _lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]


SLOW = set(_lines("slow.txt"))
THOROUGH = {line.split()[0]: int(line.split()[1]) for line in _lines("thorough.txt")}

# The files that take longest in `make test-full`, the longest first: begun first, so that none of
# them is what one process still runs when the others have ended. They need not be the ones that
# have the most tests: one of them has a single one. (Compilers, processes, models; measured.)
LONGEST = (
    "convert/test_checkpointing_families.py",
    "simt/test_memory_accesses.py",
    "offload/test_cpp.py",
    "compile/test_budget.py",
    "accelerator/test_accelerator.py",
    "compile/test_compile.py",
    "benchmarks/test_convert_zoo.py",
    "compile/test_transformers.py",
    "plan/test_transformers.py",
    "convert/test_transformers.py",
    "benchmarks/test_host_time.py",
    "memory/test_transformers.py",
    "convert/test_head_with.py",
    "plan/test_floor.py",
    "plan/test_shown.py",
    "examples/test_examples.py",
    "docs/test_outputs.py",
    "docs/test_pages.py",
    "memory/test_prediction.py",
    "ops/test_dispatcher.py",
    "ops/test_compile.py",
    "simt/test_norms.py",
    "simt/test_layer_norm.py",
    "demo/test_run.py",
    "ops/test_cpu_capability.py",
    "checkpoint/test_ops_in_regions.py",
    "benchmarks/test_harness.py",
    "checkpoint/test_memory.py",
)

# The same examples in every run, and no time limit per example on a busy machine.
hypothesis.settings.register_profile(
    "memopt",
    derandomize=True,
    deadline=None,
    max_examples=40,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("memopt")


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return ["cpu"]
    import memopt  # only here: files that do not need the extension are collected without it

    return ["cpu", "cuda"] if memopt.build_info()["cuda"] else ["cpu"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: not in `make test`")
    config.addinivalue_line("markers", "thorough: in `make test-thorough` alone")
    # xdist would begin with the files that have the most tests, and end with those that have one.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = sys.modules.get("tests.support.cases")  # None where no test of ops is among them
    combinations: dict[str, list[pytest.Item]] = {}
    met: Counter[str] = Counter()
    for item in items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        further = (
            cases is not None and isinstance(case, cases.OpCase) and case not in cases.FAMILIES
        )
        name = item.nodeid.partition("[")[0].rpartition("::")[2]
        is_slow = f"{item.path.name}::{name}" in SLOW
        if further or is_slow or item.path.is_relative_to(SIMT):
            item.add_marker(pytest.mark.slow)
        elif not item.get_closest_marker("slow"):
            combinations.setdefault(item.nodeid.partition("[")[0], []).append(item)
        test = f"{item.path.relative_to(ROOT)}::{name}"
        if test in THOROUGH and item.get_closest_marker("slow"):
            if met[test] % THOROUGH[test]:
                item.add_marker(pytest.mark.thorough)
            met[test] += 1
    tests = Counter(item.path for item in items)
    rank = {ROOT / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path, len(rank)), -tests[item.path], item.path))
    for some in combinations.values():
        step = _step(len(some), most=40)
        for item in (item for k, item in enumerate(some) if k % step):
            item.add_marker(pytest.mark.slow)


def _step(number: int, most: int) -> int:
    """How many combinations of `number` to go on by, to meet `most` of them or a few more.

    A prime that does not divide their number, so that it divides the length of no list that was
    crossed: each value of each list is met.
    """
    primes = (1, 2, 3, 5, 7, 11, 13, 17, 19, 23)
    return next((p for p in primes if number <= most * p and (p == 1 or number % p)), 1)


def pytest_collection_finish() -> None:
    """What is there before the first test is there after the last: with 20,000 tests collected,
    each gc.collect() of a test would look at millions of objects. What tests import later stays as
    well (a model's file a family): the collector looks through it a tenth as often as it would.

    pytest puts a handler on each logger that does not hand its records on, six times a test;
    PyTorch has 45 of these. So that takes a millisecond a test, 40 seconds in all.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 10, 10)


@pytest.hookimpl
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """In a process of xdist's: one message for a test that passed, and not five. Each takes as
    long, here and where it arrives, as many a test.
    """
    config = item.config
    if not hasattr(config, "workerinput") or config.getoption("xmlpath", None):
        return None  # pytest's own
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        # Fixtures that take long are among --durations.
        if report.when == "call" or not report.passed or report.duration > 0.05:
            config.hook.pytest_runtest_logreport(report=report)
    return True


def pytest_report_header(config: pytest.Config) -> str:
    return f"memopt: torch {torch.__version__}, op tests on {' and '.join(_devices())}"


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that memopt has kernels for here."""
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """For what a CPU has no counterpart of. Skips without a GPU."""
    if "cuda" not in _devices():
        pytest.skip("needs a GPU, and a build of memopt with CUDA kernels")
    return torch.device("cuda")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors are quickest on one thread, and threads that wait for a busy core cost tenfold.

    test_determinism.py proves that every number of threads gives the same bits.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_look_through() -> Iterator[None]:
    """What a file leaves that took long (models' code, mostly) is not looked through again by each
    gc.collect() of a later test: a third of a second, for tests of a hundredth.
    """
    began = perf_counter()
    yield
    if perf_counter() - began > 20:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    seed(0)


@pytest.fixture(autouse=True)
def _no_state_of_libraries() -> Iterator[None]:
    """What libraries keep for a process does not outlive a test: accelerate's mixed precision, and
    PyTorch's count of compilations of one function, beyond which it runs without a graph.
    """
    yield
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture(autouse=True)
def _no_function_stays_exchanged() -> Iterator[None]:
    """Whatever a test did or raised, PyTorch's functions are its own again."""
    yield
    exchanged = sys.modules.get("memopt.memory.exchanged")
    assert exchanged is None or not exchanged._stand_ins


@pytest.fixture
def collector_off() -> Iterator[None]:
    """For tests that count what is alive: garbage of an earlier test does not end in the middle."""
    from memopt.memory.garbage import no_collection

    with no_collection():
        yield


@pytest.fixture
def restore_num_threads() -> Iterator[None]:
    """Lets a test call torch.set_num_threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def child_environment() -> dict[str, str]:
    """For a child Python: finds this memopt and these tests; none of the variables that memopt
    reads.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MEMOPT_")}
    return {**kept, "PYTHONPATH": path}
