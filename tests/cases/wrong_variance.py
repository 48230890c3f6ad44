"""Losses that are right and noisy: they are confirmed, with a warning."""

import torch
from cases.parts import live
from cases.table import wrong

# ------------------------------------------------------------------------------------- KL801: exponential weights


def full_sequence_ratio(logp, ref_logp, old_logp, mask):
    log_rho = live(logp - old_logp, mask).sum(-1)
    cost = live(logp - ref_logp, mask).sum(-1)
    return (torch.exp(log_rho) * cost.detach()).mean()


def ratio_of_every_token(new_logprobs, ref_logprobs, old_logprobs, mask):
    ratio = live(new_logprobs - old_logprobs, mask).exp().detach()
    return 0.5 * (ratio * live(new_logprobs - ref_logprobs, mask).square()).sum(-1)


def likelihood_weighted_by_the_reference(log_probs, log_probs_base, response_mask):
    total = live(log_probs_base - log_probs, response_mask).sum(-1)
    weight = torch.exp(torch.clamp(total, max=60)).detach()
    return -(weight * live(log_probs, response_mask).sum(-1)).mean()


# ------------------------------------------------------------------------------------------- KL802: needless noise


def k1_in_both_places(logp, ref_logp, mask):
    u = live(logp - ref_logp, mask).sum(-1)
    return u + u.detach() * live(logp, mask).sum(-1)


def a_constant_added_to_the_return(logp, ref_logp, mask):
    u = live(logp - ref_logp, mask)
    to_go = u.flip(-1).cumsum(-1).flip(-1).detach() + 3.0
    return (to_go * live(logp, mask)).sum(-1)


FORWARD = {"expect": "forward_kl"}

CASES = [
    wrong("KL801", full_sequence_ratio),
    wrong("KL801", likelihood_weighted_by_the_reference, options=FORWARD),
    wrong("KL801", ratio_of_every_token, options={"expect": "local_reverse_kl@sampler", "sampler": "stale"}),
    wrong("KL802", k1_in_both_places),
    wrong("KL802", a_constant_added_to_the_return),
]
