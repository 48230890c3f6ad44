"""Losses of a stale sampler in which a ratio is partly clipped, partly broadcast, or a penalty partly stale."""

import torch
from cases.parts import k2, live, total
from cases.table import right, wrong

BOTH = {"sampler": "both"}
AT_SAMPLER = BOTH | {"expect": "local_reverse_kl@sampler"}
LOCAL = BOTH | {"expect": "local_reverse_kl"}


def k3(logp, ref_logp, mask):
    log_ratio = live(ref_logp - logp, mask)
    return log_ratio.exp() - 1 - log_ratio


def half_square(logp, ref_logp, mask):
    return live(logp - ref_logp, mask).square() / 2


def step(logp, old_logp, mask):
    """The log-ratio of each token to the sampler."""
    return live(logp - old_logp, mask)


def mean_step(logp, old_logp, mask):
    return total(logp - old_logp, mask)[:, None] / mask.sum(-1, keepdim=True)


def to_go(costs):
    return costs.flip(-1).cumsum(-1).flip(-1)


# KL306: a bound on the ratio in front of a term that is not the declared gradient without it, either.


def capped_ratio(logp, ref_logp, old_logp, mask, cap=1.1):
    weight = step(logp, old_logp, mask).exp().clamp(max=cap).detach()
    return (weight * half_square(logp, ref_logp, mask)).sum(-1)


def uncapped_ratio(logp, ref_logp, old_logp, mask):
    weight = step(logp, old_logp, mask).exp().detach()
    return (weight * half_square(logp, ref_logp, mask)).sum(-1)


def tokens_outside_a_window_dropped(logp, ref_logp, old_logp, mask):
    """As in IcePop: the ratio where it is near 1, nothing elsewhere."""
    ratio = step(logp, old_logp, mask).exp().detach()
    kept = (ratio > 0.8) & (ratio < 1.25)
    return torch.where(kept, ratio, 0.0).mul(k3(logp, ref_logp, mask)).sum(-1)


def rollouts_far_from_the_sampler_dropped(logp, ref_logp, old_logp, mask):
    kept = mean_step(logp, old_logp, mask).detach().abs() < 0.1
    return (kept * step(logp, old_logp, mask).exp().detach() * k3(logp, ref_logp, mask)).sum(-1)


def penalty_under_the_surrogate(logp, ref_logp, old_logp, mask):
    """The penalty is part of the advantage, and clipped with it."""
    ratio = step(logp, old_logp, mask).exp()
    advantage = -to_go(live(logp - ref_logp, mask).detach())
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum(-1)


def penalty_under_the_surrogate_unclipped(logp, ref_logp, old_logp, mask):
    ratio = step(logp, old_logp, mask).exp()
    return (ratio * to_go(live(logp - ref_logp, mask).detach())).sum(-1)


def sequence_ratio_clipped_in_log_space(logp, ref_logp, old_logp, mask):
    weight = total(logp - old_logp, mask).clamp(-0.2, 0.2).exp().detach()
    return weight * k3(logp, ref_logp, mask).sum(-1)


# KL304: a mean ratio that is clipped, or one factor or summand of a token's weight, or the weight of some tokens.


def mean_ratio_clipped(logp, ref_logp, old_logp, mask):
    weight = mean_step(logp, old_logp, mask).exp().clamp(0.9, 1.1).detach()
    return (weight * half_square(logp, ref_logp, mask)).sum(-1)


def mean_and_own_ratio(logp, ref_logp, old_logp, mask):
    weight = (mean_step(logp, old_logp, mask).exp() + step(logp, old_logp, mask).exp()) / 2
    return (weight.clamp(0.9, 1.1).detach() * half_square(logp, ref_logp, mask)).sum(-1)


def geometric_mixture(logp, ref_logp, old_logp, mask):
    weight = (mean_step(logp, old_logp, mask) + step(logp, old_logp, mask)).div(2).exp().detach()
    return (weight * half_square(logp, ref_logp, mask)).sum(-1)


def mean_ratio_on_the_first_tokens(logp, ref_logp, old_logp, mask):
    own = step(logp, old_logp, mask)
    weight = torch.where(torch.arange(mask.shape[1]) < 2, mean_step(logp, old_logp, mask), own).exp().detach()
    return (weight * half_square(logp, ref_logp, mask)).sum(-1)


def prefix_ratio(logp, ref_logp, old_logp, mask):
    weight = step(logp, old_logp, mask).cumsum(-1).exp().detach()
    return (weight * half_square(logp, ref_logp, mask)).sum(-1)


# KL305: the sampler's log-probs in part of the penalty, in another estimator of it, or behind a clip.


