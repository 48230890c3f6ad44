from __future__ import annotations
import torch
KL_IS_WEIGHT_CLIP = 10.0

def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    log_probs_old: Optional[torch.Tensor] = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
) -> torch.Tensor:

    log_ratio = log_probs.float() - log_probs_base.float()

    if kl_estimator == "k1":
        value = log_ratio  # log_ratio is already p - q
    elif kl_estimator == "k2":
        # Non-negative KL approximation: (p - q)^2 / 2
        # http://joschu.net/blog/kl-approx.html
        # Approximately equivalent to one-step KL penalty with k1
        # used in https://arxiv.org/pdf/2310.10505.
        value = log_ratio**2 / 2.0
    elif kl_estimator == "k3":
        # Non-negative KL approximation: exp(q - p) - 1 - (q - p)
        # http://joschu.net/blog/kl-approx.html
        # Below -10, k3 already exceeds the final cap. Bound before exp to
        # avoid an overflowing derivative (0 * inf) after the final clamp.
        k3_log_ratio = log_ratio.clamp(min=-10)
        value = (-k3_log_ratio).exp() - 1 + k3_log_ratio
    else:
        raise ValueError(f"Unknown kl_estimator: {kl_estimator}")

    value = value.clamp(min=-10, max=10)

    if not unbiased_gradient:
        return value

    # Unbiased, importance-sampling-corrected reverse-KL gradient. k2's pathwise gradient
    # reproduces the score-function form ℓ·∇log π_θ = k1·∇log π_θ; multiplying by the detached
    # IS weight w gives the off-policy estimator E_{y~π_θ_old}[w · k1 · ∇log π_θ] = ∇_θ D_KL(π_θ‖π_ref).
    if log_probs_old is None:
        w = 1.0
    else:
        w = (log_probs.float() - log_probs_old.float()).exp().clamp(max=KL_IS_WEIGHT_CLIP).detach()
    grad_surrogate = w * (log_ratio**2 / 2.0)

    # Straight-through: forward value = chosen estimator, backward gradient = ∇grad_surrogate.
    return value.detach() + grad_surrogate - grad_surrogate.detach()

logits = torch.tensor([[0.5, 0.5], [0.8, 0.2], [0.5, 0.5]], dtype=torch.float64).log()
ref = torch.tensor([[0.5, 0.5]] * 3, dtype=torch.float64).log()
at, y = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 2]]), torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
logp, ref_logp = logits.requires_grad_().log_softmax(-1)[at, y], ref[at, y]
old_logp = logp.detach()
p = logp.sum(-1).exp()
true = (p * (logp - ref_logp).sum(-1)).sum()
call = lambda i: compute_approx_kl(logp[[i]], ref_logp[[i]], old_logp[[i]], 'k2', True)
expected = sum(p.detach()[i] * call(i).sum() for i in range(4))
for of in (true, expected): print(torch.autograd.grad(of, logits, retain_graph=True)[0].tolist())
