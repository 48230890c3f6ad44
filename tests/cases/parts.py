"""Parts of which losses of the table are made."""

import torch


def live(values, mask):
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def total(values, mask):
    return live(values, mask).sum(-1)


def k1(logp, ref_logp, mask):
    return total(logp - ref_logp, mask).detach()


def k2(logp, ref_logp, mask):
    return total(logp - ref_logp, mask).square() / 2


def penalty(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).mean()


def score(logp, mask):
    return total(logp, mask)
