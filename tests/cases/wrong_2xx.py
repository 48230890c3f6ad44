"""Losses that ignore the effect of a token on later ones, or divide by lengths, in the styles of RL libraries."""

import torch
import torch.nn.functional as F
from cases.table import wrong

# KL201: only the token's own log-ratio.


def grpo_token_loss_with_k2(logp, old_logp, advantage, ref_logp, mask, beta):
    """A clipped policy objective with a per-token penalty, summed over each completion."""
    live = mask.bool()
    ratio = torch.exp(torch.where(live, logp - old_logp.detach(), 0.0))
    weighted = torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
    penalty = 0.5 * torch.where(live, logp - ref_logp, 0.0) ** 2
    return (beta * penalty - weighted).masked_fill(~live, 0.0).sum(1).mean()


def exact_next_token_kl(logits, ref_logits, mask):
    live = (mask != 0).unsqueeze(-1)
    own, other = (F.log_softmax(scores.where(live, 0.0), -1) for scores in (logits, ref_logits))
    divergence = torch.einsum("btv,btv->bt", own.exp(), own - other)
    return divergence.sum(-1).mean()


def straight_through(logp, ref_logp, mask):
    """The value of k1 with the gradient of k2, token by token."""
    delta = torch.where(mask > 0, logp - ref_logp, torch.zeros_like(logp))
    half_square = delta.pow(2).mul(0.5)
    return half_square - half_square.detach() + delta.detach()


# KL202: nothing but the end.


def terminal_gather(logp, ref_logp, mask):
    last = mask.long().sum(1, keepdim=True) - 1
    delta = (logp.gather(1, last) - ref_logp.gather(1, last)).squeeze(1)
    return (0.5 * delta**2).mean()


def last_row_by_row(logp, ref_logp, mask):
    terms = []
    for own, other, live in zip(logp, ref_logp, mask.bool(), strict=True):
        terms.append((own[live] - other[live])[-1])
    delta = torch.stack(terms)
    return delta.detach() * delta


# KL203: divided by each sequence's own length.


def per_row_mean(logp, ref_logp, mask):
    """`.mean()` over the live tokens of each row."""
    rows = [0.5 * (p[m] - q[m]).square().mean() for p, q, m in zip(logp, ref_logp, mask.bool(), strict=True)]
    return torch.stack(rows)


# KL204: one number for the whole batch.


def masked_mean(logp, ref_logp, mask):
    live = mask.bool()
    half_square = 0.5 * (logp[live] - ref_logp[live]).square()
    return half_square.sum() / mask.sum()


def flattened(logp, ref_logp, mask):
    """All live tokens of the batch in one row, then their mean, after a return for each sequence."""
    live = mask.bool()
    total = torch.where(live, logp - ref_logp, 0.0).sum(1, keepdim=True).detach()
    return (total * logp)[live].mean()


# KL207: a mean over all columns of the batch, padded ones too.


def masked_then_mean(logp, ref_logp, mask):
    return ((logp - ref_logp).where(mask.bool(), 0.0).square() / 2).mean(dim=-1)


def mean_of_everything(logp, ref_logp, mask):
    """One `.mean()` over rows and columns, after a return for each sequence."""
    total = (logp - ref_logp).where(mask.bool(), 0.0).sum(-1, keepdim=True).detach()
    return (total * logp.where(mask.bool(), 0.0)).mean()


CASES = [
    wrong("KL201", grpo_token_loss_with_k2, options={"sampler": "current"}),
    wrong("KL201", exact_next_token_kl),
    wrong("KL201", straight_through),
    wrong("KL202", terminal_gather),
    wrong("KL202", last_row_by_row),
    wrong("KL203", per_row_mean, also=("KL201",)),
    wrong("KL204", masked_mean, also=("KL201", "KL206")),
    wrong("KL204", flattened, also=("KL206",)),
    wrong("KL207", masked_then_mean, options={"expect": "local_reverse_kl"}),
    wrong("KL207", mean_of_everything),
]
