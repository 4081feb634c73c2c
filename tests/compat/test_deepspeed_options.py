"""Proves memopt.compat.deepspeed.checkpointing: each option does what it says, what cannot be
configured changes nothing, and random numbers of a model-parallel rank are in the recompute what
they were in forward.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.compat.deepspeed import checkpointing
from tests.checkpoint.support import mlp, step_results
from tests.compat.support import buffers, run
from tests.support.bits import assert_same_bits


def test_what_cannot_be_configured_changes_nothing(tmp_path: Path) -> None:
    """DeepSpeed's module globals had changed when `configure` raised."""
    (tmp_path / "broken.json").write_text("{")
    checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=4)
    before = checkpointing._state.options, checkpointing._state.buffers
    section = "activation_checkpointing"
    count = "num_checkpoints must be an int of at least 1, got"
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, f"{count} '4'", {"num_checkpoints": "4"}),
        (TypeError, f"{count} True", {"num_checkpoints": True}),
        (ValueError, f"{count} 0", {"num_checkpoints": 0}),
        (TypeError, "profile must be True or False, got 1", {"profile": 1}),
        (TypeError, "must be a dict or the path", {"deepspeed_config": 3}),
        (TypeError, "must be a dict, got bool", {"deepspeed_config": {section: True}}),
        (
            ValueError,
            "must be among partition_activations, .*got 'number_checkpoint'",
            {"deepspeed_config": {section: {"number_checkpoint": 3}}},
        ),
        (
            TypeError,
            "synchronize must be True or False, got 'yes'",
            {"deepspeed_config": {section: {"synchronize_checkpoint_boundary": "yes"}}},
        ),
        (ValueError, "must be a file in JSON", {"deepspeed_config": tmp_path / "broken.json"}),
        (FileNotFoundError, "none.json", {"deepspeed_config": str(tmp_path / "none.json")}),
        (
            TypeError,
            "mpu_ must have get_model_parallel_group",
            {"mpu_": object(), "partition_activations": True},
        ),
    ]
    for kind, message, arguments in wrong:
        with pytest.raises(kind, match=message):
            checkpointing.configure(**arguments)
        assert (checkpointing._state.options, checkpointing._state.buffers) == before
    with pytest.raises(TypeError, match="nlayers must be an int of at least 1"):
        checkpointing.set_num_layers(2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="partition_activations must be True or False, got 1"):
        checkpointing.partition_activations_in_checkpoint(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="function must be callable, got Tensor"):
        checkpointing.checkpoint(torch.ones(1))  # type: ignore[arg-type]
    assert (checkpointing._state.options, checkpointing._state.buffers) == before


def test_is_configured() -> None:
    assert not checkpointing.is_configured()
    with pytest.raises(TypeError):
        checkpointing.configure(None, profile=2)  # type: ignore[arg-type]
    assert not checkpointing.is_configured()
    checkpointing.configure()
    assert checkpointing.is_configured()


@pytest.mark.parametrize("as_file", [False, True])
def test_a_configuration_and_arguments_that_go_before_it(as_file: bool, tmp_path: Path) -> None:
    config: Any = {
        "train_batch_size": 8,
        "activation_checkpointing": {
            "partition_activations": True,
            "contiguous_memory_optimization": True,
            "number_checkpoints": 7,
            "cpu_checkpointing": False,
            "synchronize_checkpoint_boundary": True,
            "profile": True,
        },
    }
    if as_file:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        config = str(path)
    checkpointing.configure(None, config, profile=False, num_checkpoints=3)
    found = checkpointing._state.options
    assert found == type(found)(
        partition_activations=True,
        contiguous_checkpointing=True,
        num_checkpoints=3,
        synchronize=True,
    )
    checkpointing.set_num_layers(9)
    checkpointing.partition_activations_in_checkpoint(False)
    assert checkpointing._state.options == type(found)(
        contiguous_checkpointing=True, num_checkpoints=9, synchronize=True
    )
    checkpointing.configure(None, {"train_batch_size": 8})
    assert checkpointing._state.options == type(found)()


def test_contiguous_checkpointing_and_reset() -> None:
    checkpointing.configure(None, contiguous_checkpointing=True)
    blocks = [mlp(8) for _ in range(3)]
    for _ in range(2):
        run(blocks, torch.randn(16, 8), checkpointing.checkpoint).sum().backward()
    (row,) = buffers().stats()
    assert (row["slab_bytes"], row["copies"]) == (3 * 512, 3)
    before = buffers()
    loss = run(blocks, torch.randn(16, 8), checkpointing.checkpoint).sum()
    checkpointing.reset()
    loss.backward()
    assert before.stats()[0]["slab_bytes"] == 0
    assert buffers().stats() == []
    checkpointing.configure(None)
    assert checkpointing._state.buffers is None
    checkpointing.reset()


