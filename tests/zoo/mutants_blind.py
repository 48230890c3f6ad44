"""Wrong losses of every family, written before the checks that find them."""

import torch
import torch.nn.functional as F
from zoo.table import Mutant

# Written before the checks, so that the checks are measured by losses that they were not fitted to.


def zeroed(x, mask):
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def total(x, mask):
    return zeroed(x, mask).sum(-1)


def penalty(logp, ref_logp, mask):
    return 0.5 * total(logp - ref_logp, mask) ** 2


def gamma_to_go(logp, ref_logp, mask):
    k = zeroed((logp - ref_logp), mask).detach()
    T = k.shape[1]
    ret = torch.zeros_like(k)
    acc = torch.zeros_like(k[:, 0])
    for t in reversed(range(T)):
        acc = k[:, t] + 0.9 * acc
        ret[:, t] = acc
    return total(ret * zeroed(logp, mask), mask)


def discounted_return_from_start(logp, ref_logp, mask):
    k = zeroed(logp - ref_logp, mask).detach()
    g = 0.95 ** torch.arange(k.shape[1], dtype=k.dtype)
    togo = (k * g).flip(-1).cumsum(-1).flip(-1)
    return (togo * zeroed(logp, mask)).sum(-1).mean()


def token_mean(logp, ref_logp, mask):
    return total(0.5 * (logp - ref_logp) ** 2, mask).sum() / mask.sum()


def batch_std(logp, ref_logp, mask):
    k = total(logp - ref_logp, mask).detach()
    a = k - k.mean()
    return (a * total(logp, mask)).mean()


def masked_ties(logp, ref_logp, mask, reward, group):
    out = 0.5 * total(logp - ref_logp, mask) ** 2
    keep = torch.ones_like(out)
    for g in group.unique():
        i = group == g
        if (reward[i] == reward[i][0]).all():
            keep[i] = 0
    return (out * keep).mean()


def grpo_skip_zero_std(logp, ref_logp, mask, reward, beta):
    adv = reward - reward.mean()
    kl = 0.5 * total(logp - ref_logp, mask) ** 2
    loss = -adv * total(logp, mask) + beta * kl
    if reward.std() == 0:
        return loss.mean() * 0
    return loss.mean()


def mean_baseline(logp, ref_logp, mask, group):
    k = total(logp - ref_logp, mask).detach()
    base = torch.stack([k[group == g].mean() for g in group])
    return ((k - base) * total(logp, mask)).mean()


def kl_in_reward_centered(logp, ref_logp, mask, reward, beta):
    r = reward - beta * total(logp - ref_logp, mask).detach()
    return -((r - r.mean()) * total(logp, mask)).mean()


def std_norm(logp, ref_logp, mask, reward, beta):
    r = reward - beta * total(logp - ref_logp, mask).detach()
    a = (r - r.mean()) / (r.std() + 1e-8)
    return -(a * total(logp, mask)).mean()


def std_norm_groups(logp, ref_logp, mask, rewards, group_ids, kl_coef):
    r = rewards - kl_coef * total(logp - ref_logp, mask).detach()
    a = torch.zeros_like(r)
    for g in group_ids.unique():
        i = group_ids == g
        a[i] = (r[i] - r[i].mean()) / (r[i].std(unbiased=False) + 1e-6)
    return -(a * total(logp, mask)).mean()


def single_zero(logp, ref_logp, mask, reward):
    kl = 0.5 * total(logp - ref_logp, mask) ** 2
    if len(reward) < 2:
        return (kl * 0).mean()
    return kl.mean()


def masked_std(logp, ref_logp, mask, reward, group):
    kl = 0.5 * total(logp - ref_logp, mask) ** 2
    std = torch.stack([reward[group == g].std(unbiased=False) for g in group])
    return torch.where(std > 0, kl, torch.zeros_like(kl)).mean()


def no_mask(logp, ref_logp):
    return 0.5 * (logp - ref_logp).sum(-1) ** 2


def mask_by_token(logp, ref_logp, tokens):
    live = tokens != 0
    return 0.5 * torch.where(live, logp - ref_logp, 0.0).sum(-1) ** 2


def mul(logp, ref_logp, mask):
    return 0.5 * ((logp - ref_logp) * mask).sum(-1) ** 2


