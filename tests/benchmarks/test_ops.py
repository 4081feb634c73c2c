"""Proves that every op that is benchmarked is measured as results on file say: the cases and the
variants of each are theirs, and PyTorch's form and memopt's compute the same.
"""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import cli, ops
from benchmarks.op import Op, build

ALL = [
    pytest.param(name, case, form, id="-".join(filter(None, (case, form))))
    for name, family in ops.FAMILIES.items()
    for case in family.cases
    for form in (cli.FORMS if family.has_forms else (None,))
]


def op_of(name: str, case: str, form: str | None) -> Op:
    make = ops.FAMILIES[name].cases[case]
    return make() if form is None else make(form)


def test_each_family_is_run_by_its_name() -> None:
    assert tuple(ops.FAMILIES) == cli.OPS


def test_an_op_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["gelo"], []):
        assert ops.main(argv) == 2
        assert f"got {''.join(argv)!r}" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "case", "form"), ALL)
def test_variants_are_those_of_results_on_file(name: str, case: str, form: str | None) -> None:
    """At the op's smallest size there: what runs, and the least bytes."""
    found = json.loads((cli.RESULTS / f"cpu_{name}.json").read_text())
    family = ops.FAMILIES[name]
    assert found["goals"] == family.goals
    op = op_of(name, case, form)
    records = [
        record
        for record in found["cases"].values()
        if (record["op"], record["approximate"], record["dtype"]) == (case, form, "float32")
    ]
    assert {r["direction"] for r in records} == set(family.directions or cli.DIRECTIONS)
    for record in records:
        size = (record["direction"], record["rows"], record["cols"], torch.float32)
        assert ops.ideal_bytes(op, *size) == record["ideal_bytes"], record["direction"]
        variants = build(op, record["direction"], 4, 128, torch.float32, "cpu", ())
        assert [v.name for v in variants] == list(record["variants"]), record["direction"]
        for variant in variants:
            counts = record["variants"][variant.name]["saved_bytes"] is not None
            assert (variant.forward is not None) == counts, variant.name


# PyTorch's derivative of hardsigmoid is float32's sixth in float64 as well, 5e-9 too large.
SIXTH_OVER_PYTORCHS = 1 / 6 / torch.tensor(1 / 6, dtype=torch.float32).double().item()


@pytest.mark.parametrize(("name", "case", "form"), ALL)
def test_variants_compute_the_same(name: str, case: str, form: str | None) -> None:
    op = op_of(name, case, form)
    for direction in ops.FAMILIES[name].directions or cli.DIRECTIONS:
        variants = build(op, direction, 4, 128, torch.float64, "cpu", ())
        expected, *others = (gradients_or_output(v.run()) for v in variants)
        if "dropout" in case:  # each draws its own mask
            assert all(t.isfinite().all() for tensors in (expected, *others) for t in tensors)
            continue
        if case == "hardsigmoid" and direction != "forward":
            expected = [t * SIXTH_OVER_PYTORCHS for t in expected]
        for variant, tensors in zip(variants[1:], others, strict=True):
            # Forward's statistics, and the output that is written again, come last.
            count = len(op.outputs) if direction == "forward" else len(expected)
            for one, other in zip(expected[:count], tensors, strict=False):
                torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9, msg=variant.name)


def gradients_or_output(results: object) -> list[torch.Tensor]:
    tensors = [results] if isinstance(results, torch.Tensor) else list(results)  # type: ignore[call-overload]
    return [t for t in tensors if t is not None]
