"""convert(autocast_norms=...): the dtype of norms under autocast."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from torch import nn

from memopt._convert.match import Answer, Match
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
