"""transformers' Trainer: convert the model before the Trainer gets it.

pip install transformers accelerate
python examples/trainer.py
"""

import tempfile

import torch
import transformers

import memopt


class Words(torch.utils.data.Dataset):
    """Random sentences."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(512, (64,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=176,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    model = transformers.LlamaForCausalLM(config)
    sample = {name: tensor[None] for name, tensor in Words()[0].items()}
    print(memopt.convert(model, sample))

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=5,
            per_device_train_batch_size=4,
            report_to=[],
            logging_steps=1,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        transformers.Trainer(model, arguments, train_dataset=Words()).train()
        model.save_pretrained(folder)  # a checkpoint like any other: it loads without memopt


if __name__ == "__main__":
    main()
