"""transformers' Trainer: one line more, and what it did.

pip install transformers accelerate
python examples/trainer.py
"""

import tempfile

import torch
import transformers
from step_cost import compared, step_cost

import memopt
from memopt.integrations.transformers import MemoptCallback


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
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    batch = torch.utils.data.default_collate([Words()[i] for i in range(4)])
    before = step_cost(model, lambda: model(**batch).loss.backward())
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=5,
            per_device_train_batch_size=4,
            report_to=[],
            logging_steps=1,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=Words(),
            callbacks=[MemoptCallback(convert=True, checkpoint=True)],  # or budget="22GiB"
        )
        trainer.train()
        model.save_pretrained(folder)  # a checkpoint like any other: it loads without memopt
    model.cpu()
    print(memopt.check(model, batch))  # what was asked of each block, and what happened
    print(compared(before, step_cost(model, lambda: model(**batch).loss.backward())))


if __name__ == "__main__":
    main()
