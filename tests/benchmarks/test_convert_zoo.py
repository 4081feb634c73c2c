"""Proves: the table of models says what convert does, on those whose library is installed: the
bytes before and after are those of the JSON where the library has the version of the JSON; no model
saves more than before; and what the report claims is what the allocator holds, to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from benchmarks import convert_zoo
from benchmarks.cli import RESULTS
from benchmarks.convert_models.zoo import ZOO, Entry
from memopt._head.logits import pending_of
from memopt.memory.allocator import LiveBytes
from memopt.memory.attribution import _nodes, tensors_of
from memopt.memory.saved import SavedTensors
from memopt.memory.storages import storages

CASES: dict[str, Any] = json.loads((RESULTS / convert_zoo.OUT).read_text())["cases"]

# Of different mechanisms: gated units, RMS norms, an activation by formula, one encoder and one
# decoder, images.
FAST = ("llama", "gpt2", "bert", "t5", "vit")


def key(entry: Entry) -> str:
    return f"{entry.library}: {entry.name}"


def entries() -> list[Any]:
    return [
        pytest.param(e, id=key(e), marks=[] if e.name in FAST else [pytest.mark.slow]) for e in ZOO
    ]


def test_the_table_is_made_from_the_json() -> None:
    assert convert_zoo.DOCS.read_text() == convert_zoo.markdown(CASES, convert_zoo.HEAD)


def test_sixty_models_and_none_above_what_it_saved() -> None:
    measured = {name: case for name, case in CASES.items() if "ratio" in case}
    assert len(measured) >= 60
    assert sum(case["library"] == "transformers" for case in measured.values()) >= 45
    assert set(measured) <= {key(entry) for entry in ZOO}
    for name, case in measured.items():
        assert case["after_bytes"] <= case["before_bytes"], name
        assert case.get("regions_bytes", 0) <= case["before_bytes"], name
        if case["ratio"] > convert_zoo.EXPLAINED:
            assert convert_zoo.explanation(case), name


def skip_unless_installed(entry: Entry) -> None:
    if not entry.importable():
        pytest.skip(f"{entry.library} cannot be imported")
    if "error" in CASES.get(key(entry), {"error": ""}):
        pytest.skip("not in the table")


@pytest.mark.parametrize("entry", entries())
def test_bytes_are_the_table_s(entry: Entry) -> None:
    skip_unless_installed(entry)
    recorded, case = CASES[key(entry)], convert_zoo.measure(entry)
    assert case["after_bytes"] <= case["before_bytes"]
    package = {"open_clip": "open_clip_torch"}.get(entry.library, entry.library)
    if metadata.version(package) == recorded["version"]:
        assert case == recorded
    else:
        assert case["ratio"] <= recorded["ratio"] + 0.05


@pytest.mark.parametrize("entry", entries())
def test_the_report_s_claim_is_the_allocator_s(entry: Entry) -> None:
    """Beside what is saved and returned the graph holds the numbers that products were formed with,
    8 bytes each, which PyTorch shows to no hook. Nothing else: not a byte. Convert adds none.
    """
    skip_unless_installed(entry)
    model, inputs = entry.make()
    before, beyond, numbers = _allocated(model, inputs)
    assert beyond == numbers
    report = memopt.convert(model, inputs)
    after, beyond, numbers_after = _allocated(model, inputs)
    assert beyond == numbers_after <= numbers
    assert (before, after) == (report.bytes_before, report.bytes_after)
    assert sum(share.nbytes for share in report.remaining) == report.bytes_after


def _allocated(model: nn.Module, inputs: Any) -> tuple[int, int, int]:
    """Bytes that a forward saves; those that the allocator has beyond these and the output; and
    those of the numbers in the graph.
    """
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    model(*args, **kwargs)  # whatever it or PyTorch keeps from the first call on
    constant = [*model.parameters(), *model.buffers()]
    arguments = tensors_of((args, kwargs))
    there_before = storages([*constant, *_attributes(model), *arguments])
    saved = SavedTensors(exclude=constant, parameters=False, dropped=False)
    with torch.random.fork_rng(), LiveBytes() as live, saved:
        torch.manual_seed(0)  # paths that are drawn
        output = model(*args, **kwargs)
    held = {name: nbytes for name, (nbytes, _) in saved.by_storage().items()}
    # Also what the forward left in attributes of modules, as a table of positions is.
    # Lazy logits hold the head's input, and a bias that was added, in place of themselves.
    outputs = list(tensors_of(output))
    pending = [p for tensor in outputs if (p := pending_of(tensor)) is not None]
    lazy = [t for p in pending for t in (p.call.input, p.extra) if t is not None]
    left = {**held, **storages([*outputs, *lazy]), **storages(_attributes(model))}
    known = sum(nbytes for name, nbytes in left.items() if name not in there_before)
    numbers = sum(storages(_numbers(output)).values())
    return sum(held.values()), live.left - known, numbers


def _numbers(output: object) -> Iterator[Tensor]:
    """What the graph saved past the hooks: numbers that Python gave, as tensors."""
    for node in _nodes(tensors_of(output)).values():
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
        yield from (t for s in saved if isinstance(t := getattr(s, "data", None), Tensor))


def _attributes(model: nn.Module) -> list[Tensor]:
    return [t for module in model.modules() for t in tensors_of(vars(module))]
