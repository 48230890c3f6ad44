"""Correct losses, written before the checks that must pass them."""

import torch
import torch.nn.functional as F
from zoo.mutants_blind import penalty, total, zeroed
from zoo.table import Clean

# Written before the checks, so that the checks are measured by losses that they were not fitted to.


def sf_return(logp, ref_logp, mask):
    return total(logp - ref_logp, mask).detach() * total(logp, mask)


def sf_scalar(logp, ref_logp, mask):
    return (total(logp - ref_logp, mask).detach() * total(logp, mask)).mean()


def masked_fill(logp, ref_logp, mask):
    d = (logp - ref_logp.detach()).masked_fill(~mask.bool(), 0.0)
    return d.sum(1).square().mul(0.5).mean()


def inplace_own(logp, ref_logp, mask):
    d = logp - ref_logp
    d = d.clone()
    d[mask == 0] = 0.0
    return d.sum(-1).pow_(2).mul_(0.5)


def float32(logp, ref_logp, mask):
    return penalty(logp.float(), ref_logp.float(), mask)


def k1r(logp, ref_logp):
    return logp - ref_logp


def k1r_masked(logp, ref_logp, mask):
    return zeroed(logp - ref_logp, mask)


def with_metric(logp, ref_logp, mask):
    d = logp.detach() - ref_logp
    k3 = torch.expm1(-d) + d
    return penalty(logp, ref_logp, mask), {"kl": total(k3, mask).mean().item(), "loss": 1.0}


def with_metric_tok(logp, ref_logp, mask):
    d = logp.detach() - ref_logp
    return penalty(logp, ref_logp, mask), {"kl": total(d, mask).sum() / mask.sum()}


def off(logp, ref_logp, old_logp, mask):
    return total(logp - old_logp, mask).exp().detach() * penalty(logp, ref_logp, mask)


def full(logits, ref_logits):
    return (logits.exp() * (logits - ref_logits)).sum(-1)


def full_lsm(logits, ref_logits):
    return F.kl_div(ref_logits.log_softmax(-1), logits.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def tok_k2(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


def whole_beta(logp, ref_logp, mask, advantage, beta):
    return -(advantage * total(logp, mask)).mean() + beta * penalty(logp, ref_logp, mask).mean()


def loo(logp, ref_logp, mask, group):
    k = total(logp - ref_logp, mask).detach()
    n = len(k)
    base = (k.sum() - k) / (n - 1) if n > 1 else torch.zeros_like(k)
    return ((k - base) * total(logp, mask)).mean()


def summed(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask).sum()


def compiled(logp, ref_logp, mask):
    return torch.compile(penalty)(logp, ref_logp, mask)


def boolean_index(logp, ref_logp, mask):
    out = torch.zeros_like(logp)
    b = mask.bool()
    out[b] = logp[b] - ref_logp[b]
    return 0.5 * out.sum(-1) ** 2


def einsum(logp, ref_logp, mask):
    k = zeroed(logp - ref_logp, mask)
    tri = torch.triu(torch.ones(k.shape[1], k.shape[1], dtype=k.dtype))
    return torch.einsum("bt,ts,bs->b", zeroed(logp, mask), tri, k.detach())


def grpo_kl_seq(logp, ref_logp, old_logp, mask, advantage, beta):
    r = torch.exp(zeroed(logp - old_logp, mask))
    pg = -torch.minimum(r * advantage[:, None], r.clamp(0.8, 1.2) * advantage[:, None])
    rho = total(logp - old_logp, mask).exp().detach()
    return total(pg, mask) + beta * rho * 0.5 * total(logp - ref_logp, mask) ** 2


CLEAN = [
    Clean(penalty),
    Clean(sf_return),
    Clean(sf_scalar),
    Clean(masked_fill),
    Clean(inplace_own),
    Clean(float32),
    Clean(k1r, dict(placement="reward")),
    Clean(k1r_masked, dict(placement="reward", credit="to-go")),
    Clean(with_metric),
    Clean(with_metric_tok),
    Clean(off, dict(sampler="both")),
    Clean(full, dict(expect="local_reverse_kl")),
    Clean(full_lsm, dict(expect="local_reverse_kl")),
    Clean(tok_k2, dict(expect="local_reverse_kl")),
    Clean(whole_beta),
    Clean(loo),
    Clean(summed),
    Clean(compiled),
    Clean(boolean_index),
    Clean(einsum),
    Clean(grpo_kl_seq),
]
