import torch
from tunix.rl.common import compute_kl_divergence
import jax
import jax.numpy as jnp
import numpy as np


jax.config.update("jax_enable_x64", True)  # float64, whatever the library makes of it


class Bridge(torch.autograd.Function):
    """A function of JAX arrays, called and differentiated with tensors."""

    @staticmethod
    def forward(ctx, call, *leaves):
        value, ctx.pull = jax.vjp(call, *(jnp.asarray(leaf.detach().numpy()) for leaf in leaves))
        return torch.tensor(np.asarray(value))

    @staticmethod
    def backward(ctx, gradient):
        return None, *(torch.tensor(np.asarray(each)) for each in ctx.pull(jnp.asarray(gradient.numpy())))


def graded(**given):
    leaves = {name: value for name, value in given.items() if getattr(value, "requires_grad", False)}
    others = {
        name: jnp.asarray(value.numpy()) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
        if name not in leaves
    }

    def call(*values):
        value = compute_kl_divergence(**others, **dict(zip(leaves, values)))
        return value[0] if isinstance(value, tuple) else value

    return Bridge.apply(call, *leaves.values())

logits = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.8, 0.2], [0.45, 0.55], [0.7, 0.3], [0.25, 0.75], [0.55, 0.45]], dtype=torch.float64).log()
ref = torch.tensor([[0.4, 0.6], [0.5, 0.5], [0.6, 0.4], [0.7, 0.3], [0.35, 0.65], [0.5, 0.5], [0.3, 0.7]], dtype=torch.float64).log()
at, y = torch.tensor([[0, 1, 3], [0, 1, 3], [0, 1, 4], [0, 1, 4], [0, 2, 5], [0, 2, 5], [0, 2, 6], [0, 2, 6]]), torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]])
logp, ref_logp = logits.requires_grad_().log_softmax(-1)[at, y], ref[at, y]
p, u = logp.sum(-1).exp(), logp - ref_logp
true = (p * u.sum(-1)).sum()
call = lambda i: graded(method='low_var_kl', per_token_logps=logp[[i]], ref_per_token_logps=ref_logp[[i]])
expected = 0 * logits.sum() + sum(p.detach()[i] * call(i).sum(-1).mean() for i in range(len(p)))
for of in (true, expected): print(torch.autograd.grad(of, logits, retain_graph=True)[0].tolist())
