import torch
from verl.trainer.ppo.core_algos import kl_penalty
logits = torch.tensor([[0.5, 0.5], [0.8, 0.2], [0.5, 0.5]], dtype=torch.float64).log()
ref = torch.tensor([[0.5, 0.5]] * 3, dtype=torch.float64).log()
at, y = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 2]]), torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
logp, ref_logp = logits.requires_grad_().log_softmax(-1)[at, y], ref[at, y]
p = logp.sum(-1).exp()
true = (p * (logp - ref_logp).sum(-1)).sum()
expected = sum(p.detach()[i] * kl_penalty(logp[[i]], ref_logp[[i]], 'k2').sum() for i in range(4))
for of in (true, expected): print(torch.autograd.grad(of, logits, retain_graph=True)[0].tolist())
