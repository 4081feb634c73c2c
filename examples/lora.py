"""LoRA with PEFT on a Llama, in 4 bits where bitsandbytes is installed.

pip install transformers peft accelerate bitsandbytes
python examples/lora.py
"""

import importlib.util
import tempfile

import peft
import torch
import transformers
from step_cost import compared, step_cost

import memopt


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=176,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        use_cache=False,
    )
    options = {}
    if importlib.util.find_spec("bitsandbytes"):
        bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        options = {"quantization_config": bits, "device_map": "auto"}
    with tempfile.TemporaryDirectory() as name:  # or the name of a model on the hub
        transformers.LlamaForCausalLM(config).save_pretrained(name)
        base = transformers.AutoModelForCausalLM.from_pretrained(name, **options)
    if options:
        base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora).train()  # from_pretrained leaves it in evaluation
    ids = torch.randint(512, (4, 128), device=model.device)
    batch = {"input_ids": ids, "labels": ids}
    before = step_cost(model, lambda: model(**batch).loss.backward())

    print(memopt.convert(model, batch, checkpoint=True))
    print(memopt.check(model, batch))  # what was asked of each block, and what happened
    print(compared(before, step_cost(model, lambda: model(**batch).loss.backward())))

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for step in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
