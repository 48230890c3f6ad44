"""Wrong losses beside those of `clean_sceptic.py`: the same ideas with a mistake."""

import torch
import torch.nn.functional as F
from cases.parts import total
from cases.table import wrong

BOTH = {"sampler": "both"}


def square_of_the_mean(logp, ref_logp, mask):
    """1/n of the gradient: the square takes the mean's divisor twice."""
    return total(logp - ref_logp, mask).mean().square() / 2


def variance_of_the_batch(logp, ref_logp, mask):
    """The mean that is subtracted contains the rollout."""
    return total(logp - ref_logp, mask).var(unbiased=False) / 2


# KL504: the declared gradient near the reference, and no more than a bound of it far away.


def held_on_one_side(logp, ref_logp, mask, group):
    """Beside a baseline of the other rollouts, a cost that never falls below −3."""
    cost = total(logp - ref_logp, mask).detach().clamp(min=-3)
    same = (group[:, None] == group).to(cost)
    others = (same @ cost - cost) / (same.sum(-1) - 1).clamp(min=1)
    return ((cost - others) * total(logp, mask)).mean()


# KL105: nothing that has a name, or only far away.


def smooth_l1(logp, ref_logp, mask):
    """Any factor on log-probs that leaves the square behind makes it the total variation: no temperature does."""
    return F.smooth_l1_loss(total(logp, mask), total(ref_logp, mask), beta=1.0)


def hinge(logp, ref_logp, mask):
    return (total(logp - ref_logp, mask).square() / 2 - 0.1).relu().mean()


def ratio_upside_down(logp, old_logp, ref_logp, mask):
    ratio = total(old_logp - logp, mask).exp().detach()
    return (ratio * total(logp - ref_logp, mask).square() / 2).mean()


# Others.


def straight_through_the_first_power(logp, ref_logp, mask):
    """The value of k2 with the gradient of k1."""
    log_ratio = total(logp - ref_logp, mask)
    return ((log_ratio**2 / 2).detach() + log_ratio - log_ratio.detach()).mean()


def rollouts_outside_a_window_dropped(logp, old_logp, ref_logp, mask):
    ratio = total(logp - old_logp, mask).exp().detach()
    kept = torch.where((ratio > 0.5) & (ratio < 2.0), ratio, 0.0)
    return (kept * total(logp - ref_logp, mask).square() / 2).mean()


def logs_the_step_from_the_sampler(logp, old_logp, ref_logp, mask):
    """Without a ratio as well, which its sampler's log-probs would have been there for."""
    log_ratio = total(logp - ref_logp, mask)
    return log_ratio.square().mean() / 2, {"kl": total(old_logp - logp, mask).mean().detach()}


CASES = [
    wrong("KL206", square_of_the_mean, ("KL106",), slow=True),
    wrong("KL402", variance_of_the_batch, ("KL206",)),
    wrong("KL504", held_on_one_side),
    wrong("KL105", smooth_l1),
    wrong("KL105", hinge, ("KL504",)),
    wrong("KL105", ratio_upside_down, options=BOTH),
    wrong("KL101", straight_through_the_first_power),
    wrong("KL306", rollouts_outside_a_window_dropped, options=BOTH),
    wrong("KL601", logs_the_step_from_the_sampler, ("KL301",)),
]
