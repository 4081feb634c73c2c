"""Fitting a byte budget: the largest micro-batch and the plan for it, in one call.

pip install transformers
python examples/fit_budget.py [BUDGET, such as 24GiB]
"""

import sys

import torch
import transformers
from step_cost import compared, step_cost

import memopt


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.GPT2Config(
        n_layer=6,
        n_embd=64,
        n_head=4,
        n_positions=128,
        vocab_size=512,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    model = transformers.GPT2LMHeadModel(config).to(device)
    ids = torch.randint(512, (16, 128), device=device)
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters())
    before = step_cost(model, lambda: model(**batch).loss.backward())

    fitted = memopt.fit(
        model, batch, sys.argv[1] if len(sys.argv) > 1 else "24MB", optimizer=optimizer
    )
    print(fitted.plan)
    print(compared(before, step_cost(model, lambda: fitted(batch))))
    for step in range(3):
        result = fitted(batch)  # forward and backward; gradients of the whole batch
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {float(result.loss):.3f}")


if __name__ == "__main__":
    main()
