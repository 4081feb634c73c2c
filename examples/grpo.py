"""GRPO by hand: log-probabilities of sampled words, without the logits.

pip install transformers
python examples/grpo.py

A group of answers to one prompt is sampled and rewarded; the policy's loss needs the
log-probability of each word that was sampled. `linear_log_probs` makes it of the last hidden states
and the head's weight, in chunks of rows. (TRL's GRPOTrainer: `MemoptCallback(convert=True)`, see
trainer.py.)
"""

import torch
import transformers
from step_cost import compared, step_cost

import memopt
from memopt.functional import linear_log_probs

PROMPT, ANSWER, GROUP, CLIP = 8, 64, 8, 0.2


def log_probs_of_logits(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, PROMPT - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


def log_probs(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the answers' words, each from what is before it."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, PROMPT - 1 : -1]
    return linear_log_probs(hidden, model.lm_head.weight, ids[:, PROMPT:])


def grpo_loss(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=176,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8000,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    prompt = torch.randint(3, 8000, (1, PROMPT)).expand(GROUP, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    ids = torch.cat([prompt, torch.randint(3, 8000, (GROUP, ANSWER))], dim=1)
    before = step_cost(model, lambda: log_probs_of_logits(model, ids).mean().backward())
    memopt.convert(model, head=False)  # norms and gates; the head is in chunks already
    after = step_cost(model, lambda: log_probs(model, ids).mean().backward())
    print(compared(before, after))
    assert after.peak < 0.6 * before.peak

    for step in range(3):
        ids = model.generate(
            prompt, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=True, pad_token_id=0
        )
        rewards = (ids[:, PROMPT:] < 4000).float().mean(1)  # answers of small words are liked
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
        with torch.no_grad():
            old = log_probs(model, ids)
        for _ in range(2):
            loss = grpo_loss(log_probs(model, ids), old, advantages)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: reward {rewards.mean():.3f}, loss {loss.item():+.4f}")


if __name__ == "__main__":
    main()
