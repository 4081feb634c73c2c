"""Proves: the CPU kernels of every instruction set (baseline, AVX2, AVX-512) are accurate and agree
with one another within rounding, MEMOPT_CPU_CAPABILITY chooses among them, and a name that cannot
be had is a clear error.
"""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.support.capability_probe import LOSS_CHUNK, calls, loss_calls
from tests.support.cases import VALUE_CASES, OpCase, Results
from tests.support.forks import run_in_forks
from tests.support.losses import assert_as_right_as_pytorch, exactly, pytorchs
from tests.support.oracle import allowances, assert_results_accurate, exact_results
from tests.support.tolerances import BETWEEN_IMPLEMENTATIONS, worst_error

COMPILED = tuple(memopt.build_info()["cpu_capabilities"])
# What PyTorch says of this processor, and which of our tables it can then run.
RUNNABLE = {
    "DEFAULT": ("baseline",),
    "AVX2": ("baseline", "avx2"),
    "AVX512": ("baseline", "avx2", "avx512"),
}.get(torch.backends.cpu.get_cpu_capability(), ("baseline",))


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory, child_environment: dict[str, str]):
    """Results of all ops under a capability, each from a process of its own."""
    folder = tmp_path_factory.mktemp("capability")
    module = "tests.support.capability_probe"
    program = f"import {module}; {module}.save_results({str(folder)!r})"
    settings = [{"MEMOPT_CPU_CAPABILITY": capability} for capability in RUNNABLE]
    run_in_forks(program, settings, child_environment)
    done = {capability: torch.load(folder / f"{capability}.pt") for capability in RUNNABLE}

    def run(capability: str) -> dict:
        if capability not in RUNNABLE:
            pytest.skip(f"this processor does not have {capability}")
        return done[capability]

    return run


def test_compiled_instruction_sets() -> None:
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2", "AVX512"):
        assert COMPILED == ("baseline", "avx2", "avx512")
    assert COMPILED[0] == "baseline"


@pytest.mark.parametrize("capability", COMPILED)
def test_build_info_says_which_is_in_use(capability: str, probe) -> None:
    assert probe(capability)["capability"] == capability


@pytest.mark.parametrize("capability", COMPILED)
@pytest.mark.parametrize("case", VALUE_CASES, ids=str)
def test_accuracy(case: OpCase, capability: str, probe) -> None:
    results = probe(capability)["results"]
    for name, call in calls(case).items():
        assert_results_accurate(case, call, Results(results[f"{case} {name}"]))


@pytest.mark.parametrize("capability", COMPILED)
def test_accuracy_of_losses(capability: str, probe) -> None:
    results = probe(capability)["losses"]
    for name, (tensors, target, upstream, settings) in loss_calls().items():
        theirs = pytorchs(tensors, target, upstream, LOSS_CHUNK, **settings)
        exact = exactly(tensors, target, upstream, **settings)
        assert_as_right_as_pytorch(results[name], theirs, exact)


@pytest.mark.parametrize("capability", COMPILED[1:])
@pytest.mark.parametrize("case", VALUE_CASES, ids=str)
def test_agreement_with_the_baseline(case: OpCase, capability: str, probe) -> None:
    ours, baseline = probe(capability)["results"], probe("baseline")["results"]
    for name, call in calls(case).items():
        allowed = allowances(case, call, exact_results(case, call))
        a, b = ours[f"{case} {name}"], baseline[f"{case} {name}"]
        for field, value in a.items():
            if value is not None:
                difference = worst_error(value, b[field].double(), allowed[field])
                assert difference <= BETWEEN_IMPLEMENTATIONS, f"{field} of {case} on {name}"


CAPABILITY = """
try:
    memopt.functional.gelu(torch.zeros(1))
    print(memopt.build_info()["cpu_capability"])
except RuntimeError as error:
    print(error)
"""


def test_the_variable_that_chooses(child_environment: dict[str, str]) -> None:
    """Empty: the best. A name that is unknown, or that this processor lacks, is an error."""
    lacking = [name for name in COMPILED if name not in RUNNABLE][:1]
    settings = [{"MEMOPT_CPU_CAPABILITY": name} for name in ("", "sse9", *lacking)]
    program = f"import torch, memopt\n{CAPABILITY}"
    best, unknown, *missing = run_in_forks(program, settings, child_environment)
    assert best.strip() == RUNNABLE[-1]
    names = ", ".join(COMPILED)
    assert f"gelu: MEMOPT_CPU_CAPABILITY must be one of {names}, got 'sse9'" in unknown
    for name, said in zip(lacking, missing, strict=True):
        assert (
            f"MEMOPT_CPU_CAPABILITY must name an instruction set of this processor, got '{name}'"
        ) in said


STREAMING_PROGRAM = """
import hashlib
import torch
from tests.support.cases import EACH_OP, OP_CASES
from tests.support.shapes import DTYPES

digest = hashlib.sha256()
for case in OP_CASES:
    for dtypes in DTYPES if case in EACH_OP else DTYPES[:1]:
        call = case.make_call((37, 192), dtypes, torch.device("cpu"))
        outputs, saved = case.forward(call)
        results = case.backward(call, saved, recompute_output=True)
        for tensor in (*outputs.values(), *results.values()):
            if tensor is not None:
                digest.update(tensor.contiguous().double().numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_stores_past_the_cache_write_the_same_bits(child_environment: dict[str, str]) -> None:
    """Results larger than the cache are stored by code of their own; the variable makes any size do
    so."""
    for capability in RUNNABLE:
        settings = [
            {"MEMOPT_CPU_CAPABILITY": capability, "MEMOPT_CPU_CACHE_BYTES": str(cache_bytes)}
            for cache_bytes in (0, 1 << 60)
        ]
        digests = run_in_forks(STREAMING_PROGRAM, settings, child_environment)
        assert digests[0] == digests[1] != "", capability
