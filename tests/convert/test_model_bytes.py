"""Proves, storage by storage, what twelve models of transformers in bfloat16 keep for backward
before convert and after: the terms of model_terms.py, at two sizes, and nothing else. Converted
twice a model keeps the same; reverted it keeps what it kept.

`pytest -rP` prints one table of all, and one of each model's terms.
"""

from __future__ import annotations

import functools

import pytest
from torch import Tensor, nn

import memopt
from tests.convert.model_terms import MODEL_TERMS, Sizes
from tests.convert.models import MODELS
from tests.support.byte_table import assert_kept
from tests.support.saved_bytes import SavedTensors

# No two symbols alike, so that terms of different symbols differ in size.
SMALL = Sizes(n=2, h=48, heads=6, kv_heads=2, m=112, words=101, tokens=20)
DEEPER = Sizes(n=3, h=96, heads=4, kv_heads=1, m=160, words=139, tokens=37)


def count(model: nn.Module, inputs: dict[str, Tensor]) -> SavedTensors:
    with SavedTensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
        output = model(**inputs)
    del output
    return saved


@functools.cache
def counted(name: str, sizes: Sizes) -> tuple[SavedTensors, SavedTensors]:
    """Before and after convert."""
    terms = MODEL_TERMS[name]
    model = MODELS[name].make(**terms.changes(sizes)).bfloat16()
    inputs = MODELS[name].inputs(**terms.inputs(sizes))
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    before = count(model, inputs)
    report = memopt.convert(model, inputs)
    after = count(model, inputs)
    assert (report.bytes_before, report.bytes_after) == (before.bytes, after.bytes)
    return before, after


def test_every_model_has_its_terms() -> None:
    assert list(MODEL_TERMS) == list(MODELS)


@pytest.mark.parametrize("sizes", [SMALL, DEEPER], ids=["small", "deeper"])
@pytest.mark.parametrize("name", MODELS)
def test_kept_is_what_the_terms_say(name: str, sizes: Sizes) -> None:
    symbols = MODEL_TERMS[name].symbols(sizes)
    tokens = symbols.pop("tokens")
    for terms, saved in zip(MODEL_TERMS[name].terms(sizes), counted(name, sizes), strict=True):
        assert_kept(terms, saved, tokens=tokens, **symbols)


def test_table_of_all_models() -> None:
    """Every model keeps less."""
    print(f"\n{'model':12}{'before':>9}{'after':>9}{'ratio':>7}  formula, bytes")
    for name, terms in MODEL_TERMS.items():
        before, after = counted(name, SMALL)
        assert after.bytes < before.bytes
        first, second = terms.formulas()
        print(f"{name:12}{before.bytes:9}{'':16}  {first}")
        print(f"{'':21}{after.bytes:9}{after.bytes / before.bytes:7.2f}  {second}")


def test_reverted_models_keep_what_they_kept() -> None:
    terms = MODEL_TERMS["Llama"]
    model = MODELS["Llama"].make(**terms.changes(SMALL)).bfloat16()
    inputs = MODELS["Llama"].inputs(**terms.inputs(SMALL))
    before = count(model, inputs)
    memopt.convert(model)
    memopt.convert(model)
    assert count(model, inputs).bytes == counted("Llama", SMALL)[1].bytes
    memopt.revert(model)
    assert sorted(count(model, inputs).storage_bytes) == sorted(before.storage_bytes)