def k3_of_the_sampler(logp, ref_logp, old_logp, mask):
    return total(logp - old_logp, mask).exp() * k3(old_logp, ref_logp, mask).sum(-1)


def fresh_at_the_last_token(logp, ref_logp, old_logp, mask):
    last = torch.arange(mask.shape[1]) == mask.sum(-1, keepdim=True) - 1
    scored = torch.where(last, logp.detach(), old_logp)
    return total(logp - old_logp, mask).exp() * total(scored - ref_logp, mask)


def stale_at_the_first_token(logp, ref_logp, old_logp, mask):
    scored = torch.where(torch.arange(mask.shape[1]) < 1, old_logp, logp.detach())
    return total(logp - old_logp, mask).exp() * total(scored - ref_logp, mask)


def half_stale_under_the_surrogate(logp, ref_logp, old_logp, mask):
    ratio = step(logp, old_logp, mask).exp()
    advantage = -to_go(live((logp.detach() + old_logp) / 2 - ref_logp, mask))
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum(-1)


def stale_times_the_mean_ratio(logp, ref_logp, old_logp, mask):
    weight = mask.sum(-1) * mean_step(logp, old_logp, mask)[:, 0].exp()
    return weight * total(old_logp - ref_logp, mask)


def fresh_in_every_token(logp, ref_logp, old_logp, mask):
    return total(logp - old_logp, mask).exp() * total(logp.detach() - ref_logp, mask)


# No bound on the ratio and no broadcast: what has no name here has none with the policy as sampler, either.


def log_ratio_clamped(logp, ref_logp, old_logp, mask):
    weight = total(logp - old_logp, mask).exp().detach()
    return weight * half_square(logp, ref_logp, mask).clamp(max=0.08).sum(-1)


def pulled_to_the_sampler_as_well(logp, ref_logp, old_logp, mask):
    weight = total(logp - old_logp, mask).exp().detach()
    away = live(logp - old_logp, mask).square().tanh().sum(-1)
    return weight * (k2(logp, ref_logp, mask) + away)


# KL301: no ratio. On one token, a ratio of all the others is none, and a ratio of one-token answers is one.


def ratio_of_the_tokens_before(logp, ref_logp, old_logp, mask):
    own = step(logp, old_logp, mask)
    weight = (own.cumsum(-1) - own).exp().detach()
    return (weight * half_square(logp, ref_logp, mask)).sum(-1)


def ratio_of_short_answers_only(logp, ref_logp, old_logp, mask):
    weight = torch.where(mask.sum(-1, keepdim=True) > 1, 1.0, step(logp, old_logp, mask).exp()).detach()
    return (weight * half_square(logp, ref_logp, mask)).sum(-1)


CASES = [
    wrong("KL306", capped_ratio, options=AT_SAMPLER),
    wrong("KL306", capped_ratio, ("KL201",), BOTH),
    wrong("KL306", tokens_outside_a_window_dropped, ("KL102", "KL503"), BOTH),
    wrong("KL306", rollouts_far_from_the_sampler_dropped, ("KL102", "KL503"), BOTH),
    wrong("KL306", penalty_under_the_surrogate, options=BOTH),
    wrong("KL306", sequence_ratio_clipped_in_log_space, ("KL102", "KL503"), BOTH),
    wrong("KL304", mean_ratio_clipped, ("KL306",), LOCAL),
    wrong("KL304", mean_and_own_ratio, ("KL306",), LOCAL),
    wrong("KL304", geometric_mixture, options=LOCAL),
    wrong("KL304", mean_ratio_on_the_first_tokens, options=LOCAL),
    wrong("KL305", k3_of_the_sampler, ("KL105", "KL503"), BOTH),
    wrong("KL305", fresh_at_the_last_token, options=BOTH),
    wrong("KL305", stale_at_the_first_token, options=BOTH),
    wrong("KL305", half_stale_under_the_surrogate, ("KL306",), BOTH),
    wrong("KL305", stale_times_the_mean_ratio, options=BOTH),
    wrong("KL105", log_ratio_clamped, ("KL504",), BOTH),
    wrong("KL105", pulled_to_the_sampler_as_well, options=BOTH),
    wrong("KL105", ratio_of_the_tokens_before, options=LOCAL),
    wrong("KL301", ratio_of_short_answers_only, options=LOCAL),
    right(uncapped_ratio, AT_SAMPLER),
    right(penalty_under_the_surrogate_unclipped, BOTH | {"expect": "reverse_kl@sampler"}),
    right(prefix_ratio, LOCAL),
    right(fresh_in_every_token, BOTH),
]
