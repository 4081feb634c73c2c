"""A vision transformer: where its memory is, and every second block checkpointed.

pip install transformers
python examples/vision_transformer.py
"""

import torch
import transformers
from step_cost import compared, step_cost

import memopt


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.ViTConfig(
        num_hidden_layers=6,
        hidden_size=96,
        intermediate_size=384,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config).to(device)
    batch = {
        "pixel_values": torch.randn(8, 3, 64, 64, device=device),
        "labels": torch.randint(10, (8,), device=device),
    }
    print(memopt.anatomy(model, batch))

    before = step_cost(model, lambda: model(**batch).loss.backward())
    print(memopt.convert(model, batch))
    memopt.apply_activation_checkpointing(model, every=2)
    print(memopt.check(model, batch))  # what each block was asked, what happened
    print(compared(before, step_cost(model, lambda: model(**batch).loss.backward())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(5):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