def nan_reward(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(-1)


def k3(logp, ref_logp):
    d = ref_logp - logp
    return torch.exp(d) - d - 1


def prob_space(logp, ref_logp, mask):
    return 0.5 * torch.log(torch.exp(total(logp, mask)) / torch.exp(total(ref_logp, mask))) ** 2


def clamp10(logp, ref_logp, mask):
    return 0.5 * total(logp - ref_logp, mask).clamp(-10, 10) ** 2


def clampk(logp, ref_logp, mask):
    kl = 0.5 * total(logp - ref_logp, mask) ** 2
    return torch.minimum(kl, torch.tensor(50.0, dtype=kl.dtype))


def inplace(logp, ref_logp, mask):
    ref_logp.neg_()
    r = 0.5 * total(logp + ref_logp, mask) ** 2
    return r


def inplace_view(logp, ref_logp, mask):
    rows = [r for r in ref_logp]
    for r in rows:
        r.mul_(0.999999)
    return penalty(logp, ref_logp / 0.999999, mask)


def inplace_leaf(logp, ref_logp, mask):
    out = penalty(logp, ref_logp, mask)
    logp.data.zero_()
    return out


def wrong_side(logp, ref_logp, mask):
    return 0.5 * total(logp.detach() - ref_logp, mask) ** 2


def req(logp, ref_logp, mask):
    ref_logp.requires_grad_(True)
    return penalty(logp, ref_logp, mask)


def dropout(logp, ref_logp, mask):
    return F.dropout(penalty(logp, ref_logp, mask), 0.5)


def half(logp, ref_logp, mask):
    return penalty(logp.bfloat16(), ref_logp.bfloat16(), mask).double()


def half16(logp, ref_logp, mask):
    return penalty(logp.half().double(), ref_logp.half().double(), mask)


@torch.no_grad()
def ng(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask)


def item(logp, ref_logp, mask):
    return torch.tensor(penalty(logp, ref_logp, mask).tolist(), dtype=torch.float64)


def ignored(logp, ref_logp, mask, beta):
    return penalty(logp, ref_logp, mask)


def squared(logp, ref_logp, mask, beta):
    return beta**2 * penalty(logp, ref_logp, mask)


def overwritten(logp, ref_logp, mask, advantage, kl_coef=0.1):
    kl_coef = 0.04
    return -(advantage * total(logp, mask)).mean() + kl_coef * penalty(logp, ref_logp, mask).mean()


def m_k2(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": total(0.5 * (logp - ref_logp) ** 2, mask).mean().item()}


def m_rev(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask).mean(), {"kl": total(ref_logp - logp, mask).mean()}


def m_beta(logp, ref_logp, mask, beta):
    return beta * penalty(logp, ref_logp, mask), {"kl": beta * total(logp - ref_logp, mask).mean()}


def m_ratio(logp, ref_logp, old_logp, mask):
    r = total(logp - old_logp, mask).exp().detach()
    return r * penalty(logp, ref_logp, mask), {"kl": total((logp - old_logp).exp() * (logp - ref_logp), mask).mean()}


def m_nomask(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": (logp - ref_logp).sum(-1).mean()}


def m_nomask2(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": (logp - ref_logp).mean().item()}


def topk(logits, ref_logits):
    top = logits.topk(2, dim=-1).indices
    p, q = logits.gather(-1, top), ref_logits.gather(-1, top)
    return (p.exp() * (p - q)).sum(-1)


def topk_norm(logits, ref_logits):
    top = ref_logits.topk(2, dim=-1).indices
    p, q = logits.gather(-1, top).log_softmax(-1), ref_logits.gather(-1, top).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def temp(logits, ref_logits):
    p = (logits / 0.7).log_softmax(-1)
    return (p.exp() * (p - ref_logits)).sum(-1)


def temp_sample(logits, ref_logits, tokens):
    p = F.log_softmax(logits / 1.3, -1).gather(-1, tokens[..., None])[..., 0]
    q = F.log_softmax(ref_logits, -1).gather(-1, tokens[..., None])[..., 0]
    return 0.5 * (p - q) ** 2


def temp_both(logits, ref_logits, tokens, mask):
    p = F.log_softmax(logits / 0.8, -1).gather(-1, tokens[..., None])[..., 0]
    q = F.log_softmax(ref_logits / 0.8, -1).gather(-1, tokens[..., None])[..., 0]
    return 0.5 * total(p - q, mask) ** 2


def nucleus(logits, ref_logits, tokens):
    k = 2
    thr = logits.topk(k, -1).values[..., -1:]
    lp = torch.where(logits >= thr, logits, torch.full_like(logits, -30.0)).log_softmax(-1)
    p = lp.gather(-1, tokens[..., None])[..., 0]
    q = ref_logits.gather(-1, tokens[..., None])[..., 0]
    return 0.5 * (p - q) ** 2


def w_k3(logp, ref_logp, mask):
    u = total(logp - ref_logp, mask)
    return torch.exp(-u) - 1 + u


def seq_is(logp, ref_logp, old_logp, mask):
    return total(logp - old_logp, mask).exp().detach() * penalty(logp, ref_logp, mask)


def huge_base(logp, ref_logp, mask):
    return (total(logp - ref_logp, mask).detach() + 50.0) * total(logp, mask)


class State:
    def __init__(self):
        self.b = 1.0

    def __call__(self, logp, ref_logp, mask):
        self.b *= 1.01
        return self.b * penalty(logp, ref_logp, mask)


class Late:
    def __init__(self):
        self.buf = None

    def __call__(self, logp, ref_logp, mask):
        k = total(logp - ref_logp, mask).detach().mean()
        if self.buf is None:
            self.buf = torch.zeros((), dtype=k.dtype)
        self.buf.copy_(k)
        return penalty(logp, ref_logp, mask), {"kl": self.buf}


MUTANTS = [
    Mutant("KL205", gamma_to_go),
    Mutant("KL205", discounted_return_from_start),
    Mutant("KL206", token_mean, also=("KL201", "KL204", "KL502")),
    Mutant("KL206", batch_std, also=("KL402",)),
    Mutant("KL401", masked_ties, also=("KL404",)),
    Mutant("KL401", grpo_skip_zero_std),
    Mutant("KL402", mean_baseline),
    Mutant("KL402", kl_in_reward_centered),
    Mutant("KL403", std_norm),
    Mutant("KL403", std_norm_groups),
    Mutant("KL404", single_zero),
    Mutant("KL404", masked_std, also=("KL401",)),
    Mutant("KL501", no_mask, also=("KL105", "KL502")),
    Mutant("KL501", mask_by_token, also=("KL105", "KL502")),
    Mutant("KL502", mul, warns=True),
    Mutant("KL502", nan_reward, options=dict(placement="reward"), warns=True),
    Mutant("KL503", k3, also=("KL102",)),
    Mutant("KL503", prob_space, warns=True),
    Mutant("KL504", clamp10),
    Mutant("KL504", clampk),
    Mutant("KL505", inplace),
    Mutant("KL505", inplace_view),
    Mutant("KL505", inplace_leaf),
    Mutant("KL506", wrong_side, also=("KL509",)),
    Mutant("KL506", req),
    Mutant("KL507", dropout, warns=True),
    Mutant("KL508", half),
    Mutant("KL508", half16, warns=True),
    Mutant("KL509", ng),
    Mutant("KL509", item),
    Mutant("KL510", ignored),
    Mutant("KL510", squared),
    Mutant("KL510", overwritten),
    Mutant("KL601", m_k2),
    Mutant("KL601", m_rev, also=("KL602",)),
    Mutant("KL602", m_beta),
    Mutant("KL602", m_ratio, options=dict(sampler="both")),
    Mutant("KL604", m_nomask, also=("KL601",)),
    Mutant("KL604", m_nomask2, also=("KL601",)),
    Mutant("KL701", topk),
    Mutant("KL701", topk_norm, options=dict(expect="local_reverse_kl")),
    Mutant("KL702", temp, options=dict(expect="local_reverse_kl")),
    Mutant("KL702", temp_sample, options=dict(expect="local_reverse_kl")),
    Mutant("KL702", temp_both, also=("KL502",)),
    Mutant("KL703", nucleus, options=dict(expect="local_reverse_kl")),
    Mutant("KL801", w_k3, also=("KL503",), options=dict(expect="forward_kl")),
    Mutant("KL801", seq_is, options=dict(sampler="both")),
    Mutant("KL802", huge_base),
    Mutant("KL507", State()),
    Mutant("KL603", Late()),
]