def test_timings_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(None, profile=True)
    blocks = [mlp(8) for _ in range(3)]
    with caplog.at_level(logging.INFO, "memopt.compat.deepspeed"):
        run(blocks, torch.randn(4, 8), checkpointing.checkpoint).sum().backward()
    found = checkpointing.timings(reset=True)
    assert (found.forward_calls, found.recompute_calls) == (3, 3)
    assert found.forward_seconds > 0
    assert found.recompute_seconds > 0
    texts = [record.getMessage().split(":")[0] for record in caplog.records]
    assert texts == ["forward of a region"] * 3 + ["recompute of a region"] * 3
    assert checkpointing.timings() == checkpointing.Timings()


def test_checkpoint_function() -> None:
    """Code that calls DeepSpeed's autograd function itself, as Megatron's forks do."""
    x = torch.randn(4, requires_grad=True)
    outputs: list[Any] = []
    first, second = checkpointing.CheckpointFunction.apply(
        lambda x, n: (x.sin(), n, x.cos()), outputs, x * 1, 3
    )
    assert [type(output) for output in outputs] == [Tensor, int, Tensor]
    assert outputs[0] is first
    assert outputs[2] is second
    (first + second).sum().backward()
    assert torch.equal(x.grad, x.detach().cos() - x.detach().sin())
    alone: list[Any] = []
    assert checkpointing.CheckpointFunction.apply(torch.sin, alone, x * 1) is alone[0]


class Mpu:
    """As Megatron's, of one of two ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_model_parallel_rank(self) -> int:
        return self.rank


def test_seeds_differ_between_ranks_where_they_should() -> None:
    drawn = []
    for rank in range(2):
        checkpointing.configure(Mpu(rank))
        checkpointing.model_parallel_cuda_manual_seed(17)
        with checkpointing.get_cuda_rng_tracker().fork():
            own = torch.rand(4)
        drawn.append((torch.rand(4), own))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][1], drawn[1][1])
    for rank in range(2):
        torch.manual_seed(17 + 2718 + rank)
        assert torch.equal(torch.rand(4), drawn[rank][1])
    checkpointing.model_parallel_reconfigure_tp_seed(17)
    with checkpointing.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), drawn[1][1])


def test_fork_goes_on_where_it_ended() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("a", 5)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    parts = []
    for _ in range(2):
        with contextlib.suppress(ArithmeticError), tracker.fork("a"):
            parts.append(torch.rand(3))
            raise ArithmeticError
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(5)
    assert torch.equal(torch.cat(parts), torch.cat([torch.rand(3), torch.rand(3)]))


def test_tracker_errors() -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    nowhere = r"name must be one that was added \(none\), got 'a'"
    with pytest.raises(ValueError, match=nowhere), tracker.fork("a"):
        pass
    tracker.add("a", 5)
    with pytest.raises(ValueError, match="seed must be a new one, got 5"):
        tracker.add("b", 5)
    with pytest.raises(ValueError, match="name must be a new one, got 'a'"):
        tracker.add("a", 6)
    with pytest.raises(ValueError, match=r"\('a'\), got 'b'"), tracker.fork("b"):
        pass


@pytest.mark.parametrize("nested", [False, True])
def test_fork_inside_regions(nested: bool, options: dict[str, Any]) -> None:
    """Dropout by both states: the plain run's bits, and afterwards both states are where the plain
    run leaves them.
    """
    tracker = checkpointing.get_cuda_rng_tracker()

    def dropouts(x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.sin())
        with tracker.fork():
            return nn.functional.dropout(x.exp(), 0.3)

    def outer(call: Callable[..., Any], x: Tensor) -> Tensor:
        return call(dropouts, call(dropouts, x)).cos()

    x = torch.randn(64, requires_grad=True)

    def results(call: Callable[..., Any]) -> list[Tensor | None]:
        checkpointing.model_parallel_cuda_manual_seed(3)

        def model() -> Tensor:
            y = x * 1
            for _ in range(3):
                y = call(outer, call, y) if nested else outer(call, y)
            return y

        found = step_results(model, [x])
        return [*found, torch.get_rng_state(), *tracker.get_states().values()]

    expected = results(lambda f, *args: f(*args))
    for _ in range(3):
        assert_same_bits(results(checkpointing.checkpoint), expected)


def test_models_are_copied_as_ever() -> None:
    """The face holds no module."""
    block = mlp(8)
    checkpointing.configure(None, contiguous_checkpointing=True)
    run([block], torch.randn(4, 8), checkpointing.checkpoint).sum().backward()
    assert copy.deepcopy(block).state_dict().keys() == block.state_dict().keys()
