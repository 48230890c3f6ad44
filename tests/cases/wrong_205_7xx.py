"""Losses with discounted credit, with heads of the vocabulary, temperatures and truncations."""

import torch
import torch.nn.functional as F
from cases.table import right, wrong

LOCAL = {"expect": "local_reverse_kl"}


def chosen(log_probs, tokens):
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


# KL205: later log-ratios with a factor.


def advantages_by_gae(logp, ref_logp, mask, gamma=1.0, lam=0.95):
    """Generalised advantage estimation of the penalty alone, without a critic."""
    live = mask.bool()
    rewards = torch.where(live, ref_logp - logp, 0.0).detach()
    advantages, last = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=rewards.dtype)
    for step in reversed(range(rewards.shape[1])):
        last = rewards[:, step] + gamma * lam * last
        advantages[:, step] = last
    return -(advantages * torch.where(live, logp, 0.0)).sum(-1).mean()


def next_token_only(logp, ref_logp, mask):
    """Credit is cut off after one token."""
    live = mask.bool()
    cost = torch.where(live, (logp - ref_logp).detach(), 0.0)
    following = F.pad(cost[:, 1:], (0, 1))
    return ((cost + following) * torch.where(live, logp, 0.0)).sum(-1)


def mixed_with_the_local_loss(logp, ref_logp, mask):
    delta = torch.where(mask.bool(), logp - ref_logp, 0.0)
    return 0.3 * delta.sum(-1).square() / 2 + 0.7 * delta.square().sum(-1) / 2


# KL701: a head of the vocabulary.


def ema_pg(logits, ref_logits, logp, ref_logp, tokens):
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    top = logits.topk(2, dim=-1)
    head = (top.values.exp() * (top.values - ref_logits.gather(-1, top.indices))).sum(-1)
    outside = (top.indices != tokens.unsqueeze(-1)).all(-1)
    return head + 0.5 * (logp - ref_logp).square().where(outside, 0.0)


# KL702: a temperature.


def generation_temperature_on_the_policy(logits, ref_logits, tokens):
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    own = chosen(torch.log_softmax(logits / 0.7, -1), tokens)
    return 0.5 * (own - chosen(ref_logits, tokens)).square()


def distillation_temperature(logits, ref_logits):
    own, other = (torch.log_softmax(scores / 2, -1) for scores in (logits, ref_logits))
    return F.kl_div(other, own, log_target=True, reduction="none").sum(-1)


def temperature_of_the_reference_alone(logits, ref_logits, tokens):
    """Follows 2/3 of the KL less a third of the entropy: the same as a bonus, but for the coefficient."""
    own, other = (chosen(scores.log_softmax(-1), tokens) for scores in (logits, ref_logits / 1.5))
    return 0.5 * (own - other).square()


# KL105: an entropy bonus, which is no temperature.


def entropy_beside_the_exact_kl(logits, ref_logits, coefficient=0.05):
    own, other = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    entropy = -(own.exp() * own).sum(-1)
    return (own.exp() * (own - other)).sum(-1) - coefficient * entropy


def a_tenth_of_both(logits, ref_logits):
    return 0.1 * entropy_beside_the_exact_kl(logits, ref_logits)


def entropy_of_samples_beside_k3(logp, ref_logp):
    k3 = (ref_logp - logp).exp() - 1 - (ref_logp - logp)
    return k3 - 0.01 * -(logp.detach() * logp)


# KL703: a truncated distribution on the drawn token.


def top_p_log_prob(logits, ref_logp, tokens):
    logits = logits.log_softmax(-1)
    ordered = logits.sort(-1, descending=True)
    chances = ordered.values.exp()
    inside = (chances.cumsum(-1) - chances < 0.7).scatter(-1, ordered.indices, chances.cumsum(-1) - chances < 0.7)
    own = chosen(logits.masked_fill(~inside, float("-inf")).log_softmax(-1), tokens)
    inside = chosen(inside, tokens)
    return torch.where(inside, 0.5 * (own.where(inside, 0.0) - ref_logp).square(), 0.0)


def tokens_outside_are_skipped(logp, ref_logp, logits, tokens):
    rank = (logits > chosen(logits, tokens).unsqueeze(-1)).sum(-1)
    return (0.5 * (logp - ref_logp).square()).where(rank < 2, 0.0)


CASES = [
    wrong("KL205", advantages_by_gae),
    wrong("KL205", next_token_only),
    wrong("KL205", mixed_with_the_local_loss),
    wrong("KL701", ema_pg, options=LOCAL),
    wrong("KL701", "top-k"),
    wrong("KL702", generation_temperature_on_the_policy, options=LOCAL),
    wrong("KL702", distillation_temperature, options=LOCAL),
    wrong("KL702", temperature_of_the_reference_alone, options=LOCAL),
    wrong("KL105", entropy_beside_the_exact_kl, options=LOCAL),
    wrong("KL105", entropy_beside_the_exact_kl, ("KL201",)),
    wrong("KL105", a_tenth_of_both, options=LOCAL),
    wrong("KL105", entropy_of_samples_beside_k3, ("KL102", "KL503"), LOCAL),
    right(entropy_beside_the_exact_kl, {"expect": "local_reverse_kl-0.05*local_entropy"}),
    right(
        entropy_beside_the_exact_kl,
        {"expect": "local_reverse_kl@sampler-0.05*local_entropy@sampler", "sampler": "stale"},
    ),
    wrong("KL703", top_p_log_prob, also=("KL504",), options=LOCAL),
    wrong("KL703", tokens_outside_are_skipped, also=("KL504",), options=LOCAL),
]
