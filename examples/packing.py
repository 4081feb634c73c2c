"""Packing: several sequences in one row, without padding, on a converted model of transformers.

pip install transformers
python examples/packing.py

`position_ids` begin at 0 again where a sequence begins. transformers makes its attention mask of
them, so that no sequence sees another, and with FlashAttention takes the lengths
(`cu_seq_lens_q`) instead.
"""

import torch
import transformers
from step_cost import compared, step_cost

import memopt

LENGTHS = (100, 37, 91, 28)


def packed(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """One row. The first label of each sequence is ignored: the last token of another is before."""
    ids = torch.randint(500, (1, sum(lengths)))
    labels = ids.clone()
    begins = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    labels[0, begins] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=344,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    batch = packed(LENGTHS)
    loss = model(**batch).loss.item()

    # The sequences one by one have the packed loss: none sees another.
    alone, count = 0.0, 0
    for ids in batch["input_ids"].split(LENGTHS, dim=1):
        tokens = ids.shape[1] - 1
        alone += model(input_ids=ids, labels=ids).loss.item() * tokens
        count += tokens
    print(f"packed {loss:.5f}, one by one {alone / count:.5f}")
    assert abs(loss - alone / count) < 1e-4

    before = step_cost(model, lambda: model(**batch).loss.backward())
    print(memopt.convert(model, batch, checkpoint=True))
    print(memopt.check(model, batch))  # what was asked of each block, and what happened
    print(compared(before, step_cost(model, lambda: model(**batch).loss.backward())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, lengths in enumerate([LENGTHS, (128, 128), (60, 70, 80, 46)]):  # any mix of lengths
        loss = model(**packed(lengths)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
