"""A plan as JSON, and what a model must be like for it."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memopt._plan.bytes import StageBytes
from memopt._plan.choose import Terms
from memopt._plan.levels import Case
from memopt._plan.planned import Planned, PlannedBlock
from memopt._plan.profile import Profile
from memopt._plan.seconds import StageSeconds
from memopt._version import __version__
from memopt.assignment import Assignment, Choice
from memopt.memory.sizes import Size

_FORMAT = "memopt plan 3"


def signature_of(model: nn.Module, paths: Iterable[str]) -> dict[str, str]:
    """Return, by path, the class of a block and a digest of its parameters' names, shapes and
    dtypes.
    """
    modules = dict(model.named_modules())
    return {path: _look(modules[path]) for path in paths if path in modules}


def _look(block: nn.Module) -> str:
    parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in block.named_parameters()]
    digest = hashlib.sha256(repr(parameters).encode()).hexdigest()[:12]
    return f"{type(block).__qualname__} {digest}"


def plan_as_dict(plan: Planned) -> dict[str, Any]:
    """Return a plan with its profile, so that a loaded one has its table and its curve."""
    profile, terms = plan.profile, plan.terms
    return {
        "format": _FORMAT,
        "memopt": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "model": plan.model,
        "signature": plan.signature,
        "budget": plan.budget,
        "budget_given": getattr(plan.budget, "given", ""),
        "peak": plan.peak,
        "measured_peak": plan.measured_peak,
        "seconds": plan.seconds,
        "plain_peak": plan.plain_peak,
        "plain_seconds": plan.plain_seconds,
        "is_timed": plan.is_timed,
        "in_step": plan.assignment.in_step,
        "notes": list(plan.notes),
        "blocks": [{**asdict(block), "choice": asdict(block.choice)} for block in plan.blocks],
        "terms": {**asdict(terms), "place": None if terms.place is None else str(terms.place)},
        "profile": {
            "paths": list(profile.paths),
            "kinds": list(profile.kinds),
            "sites": list(profile.sites),
            "base": profile.base,
            "optimizer": profile.optimizer,
            "gradients": list(profile.gradients),
            "ends": {
                name: {"bytes": asdict(nbytes), "seconds": asdict(seconds)}
                for name, (nbytes, seconds) in profile.ends.items()
            },
            "costs": [
                {
                    "site": site,
                    "choice": asdict(choice),
                    "bytes": asdict(nbytes),
                }
                for (site, choice), nbytes in profile.nbytes.items()
            ],
            "seconds": [
                {
                    "kind": case.kind,
                    "choice": asdict(case.choice),
                    "is_beside": case.is_beside,
                    **asdict(seconds),
                }
                for case, seconds in profile.seconds.items()
            ],
            "exact": [
                {"call": call, "choice": asdict(choice), "bytes": asdict(nbytes)}
                for (call, choice), nbytes in profile.exact.items()
            ],
            "is_timed": profile.is_timed,
            "spread": profile.spread,
            "in_order": profile.in_order,
            "no_regions": list(profile.no_regions),
        },
    }


def read(path: Path) -> dict[str, Any]:
    """Raises ValueError where the file holds no plan."""
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError:
        data = None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"Plan.load: {path} must hold a plan that was saved, got something else")
    return data


def fields_of(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's fields from what `plan_as_dict` gave."""
    terms = {**data["terms"]}
    place = terms["place"]
    terms["place"] = place if place in (None, "cpu", "disk") else Path(place)
    blocks = tuple(
        PlannedBlock(**{**block, "choice": Choice(**block["choice"])}) for block in data["blocks"]
    )
    return {
        "model": data["model"],
        "budget": Size(data["budget"], data.get("budget_given", "")),
        "blocks": blocks,
        "peak": data["peak"],
        "seconds": data["seconds"],
        "plain_peak": data["plain_peak"],
        "plain_seconds": data["plain_seconds"],
        "measured_peak": data["measured_peak"],
        "is_timed": data["is_timed"],
        "notes": tuple(data["notes"]),
        "assignment": Assignment(
            {b.path: b.choice for b in blocks}, terms["place"], data.get("in_step", False)
        ),
        "profile": _profile(data["profile"]),
        "terms": Terms(**terms),
        "signature": data["signature"],
    }


def _profile(data: dict[str, Any]) -> Profile:
    costs = data["costs"]
    return Profile(
        paths=tuple(data["paths"]),
        kinds=tuple(data["kinds"]),
        sites=tuple(data["sites"]),
        base=data["base"],
        optimizer=data["optimizer"],
        gradients=tuple(data["gradients"]),
        ends={
            name: (_bytes(end["bytes"]), StageSeconds(**end["seconds"]))
            for name, end in data["ends"].items()
        },
        nbytes={(c["site"], Choice(**c["choice"])): _bytes(c["bytes"]) for c in costs},
        seconds={
            Case(s["kind"], Choice(**s["choice"]), s["is_beside"]): StageSeconds(
                s["forward"], s["backward"]
            )
            for s in data["seconds"]
        },
        exact={(e["call"], Choice(**e["choice"])): _bytes(e["bytes"]) for e in data["exact"]},
        is_timed=data["is_timed"],
        spread=tuple(data["spread"]) if data.get("spread") else None,
        in_order=data["in_order"],
        no_regions=tuple(data.get("no_regions", ())),
    )


def _bytes(data: dict[str, Any]) -> StageBytes:
    return StageBytes(**{**data, "may_leave": tuple(data["may_leave"])})
