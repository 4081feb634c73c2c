"""Proves: memopt's top level has some twenty names, and others stand under its functions, for
people (documentation, signature, pickle) and for type checkers alike; names from before are
answered with a warning; PyTorch's arguments of apply_activation_checkpointing mean what they mean
there.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

import memopt
from memopt._public import MOVED

FUNCTIONS = ("checkpoint", "compile", "convert", "offload")
TYPED = """
import memopt
from torch import nn
reveal_type(memopt.offload.stats().places)
reveal_type(memopt.checkpoint.buffers(nn.ReLU()))
reveal_type(memopt.compile.options("1GiB"))
reveal_type(memopt.convert(nn.ReLU(), checkpoint=True))
reveal_type(memopt.plan(nn.ReLU(), None).peak)
reveal_type(memopt.plan(nn.ReLU(), None, compiled=True))
memopt.offload(fraction="much")
memopt.offload(share=1.0)
memopt.offload.state()
"""


def test_the_top_level_is_small() -> None:
    names = [name for name in memopt.__all__ if name != "__version__"]
    assert len(names) <= 27
    assert all(hasattr(memopt, name) for name in names)
    assert not any(
        inspect.ismodule(getattr(memopt, n)) for n in {*names} - {"functional", "nn", "types"}
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_with_names_under_it_is_still_a_function(name: str) -> None:
    function: Any = getattr(memopt, name)
    plain = function.__wrapped__
    assert inspect.signature(function) == inspect.signature(plain)
    assert function.__doc__ == plain.__doc__
    assert repr(function) == f"<function memopt.{name}>"
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(functools.partial(function)).func is function


@pytest.mark.parametrize("name", MOVED)
def test_a_name_from_before_says_where_it_is_now(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"memopt.{name} is now memopt.{MOVED[name]}"):
        found = getattr(memopt, name)
    assert found is functools.reduce(getattr, MOVED[name].split("."), memopt)


def test_a_name_that_never_was() -> None:
    with pytest.raises(AttributeError, match="module 'memopt' has no attribute 'quantize'"):
        memopt.quantize  # noqa: B018


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_type_checker_knows_the_names(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]
    root = Path(__file__).parent.parent
    said = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout
    for words in (
        'Revealed type is "tuple[memopt._offload.stats.PlaceStats, ...]"',
        'Revealed type is "memopt._checkpoint.buffers.CheckpointBuffers"',
        'Revealed type is "dict[str, Any]"',
        'Revealed type is "memopt._convert.report.Report"',
        'Revealed type is "int"',
        'Revealed type is "memopt._plan.compiled.CompiledPlan"',
        'incompatible type "str"; expected "float"',
        'Unexpected keyword argument "share"',
        'has no attribute "state"',
    ):
        assert words in said.replace("builtins.", ""), said
    assert said.count("error:") == 3, said


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 4))


def paths(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


@pytest.mark.parametrize(
    "how",
    [
        {"check_fn": lambda module: isinstance(module, Block)},
        {"auto_wrap_policy": ModuleWrapPolicy({Block})},
        {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=40)},
    ],
    ids=["check_fn", "policy", "function"],
)
def test_arguments_are_pytorchs(how: dict[str, Any]) -> None:
    """PyTorch's wrapper with either function wraps the same modules; memopt's, these too."""
    ours, theirs, regions = blocks(), blocks(), blocks()
    torchs.apply_activation_checkpointing(theirs, torchs.checkpoint_wrapper, **how)
    memopt.apply_activation_checkpointing(ours, torchs.checkpoint_wrapper, **how)
    expected = paths(theirs, torchs.CheckpointWrapper)
    assert expected
    assert paths(ours, torchs.CheckpointWrapper) == expected
    names = memopt.apply_activation_checkpointing(regions, **how)
    prefix = "._checkpoint_wrapped_module"
    assert sorted(names) == sorted(name.replace(prefix, "") for name in expected)
    x = torch.randn(2, 4)
    assert torch.equal(ours(x), regions(x))


def test_a_wrapper_of_ones_own_takes_no_options_of_ours() -> None:
    model = blocks()
    with pytest.raises(
        ValueError, match=r"given with another checkpoint_wrapper_fn, got early_stop"
    ):
        memopt.apply_activation_checkpointing(model, torchs.checkpoint_wrapper, early_stop=False)
    with pytest.raises(TypeError, match=r"checkpoint_wrapper_fn must be a function of a module"):
        memopt.apply_activation_checkpointing(model, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must return a module, got int for Block"):
        memopt.apply_activation_checkpointing(model, lambda module: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match=r"auto_wrap_policy must be a policy"):
        memopt.apply_activation_checkpointing(model, auto_wrap_policy=3)
    assert paths(model, Block) == ["0", "1"]
