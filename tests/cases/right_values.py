"""Correct losses that log a true KL, in the ways of libraries."""

from collections import deque

import torch
from cases.parts import live, penalty
from cases.table import right


def sampled_k3(logp, ref_logp, mask):
    delta = live(ref_logp - logp, mask).clamp(-20, 20)
    return torch.expm1(delta) - delta


def logs_k1_a_sequence(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": live(logp - ref_logp, mask).sum(-1)}


def logs_other_statistics_by_their_names(logp, ref_logp, mask):
    log_ratio = live(logp - ref_logp, mask).sum(-1).detach()
    return penalty(logp, ref_logp, mask), {
        "kl_p95": log_ratio.double().quantile(0.95),
        "kl_bits": log_ratio.mean() / 0.6931471805599453,
        "kl_sum": log_ratio.sum(),
    }


def logs_k1_a_token(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": (logp - ref_logp).detach()}


def logs_k1_as_an_array(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": live(logp - ref_logp, mask).sum(-1).detach().numpy()}


def logs_k1_in_single_precision(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": live(logp - ref_logp, mask).sum(-1).float().mean().item()}


def logs_k3_of_the_sequence(logp, ref_logp, mask):
    delta = live(ref_logp - logp, mask).sum(-1).clamp(-20, 20)
    return penalty(logp, ref_logp, mask), {"kl": (delta.exp() - 1 - delta).mean()}


def logs_the_token_mean_of_k3(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": sampled_k3(logp, ref_logp, mask).sum() / mask.sum()}


def logs_the_mean_of_token_means_of_k3(per_token_logps, ref_per_token_logps, completion_mask):
    per_token_kl = sampled_k3(per_token_logps, ref_per_token_logps, completion_mask)
    mean_kl = (per_token_kl.sum(dim=1) / completion_mask.sum(dim=1)).mean()
    return penalty(per_token_logps, ref_per_token_logps, completion_mask), {"kl": mean_kl}


def logs_the_exact_next_token_kl(logp, ref_logp, logits, ref_logits, mask):
    live_logits, live_ref = live(logits, mask.unsqueeze(-1)), live(ref_logits, mask.unsqueeze(-1))
    kl = torch.where(mask.bool(), (live_logits.exp() * (live_logits - live_ref)).sum(-1), 0.0)
    return penalty(logp, ref_logp, mask), {"kl": kl.sum(-1).mean()}


def logs_the_samplers_own_kl(logp, ref_logp, old_logp, mask):
    ratio = live(logp - old_logp, mask).sum(-1).exp().detach()
    u = live(logp - ref_logp, mask).sum(-1)
    return ratio * u.pow(2) / 2, {"kl": live(old_logp - ref_logp, mask).sum(-1).mean()}


def logs_it_unweighted_off_policy(logp, ref_logp, old_logp, mask):
    ratio = live(logp - old_logp, mask).sum(-1).exp().detach()
    u = live(logp - ref_logp, mask).sum(-1)
    return ratio * u.pow(2) / 2, {"kl": u.mean()}


def logs_it_weighted_off_policy(logp, ref_logp, old_logp, mask):
    ratio = live(logp - old_logp, mask).sum(-1).exp().detach()
    u = live(logp - ref_logp, mask).sum(-1)
    return ratio * u.pow(2) / 2, {"kl": (ratio * u).mean()}


def adds_up_in_place(logp, ref_logp, mask):
    u = live(logp - ref_logp, mask)
    kl = torch.zeros(len(u), dtype=u.dtype)
    metrics = {"kl": kl}
    for step in range(u.shape[1]):
        kl += u[:, step].detach()
    return u.sum(-1).pow(2) / 2, metrics


def masks_in_place(logp, ref_logp, mask):
    kl = (logp - ref_logp).detach()
    logged = kl.detach()
    kl.masked_fill_(mask == 0, 0.0)
    return penalty(logp, ref_logp, mask), {"kl": logged}


def fills_rows_of_a_view(logp, ref_logp, mask):
    table = torch.empty(len(logp), 1, dtype=logp.dtype)
    column = table[:, 0]
    for row, (new, ref, here) in enumerate(zip(logp, ref_logp, mask, strict=True)):
        table[row, 0] = (new - ref)[here.bool()].sum().detach()
    return penalty(logp, ref_logp, mask), {"kl": column}


def logs_a_number(logp, ref_logp, mask, beta):
    kl = live(logp - ref_logp, mask).sum(-1).detach()
    metrics = {"kl": kl.mean().item()}
    kl.mul_(beta)
    return kl * live(logp, mask).sum(-1), metrics


def logs_the_token_mean_of_a_group(logp, ref_logp, mask, rewards):
    if len(logp) < 2:
        raise ValueError("needs a group")
    u = live(logp - ref_logp, mask).sum(-1)
    loss = ((u - (u.sum() - u) / (len(u) - 1)).detach() * live(logp, mask).sum(-1)).mean()
    return loss, {"kl": sampled_k3(logp, ref_logp, mask).sum() / mask.sum()}


def scales_a_copy(logp, ref_logp, mask, beta):
    kl = live(logp - ref_logp, mask).sum(-1).detach()
    metrics = {"kl": kl.clone()}
    kl.mul_(beta)
    return kl * live(logp, mask).sum(-1), metrics


class MovingAverage:
    """Logs an exponential moving average over calls, from the first number on or from zero."""

    def __init__(self, kept=0.9, first=None):
        self.kept, self.kl = kept, first

    def now(self, logp, ref_logp, mask):
        return live(logp - ref_logp, mask).sum(-1).mean().item()

    def __call__(self, logp, ref_logp, mask):
        now = self.now(logp, ref_logp, mask)
        self.kl = now if self.kl is None else self.kept * self.kl + (1 - self.kept) * now
        return penalty(logp, ref_logp, mask), {"kl": self.kl}


class MeanOfLastCalls:
    def __init__(self, calls=20):
        self.last = deque(maxlen=calls)

    def __call__(self, logp, ref_logp, mask):
        self.last.append(live(logp - ref_logp, mask).sum(-1).mean().item())
        return penalty(logp, ref_logp, mask), {"kl": sum(self.last) / len(self.last)}


CASES = [
    right(logs_k1_a_sequence, logs=True),
    right(logs_other_statistics_by_their_names),
    right(logs_k1_a_token, logs=True),
    right(logs_k1_as_an_array, logs=True),
    right(logs_k1_in_single_precision, logs=True),
    right(logs_k3_of_the_sequence, logs=True),
    right(logs_the_token_mean_of_k3, logs=True),
    right(logs_the_mean_of_token_means_of_k3, logs=True),
    right(logs_the_exact_next_token_kl, logs=True),
    right(logs_the_samplers_own_kl, logs=True),
    right(logs_it_unweighted_off_policy, logs=True),
    right(logs_it_weighted_off_policy, logs=True),
    right(adds_up_in_place, logs=True),
    right(masks_in_place, logs=True),
    right(fills_rows_of_a_view, logs=True),
    right(scales_a_copy, logs=True),
    right(MovingAverage()),
    right(MovingAverage(kept=0.999, first=0.0)),
    right(MeanOfLastCalls()),
    right(logs_a_number, logs=True),
    right(logs_the_token_mean_of_a_group, {"group_size": 2, "environment": "sequence,ragged"}),
]
