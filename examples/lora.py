"""LoRA with PEFT: the frozen base stores less, and the adapters train as before.

pip install transformers peft
python examples/lora.py
"""

import peft
import torch
import transformers

import memopt


def main() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=512)
    model = peft.get_peft_model(
        transformers.GPT2LMHeadModel(config),
        peft.LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    )
    ids = torch.randint(512, (4, 128))
    batch = {"input_ids": ids, "labels": ids}
    print(memopt.convert(model, batch))

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for step in range(5):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
