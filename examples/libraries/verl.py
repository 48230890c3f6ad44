import torch
from verl.trainer.ppo.core_algos import kl_penalty


def graded(**given):
    value = kl_penalty(**given)
    return value[0] if isinstance(value, tuple) else value

logits = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.8, 0.2], [0.45, 0.55], [0.7, 0.3], [0.25, 0.75], [0.55, 0.45]], dtype=torch.float64).log()
ref = torch.tensor([[0.4, 0.6], [0.5, 0.5], [0.6, 0.4], [0.7, 0.3], [0.35, 0.65], [0.5, 0.5], [0.3, 0.7]], dtype=torch.float64).log()
at, y = torch.tensor([[0, 1, 3], [0, 1, 3], [0, 1, 4], [0, 1, 4], [0, 2, 5], [0, 2, 5], [0, 2, 6], [0, 2, 6]]), torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]])
logp, ref_logp = logits.requires_grad_().log_softmax(-1)[at, y], ref[at, y]
p, u = logp.sum(-1).exp(), logp - ref_logp
true = (p * u.sum(-1)).sum()
call = lambda i: graded(kl_penalty='low_var_kl', logprob=logp[[i]], ref_logprob=ref_logp[[i]])
expected = 0 * logits.sum() + sum(p.detach()[i] * call(i).sum(-1).mean() for i in range(len(p)))
for of in (true, expected): print(torch.autograd.grad(of, logits, retain_graph=True)[0].tolist())
