"""The expected gradient of kl_penalty/low_var_kl with respect to the logits, summed over all rollouts."""

import itertools
import json
import torch
import warnings
from verl.trainer.ppo.core_algos import kl_penalty

warnings.filterwarnings("ignore")
STALE = False  # rollouts of another policy

V, T = 2, 3
# The probability of token 0 in each of the 7 contexts, breadth first; fewer tokens need the first ones.
first = {"policy": [0.6, 0.3, 0.8, 0.45, 0.7, 0.25, 0.55], "reference": [0.4, 0.5, 0.6, 0.7, 0.35, 0.5, 0.3]}
first["sampler"] = [0.5, 0.4, 0.7, 0.5, 0.6, 0.35, 0.65] if STALE else first["policy"]
first = {name: rows[: V**T - 1] for name, rows in first.items()}
tables = {name: torch.tensor([[p, 1 - p] for p in rows], dtype=torch.float64) for name, rows in first.items()}
logits = tables["policy"].log().requires_grad_()
policy, reference, sampler = logits.log_softmax(-1), tables["reference"].log(), tables["sampler"].log()
tokens = torch.tensor(list(itertools.product(range(V), repeat=T)))
at = torch.tensor([[V**t - 1 + sum(y[s] * V ** (t - 1 - s) for s in range(t)) for t in range(T)] for y in tokens])
logp, ref_logp, old_logp = (table[at, tokens] for table in (policy, reference, sampler))
probability = old_logp.sum(-1).exp()
reward = torch.tensor([float(i % 3) for i in range(len(tokens))], dtype=torch.float64)


def loss(rows, beta):
    value = kl_penalty(logprob=logp[rows], ref_logprob=ref_logp[rows], kl_penalty='low_var_kl')
    value = value[0] if isinstance(value, tuple) else value
    return value.sum()


def summed(size):
    """The gradient summed over all batches of `size` rollouts with their probabilities."""
    total = torch.zeros_like(logits)
    for chosen in itertools.product(range(len(tokens)), repeat=size):
        rows = list(chosen)
        term = loss(rows, 1.0)
        if term.requires_grad:
            total += probability[rows].prod() * torch.autograd.grad(term, logits, retain_graph=True)[0]
    return total


try:
    expected = summed(1)
    single = expected.abs().max() > 1e-9
except Exception:
    single = False
# A loss that compares the rollouts of a batch needs pairs.
expected = expected if single else summed(2)
# ∇KL(π‖ref) of whole sequences, by its definition.
kl = (logp.sum(-1).exp() * (logp - ref_logp).sum(-1)).sum()
true = torch.autograd.grad(kl, logits)[0]
answer = {"vocabulary": V, "length": T, "policy": tables["policy"].tolist(), "reference": tables["reference"].tolist()}
answer["sampler"] = tables["sampler"].tolist() if STALE else None
print(json.dumps({**answer, "true": true.tolist(), "expected": expected.tolist()}))
