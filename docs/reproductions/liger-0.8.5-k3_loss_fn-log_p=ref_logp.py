import torch
from liger_kernel.chunked_loss.grpo_loss import k3_loss_fn
logits, ref = (torch.tensor(rows, dtype=torch.float64).log() for rows in ([[0.8, 0.2]], [[0.5, 0.5]]))
at, y = torch.tensor([[0], [0]]), torch.tensor([[0], [1]])
logp, ref_logp = logits.requires_grad_().log_softmax(-1)[at, y], ref[at, y]
p = logp.sum(-1).exp()
true = (p * (logp - ref_logp).sum(-1)).sum()
expected = sum(p.detach()[i] * k3_loss_fn(ref_logp[[i]], logp[[i]]).sum() for i in range(2))
for of in (true, expected): print(torch.autograd.grad(of, logits, retain_graph=True)[0].tolist())
