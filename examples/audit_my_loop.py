"""A training loop that asks every few steps, on its own model and batch, which gradient its KL term follows."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kltest

PROMPTS, GROUP, END, PAD = 64, 4, 1, 0


def kl_term(logprobs, ref_logprobs, mask):
    """The k3 estimator as a loss; parameters are filled by name."""
    log_ratio = ref_logprobs - logprobs
    return ((log_ratio.exp() - 1 - log_ratio) * mask).sum(1).mean()


torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=8, **sizes, initializer_range=0.3, eos_token_id=END, pad_token_id=PAD, bos_token_id=None)
)
ref = copy.deepcopy(model)
with torch.no_grad():
    for weight in ref.parameters():
        weight += 0.3 * torch.randn_like(weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def logprobs_of(model, ids, width):
    logits = model(ids).logits[:, -width - 1 : -1]
    return logits.log_softmax(-1).gather(2, ids[:, -width:, None])[..., 0]


for step in range(3):
    chosen = torch.randint(2, (PROMPTS,)).repeat_interleave(GROUP)  # rows of one prompt stand next to each other
    prompts = torch.tensor([[2, 3, 4], [5, 6, 7]])[chosen]
    ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=3)
    completions = ids[:, 3:]
    mask = ((completions == END).cumsum(1) - (completions == END).long() == 0).float()

    if step % 2 == 0:
        batch = {"prompt_ids": prompts, "completion_ids": completions, "completion_mask": mask}
        found = kltest.audit(kl_term, model, ref, batch, group_size=GROUP)  # leaves model and random numbers alone
        print(step, found.to_text().splitlines()[0])
        print(step, {name: round(value, 3) for name, value in found.scalars().items()})
        assert "local_forward_kl" in found.follows.terms

    with torch.no_grad():
        ref_logprobs = logprobs_of(ref, ids, completions.shape[1])
    loss = kl_term(logprobs_of(model, ids, completions.shape[1]), ref_logprobs, mask)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
