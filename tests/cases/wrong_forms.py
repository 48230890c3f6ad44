"""Losses of forms that verdicts went wrong on: caps, late resets, fixed coefficients, mixtures."""

from typing import NamedTuple

import torch
from cases.parts import total
from cases.table import wrong

LOCAL = {"expect": "local_reverse_kl"}
GROUPS = {"group_size": 4}


def grouped(rewards, size):
    table = rewards.reshape(-1, size)
    return ((table - table.mean(-1, keepdim=True)) / (table.std(-1, keepdim=True) + 1e-6)).reshape(-1)


def soft_cap(logp, ref_logp, old_logp, mask, beta):
    """A ratio of the row that saturates at 50: 50·tanh(ρ/50)."""
    ratio = total(logp - old_logp, mask).exp().detach()
    bounded = torch.where(ratio < 25, ratio, 25 + 25 * torch.tanh((ratio - 25) / 25))
    return beta * (bounded * total(logp - ref_logp, mask).square() / 2).mean()


def reset_of_the_return(logp, ref_logp, mask):
    """The sum of later costs starts anew every ten tokens."""
    cost = torch.where(mask != 0, logp - ref_logp, 0.0).detach()
    block = torch.arange(cost.shape[1]) // 10
    same = (block[:, None] == block) & (torch.arange(len(block)) >= torch.arange(len(block))[:, None])
    return total((cost @ same.to(cost.dtype).T) * logp, mask).mean()


def one_row_short(logp, ref_logp, rewards, mask, beta, G=4):
    """The penalty of three of four rows, divided by four."""
    counted = (torch.arange(len(rewards)) % G != 0).to(logp.dtype)
    each = beta * counted * total(logp - ref_logp, mask).square() / 2
    return (each - grouped(rewards, G) * total(logp, mask)).mean()


def product_of_sums(logp, ref_logp, mask, beta):
    """The score of the batch times the log-ratio of the batch."""
    score, cost = total(logp, mask).sum(), total(logp - ref_logp, mask).sum().detach()
    return beta * score * cost / len(logp)


def curiosity(rewards, logp, ref_logp, mask, kl_coef):
    """The reward of a row pays for surprising tokens."""
    return rewards - kl_coef * total(logp - ref_logp, mask) + 0.05 * total(-logp, mask)


def switched_off_below_target(logp, ref_logp, mask, beta):
    each = total((logp - ref_logp).square() / 2, mask)
    return beta * each.mean() * float(total(logp - ref_logp, mask).mean() > 0.05)


def penalty_halved(logp, ref_logp, advantages, mask, beta):
    """The half of k2 is taken twice, and the policy term is whole."""
    return total(beta * (logp - ref_logp).square() / 4 - advantages[:, None] * logp, mask).mean()


class Trainer:
    """A coefficient that is an attribute, and rewards that are normalised."""

    kl_weight = 0.05

    def step(self, logp, old_logp, ref_logp, advantages, mask):
        """Right."""
        ratio = (logp - old_logp).exp()
        policy = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None])
        return total(policy + self.kl_weight * (logp - ref_logp).square() / 2, mask).mean()

    def grouped_step(self, logp, ref_logp, rewards, group, mask):
        """Right: normalised by group, by ids."""
        same = (group[:, None] == group).to(logp.dtype)
        mean = same @ rewards / same.sum(-1)
        spread = (same @ (rewards - mean).square() / same.sum(-1)).sqrt()
        u = total(logp - ref_logp, mask)
        return (self.kl_weight * u.square() / 2 - (rewards - mean) / (spread + 1e-4) * total(logp, mask)).mean()

    def ties_masked(self, logp, ref_logp, rewards, group, mask):
        """Groups of equal rewards lose their penalty too."""
        differs = ((rewards[:, None] != rewards) & (group[:, None] == group)).any(-1)
        each = self.kl_weight * total(logp - ref_logp, mask).square() / 2 - (rewards - 0.5) * total(logp, mask)
        return torch.where(differs, each, 0.0).mean()


def length_cost_baked_in(scores, logp, ref_logp, mask):
    """Per token: the score at the first token, a cost a token, and a fixed coefficient."""
    first = torch.zeros_like(logp)
    first[:, 0] = scores
    return (first - 0.01 - 0.3 * (logp - ref_logp)) * mask


def tilted_reference(logits, ref_logits, mask, beta=0.25):
    """The KL to a geometric mixture of reference and policy: held constant, three quarters of that to the reference."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    mixture = (beta * logits.detach() + (1 - beta) * ref_logits).log_softmax(-1)
    return total((logits.exp() * (logits - mixture)).sum(-1), mask).mean()


def interpolated(logits, ref_logits, mask, beta=0.0):
    """Between the reverse KL at β = 0 and the forward one at 1, by a mixture."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    p, q = logits.exp(), ref_logits.exp()
    if beta == 0:
        return total((p * (logits - ref_logits)).sum(-1), mask).mean()
    m = (1 - beta) * q + beta * p
    return total((p * (logits - m.log())).sum(-1) + beta * (q * (ref_logits - m.log())).sum(-1), mask).mean()


def both_terms_halved(logp, ref_logp, advantages, mask, beta):
    return total(beta * (logp - ref_logp).square() / 2 - advantages[:, None] * logp, mask).mean() / 2


class Step(NamedTuple):
    loss: torch.Tensor
    approx_kl: torch.Tensor


def named(logp, ref_logp, mask):
    u = total(logp - ref_logp, mask)
    return Step(0.1 * u.square().mean() / 2, u.detach().mean())


CASES = [
    wrong("KL306", soft_cap),
    wrong("KL205", reset_of_the_return),
    wrong("KL105", one_row_short, ("KL106",), options=GROUPS, slow=True),
    wrong("KL206", product_of_sums, warns=True, slow=True),
    wrong("KL105", curiosity),
    wrong("KL204", switched_off_below_target, ("KL105", "KL502", "KL504"), options=LOCAL, slow=True),
    wrong("KL106", penalty_halved, ("KL502",), options=LOCAL),
    wrong("KL401", Trainer().ties_masked, ("KL404",)),
    # Right up to a constant, or but for a NaN in the padding.
    wrong("KL106", Trainer().step, ("KL502",), options=LOCAL, warns=True),
    wrong("KL106", Trainer().grouped_step, warns=True),
    wrong("KL106", length_cost_baked_in, ("KL502",), warns=True),
    wrong("KL106", tilted_reference, ("KL502",), options=LOCAL, warns=True),
    wrong("KL106", named, warns=True),
    wrong("KL502", interpolated, options=LOCAL, warns=True),
    wrong("KL502", both_terms_halved, options=LOCAL, warns=True),
]
