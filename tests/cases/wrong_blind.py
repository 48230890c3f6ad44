"""Wrong losses written before the checks that find them, those that no other row is like."""

import torch
from cases.parts import k2, total
from cases.table import wrong


def grpo_skip_zero_std(logp, ref_logp, mask, reward, beta):
    adv = reward - reward.mean()
    kl = 0.5 * total(logp - ref_logp, mask) ** 2
    loss = -adv * total(logp, mask) + beta * kl
    if reward.std() == 0:
        return loss.mean() * 0
    return loss.mean()


def mask_by_token(logp, ref_logp, tokens):
    live = tokens != 0
    return 0.5 * torch.where(live, logp - ref_logp, 0.0).sum(-1) ** 2


def nan_reward(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(-1)


def overwritten(logp, ref_logp, mask, advantage, kl_coef=0.1):
    kl_coef = 0.04
    return -(advantage * total(logp, mask)).mean() + kl_coef * k2(logp, ref_logp, mask).mean()


def m_ratio(logp, ref_logp, old_logp, mask):
    r = total(logp - old_logp, mask).exp().detach()
    return r * k2(logp, ref_logp, mask), {"kl": total((logp - old_logp).exp() * (logp - ref_logp), mask).mean()}


CASES = [
    wrong("KL401", grpo_skip_zero_std, slow=True),
    wrong("KL501", mask_by_token, also=("KL105", "KL502")),
    wrong("KL502", nan_reward, options=dict(placement="reward"), warns=True),
    wrong("KL510", overwritten),
    wrong("KL602", m_ratio, options=dict(sampler="both")),
]
