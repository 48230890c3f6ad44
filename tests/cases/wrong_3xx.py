"""Losses that use rollouts of another policy as the policy's own, or correct for it in the wrong way."""

import torch
from cases.parts import total
from cases.table import wrong

BOTH = {"sampler": "both"}
LOCAL = {"expect": "local_reverse_kl"}


# KL301: no ratio.


def k1_return_as_sampled(logp, ref_logp, mask):
    cost = total(logp - ref_logp, mask).detach()
    return cost * torch.where(mask.bool(), logp, 0.0).sum(-1)


def ppo_with_a_bare_penalty(logp, old_logp, advantage, ref_logp, mask, beta):
    """The policy term has its ratio, the penalty has none."""
    live = mask.bool()
    ratio = torch.where(live, logp - old_logp, 0.0).exp()
    surrogate = torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
    policy_loss = -torch.where(live, surrogate, 0.0).sum(-1)
    return policy_loss + beta * 0.5 * total(logp - ref_logp, mask).pow(2)


# KL302: the ratio's own derivative is cut although it is needed.


def k3_with_a_stopped_sequence_ratio(logp, ref_logp, old_logp, mask):
    log_ratio = total(logp - ref_logp, mask)
    with torch.no_grad():
        weight = total(logp - old_logp, mask).exp()
    return weight * (torch.expm1(-log_ratio) + log_ratio)


def k1_value_with_a_stopped_ratio(logp, ref_logp, old_logp, mask):
    """ρ·k1: with the ratio differentiable this is the score-function estimate."""
    weight = total(logp.detach() - old_logp.detach(), mask).exp()
    return (weight * total(logp - ref_logp, mask)).mean()


# KL303: the token's own ratio and no prefix.


def truncated_importance_sampling(logp, ref_logp, old_logp, mask):
    weight = torch.exp(torch.where(mask.bool(), logp - old_logp, 0.0)).clamp(max=10.0).detach()
    return weight * 0.5 * torch.where(mask.bool(), logp - ref_logp, 0.0).square()


def exact_kl_at_sampled_prefixes(logits, ref_logits, mask):
    live = mask.bool()
    own, other = logits[live].log_softmax(-1), ref_logits[live].log_softmax(-1)
    divergence = torch.zeros_like(mask)
    divergence[live] = torch.einsum("nv,nv->n", own.exp(), own - other)
    return divergence.sum(-1)


# KL304: one ratio for a sequence on every token.


def gspo_style(logp, ref_logp, old_logp, mask):
    lengths = mask.sum(-1, keepdim=True)
    log_weight = torch.where(mask.bool(), logp - old_logp, 0.0).sum(-1, keepdim=True) / lengths
    penalty = 0.5 * torch.where(mask.bool(), logp - ref_logp, 0.0).square()
    return (log_weight.exp().detach() * penalty).sum(-1).mean()


def broadcast_by_expand(logp, ref_logp, old_logp, mask):
    live = mask != 0
    mean = (logp - old_logp).masked_fill(~live, 0.0).sum(1) / live.sum(1)
    weight = mean.exp()[:, None].expand_as(logp).detach()
    delta = (logp - ref_logp).masked_fill(~live, 0.0)
    return (weight * delta.detach() * delta).sum(1)


# KL305: the reward's log-ratio is as old as the rollout.


def penalty_at_generation_time(logp, ref_logp, old_logp, mask):
    weight = total(logp - old_logp, mask).exp()
    return weight * total(old_logp - ref_logp, mask)


def shaped_rewards(logp, ref_logp, old_logp, mask):
    live = mask.bool()
    rewards = -torch.where(live, old_logp - ref_logp, 0.0)
    ratio = torch.exp(torch.where(live, logp - old_logp, 0.0).cumsum(1)).detach()
    weights = (ratio * rewards).flip(1).cumsum(1).flip(1)
    return -(weights * torch.where(live, logp, 0.0)).sum(1)


# KL306: the ratio is right until it is limited.


def clipped_in_log_space(logp, ref_logp, old_logp, mask):
    log_weight = torch.clamp(total(logp - old_logp, mask), -0.1, 0.1)
    return log_weight.exp().detach() * 0.5 * total(logp - ref_logp, mask).pow(2)


CASES = [
    wrong("KL301", k1_return_as_sampled, options=BOTH),
    wrong("KL301", ppo_with_a_bare_penalty, options=BOTH),
    wrong("KL302", k3_with_a_stopped_sequence_ratio, also=("KL102", "KL503")),
    wrong("KL302", k1_value_with_a_stopped_ratio, also=("KL101",)),
    wrong("KL303", truncated_importance_sampling, options=LOCAL),
    wrong("KL303", exact_kl_at_sampled_prefixes, also=("KL301",), options=LOCAL | BOTH),
    wrong("KL304", gspo_style, options=LOCAL),
    wrong("KL304", broadcast_by_expand, options=LOCAL),
    wrong("KL305", penalty_at_generation_time, options={"placement": "reward"}),
    wrong("KL305", shaped_rewards),
    wrong("KL306", clipped_in_log_space),
]
