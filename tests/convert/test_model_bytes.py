"""Proves, storage by storage, what twelve models of transformers in bfloat16 keep for backward
before convert and after: the terms of model_terms.py, at two sizes, and nothing else. convert's
report counts the same. Converted twice a model keeps the same; reverted it keeps what it kept.

`pytest -rP` prints one table of all, and one of each model's terms.
"""

from __future__ import annotations

import functools

import pytest

import memopt
from benchmarks.convert_models.model_terms import (
    MODEL_TERMS,
    count,
    count_before_and_after,
    model_and_inputs,
)
from benchmarks.convert_models.models import MODELS
from benchmarks.convert_models.sizes import Sizes
from memopt.memory.saved import SavedTensors
from tests.support.byte_table import assert_kept

pytest.importorskip("transformers")

# No two symbols alike, so that terms of different symbols differ in size.
SMALL = Sizes(n=2, h=48, heads=6, kv_heads=2, m=112, words=101, tokens=20)
DEEPER = Sizes(n=3, h=96, heads=4, kv_heads=1, m=160, words=139, tokens=37)


@functools.cache
def counted(name: str, sizes: Sizes) -> tuple[SavedTensors, SavedTensors]:
    """Before and after convert."""
    return count_before_and_after(name, sizes)


def test_every_model_has_its_terms() -> None:
    assert list(MODEL_TERMS) == list(MODELS)


@pytest.mark.parametrize("sizes", [SMALL, DEEPER], ids=["small", "deeper"])
@pytest.mark.parametrize("name", MODELS)
def test_kept_is_what_the_terms_say(name: str, sizes: Sizes) -> None:
    symbols = MODEL_TERMS[name].symbols(sizes)
    tokens = symbols.pop("tokens")
    for terms, saved in zip(MODEL_TERMS[name].terms(sizes), counted(name, sizes), strict=True):
        assert_kept(terms, saved, tokens=tokens, **symbols)


@pytest.mark.parametrize("name", MODELS)
def test_the_report_counts_the_same(name: str) -> None:
    report = memopt.convert(*model_and_inputs(name, SMALL), head=False)
    before, after = counted(name, SMALL)
    assert (report.bytes_before, report.bytes_after) == (before.bytes, after.bytes)


def test_table_of_all_models() -> None:
    """Every model keeps less."""
    print(f"\n{'model':12}{'before':>9}{'after':>9}{'ratio':>7}  bytes a token: a layer; the rest")
    for name, terms in MODEL_TERMS.items():
        before, after = (saved.bytes for saved in counted(name, SMALL))
        layer, rest = terms.formulas()["layer"], terms.formulas()["rest"]
        print(f"{name:12}{before:9}{'':16}  {layer['before']}; {rest['before']}")
        print(f"{'':21}{after:9}{after / before:7.2f}  {layer['after']}; {rest['after']}")
        assert after < before


def test_converted_twice_and_reverted() -> None:
    model, inputs = model_and_inputs("Llama", SMALL)
    before, after = counted("Llama", SMALL)
    for _ in range(2):
        memopt.convert(model, head=False)
        assert sorted(count(model, inputs).storage_bytes) == sorted(after.storage_bytes)
    memopt.revert(model)
    assert sorted(count(model, inputs).storage_bytes) == sorted(before.storage_bytes)
