"""Tells norms what their rules do not know: the dtype under autocast that the caller of `convert`
chose, and whether the code around writes their inputs in place.

`h = h + f(norm(h))` may be written as `h += f(norm(h))`. memopt's op keeps its input. A norm by
hand may keep only what it has computed, in 16 bits a copy in float32, and its input may be written.
Where the module that calls it seems to do so, the op gets a copy: nobody sees the writing before
backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from torch import nn

from memopt._convert.match import Answer, Match
from memopt._convert.rules.code_reads import writes_in_place
from memopt._convert.rules.norm_swap import NormSwap
from memopt._convert.swap import TorchSwap

AutocastNorms = Literal["keep", "lower"]


def check_autocast_norms(choice: object) -> None:
    if choice not in get_args(AutocastNorms):
        raise ValueError(f"convert: autocast_norms must be 'keep' or 'lower', got {choice!r}")


def with_autocast_norms(matches: list[Match], choice: AutocastNorms) -> list[Match]:
    """The matches, with the norms among them told what to do under autocast."""
    if choice == "keep":
        return matches
    return [replace(found, answer=_lowering(found.answer)) for found in matches]


def _lowering(answer: Answer) -> Answer:
    if isinstance(answer, NormSwap) or (
        isinstance(answer, TorchSwap) and issubclass(answer.base, (nn.LayerNorm, nn.RMSNorm))
    ):
        return replace(answer, lowers=True)
    return answer


def with_written_inputs(matches: list[Match], model: nn.Module) -> list[Match]:
    """The matches, with norms told whose owners seem to write tensors in place."""
    norms = {each.module for each in matches if _may_copy(each)}
    writes: dict[type[nn.Module], bool] = {}
    written = set()
    for owner in model.modules() if norms else ():
        found = norms.intersection(owner.children())
        if found and type(owner) not in writes:
            writes[type(owner)] = writes_in_place(owner)
        if found and writes[type(owner)]:
            written |= found
    return [
        replace(each, answer=replace(each.answer, is_written=True))
        if isinstance(each.answer, NormSwap) and each.module in written
        else each
        for each in matches
    ]


def _may_copy(found: Match) -> bool:
    return isinstance(found.answer, NormSwap) and bool(found.answer.copies)
