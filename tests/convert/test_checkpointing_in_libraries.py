"""Proves: FairScale's own checkpoint_wrapper runs a converted block as often as a plain one and
holds no more, whichever comes first; what a model of diffusers keeps in plain attributes is not
counted as saved for backward, with regions no more than without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.allocator import LiveBytes
from tests.convert.test_gradient_checkpointing import Run, convert, same_bits, train
from tests.support.tiny_transformers import tiny


@pytest.mark.parametrize("family", ["llama", "vit"])
def test_fairscale_s_own_wrapper(family: str) -> None:
    """It replaces the forward of the instance."""
    module = pytest.importorskip("fairscale.nn.checkpoint.checkpoint_activations")
    model = tiny(family)

    def wrap(root: nn.Module) -> None:
        for blocks in [m for m in root.modules() if isinstance(m, nn.ModuleList)]:
            for block in blocks:
                module.checkpoint_wrapper(block)

    def both(*steps: Callable[[nn.Module], None]) -> Run:
        return train(model, *steps)

    alone, converted = both(wrap), both(convert)
    assert set(alone.forwards.values()) == {2}
    for steps in ((wrap, convert), (convert, wrap)):
        found = both(*steps)
        assert found.forwards == alone.forwards
        assert found.held <= alone.held
        assert same_bits(found, converted)


def qwen_image() -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    ).train()


def batch() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "encoder_hidden_states_mask": torch.ones(2, 7, dtype=torch.long),
        "timestep": torch.tensor([1.0, 2.0]),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }


def enable(model: Any) -> None:
    model.enable_gradient_checkpointing()


def regions(model: nn.Module) -> None:
    assert memopt.convert(model, checkpoint=True).checkpointed


def held(*steps: Callable[[Any], None]) -> int:
    """Bytes that are allocated between forward and backward."""
    model = qwen_image()
    for step in steps:
        step(model)
    with LiveBytes() as live:
        loss: Tensor = model(**batch())[0].sum()
        live.mark()
        loss.backward()
    return int(live.marks[0].nbytes)


def test_rotary_tables_in_plain_attributes_are_not_a_step_s() -> None:
    """They are there before the step, and are larger than all that regions keep."""
    tables = sum(
        value.untyped_storage().nbytes()
        for module in qwen_image().modules()
        for value in vars(module).values()
        if isinstance(value, Tensor)
    )
    report = memopt.convert(qwen_image(), batch(), checkpoint=True)
    own = qwen_image()
    enable(own)
    kept, kept_by_its_own = report.bytes_after, memopt.saved_bytes(own, **batch())
    assert kept is not None
    assert report.bytes_before is not None
    assert kept <= kept_by_its_own < tables
    assert kept < 0.1 * report.bytes_before
    assert held(regions) <= held(enable)


class Turning(nn.Module):
    """A block that is given a table which the model keeps, as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x * table[: len(x)])))
        return out


@pytest.mark.parametrize("where", ["attribute", "list", "dict"])
@pytest.mark.parametrize("converted", [False, True])
def test_a_table_that_blocks_are_given_is_not_counted(where: str, converted: bool) -> None:
    class Model(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Turning() for _ in range(2))
            table = torch.randn(rows, 8)
            self.tables: Any = {"attribute": table, "list": [table], "dict": {"a": table}}[where]

        def forward(self, x: Tensor) -> Tensor:
            table = self.tables
            if not isinstance(table, Tensor):
                table = table["a"] if isinstance(table, dict) else table[0]
            for block in self.blocks:
                x = block(x, table)
            return x

    def kept(rows: int) -> int:
        torch.manual_seed(0)
        model, x = Model(rows), torch.randn(4, 8)
        if converted:
            memopt.convert(model, checkpoint=Turning)
        return memopt.saved_bytes(model, x)

    assert kept(4000) == kept(4)
