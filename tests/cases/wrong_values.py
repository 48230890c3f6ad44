"""Losses whose gradient is right and whose logged KL is not."""

import torch
from cases.parts import live, penalty
from cases.right_values import MovingAverage, sampled_k3
from cases.table import wrong

# ------------------------------------------------------------------------------------------------ KL601: none of them


def logs_k2(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": 0.5 * live(logp - ref_logp, mask).square().sum(-1).mean()}


def squares_in_place_and_then_logs(logp, ref_logp, mask):
    kl = live(logp - ref_logp, mask).sum(-1).detach()
    kl.square_().div_(2)
    return penalty(logp, ref_logp, mask), {"kl": kl}


def logs_the_distance_to_the_sampler(logp, ref_logp, old_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": live(old_logp - logp, mask).sum(-1).mean()}


def leaves_out_the_first_token(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": live(logp - ref_logp, mask)[:, 1:].sum(-1).mean()}


def logs_k1_cut_off_below(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": live(logp - ref_logp, mask).sum(-1).clamp(min=0).mean().item()}


class AddsUpOverCalls:
    """A sum that nobody sets back to zero."""

    def __init__(self):
        self.kl = 0.0

    def __call__(self, logp, ref_logp, mask):
        self.kl += live(logp - ref_logp, mask).sum(-1).mean().item()
        return penalty(logp, ref_logp, mask), {"kl": self.kl}


class AveragesHalfSquares(MovingAverage):
    def now(self, logp, ref_logp, mask):
        return penalty(logp, ref_logp, mask).item()


# ------------------------------------------------------------------------------------------- KL602: times something


def logs_beta_times_kl(logp, ref_logp, mask, kl_coef):
    kl = live(logp - ref_logp, mask).sum(-1)
    return kl_coef * kl.square() / 2, {"kl": kl_coef * sampled_k3(logp, ref_logp, mask).sum(-1).mean()}


def logs_after_the_ratio(per_token_logps, ref_per_token_logps, old_per_token_logps, completion_mask):
    ratio = live(per_token_logps - old_per_token_logps, completion_mask).exp()
    per_token_kl = sampled_k3(per_token_logps, ref_per_token_logps, completion_mask) * ratio.detach()
    loss = penalty(per_token_logps, ref_per_token_logps, completion_mask)
    return loss, {"kl": per_token_kl.sum() / completion_mask.sum()}


def logs_it_times_the_advantage(logp, ref_logp, mask, advantages):
    kl = live(logp - ref_logp, mask).sum(-1)
    return kl.square() / 2, {"kl": (advantages * kl).mean()}


def logs_nothing_where_there_is_no_reward(logp, ref_logp, mask, rewards):
    kl = live(logp - ref_logp, mask).sum(-1)
    return kl.square() / 2, {"kl": torch.where(rewards > 0, kl, 0.0)}


def divides_by_the_padded_length(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": live(logp - ref_logp, mask).mean()}


# --------------------------------------------------------------------------------------- KL603: changed afterwards


def multiplies_what_was_recorded(logp, ref_logp, mask, beta):
    cost = live(logp - ref_logp, mask).sum(-1).detach()
    metrics = {"kl": cost}
    cost.mul_(beta)
    return cost * live(logp, mask).sum(-1), metrics


def hands_out_shared_memory(logp, ref_logp, mask, beta):
    cost = live(logp - ref_logp, mask).sum(-1).detach()
    metrics = {"kl": cost.numpy()}
    torch.mul(cost, beta, out=cost)
    return cost * live(logp, mask).sum(-1), metrics


class OneBuffer:
    """Returns the same tensor from every call."""

    def __init__(self):
        self.buffer = torch.zeros((), dtype=torch.float64)

    def __call__(self, logp, ref_logp, mask):
        kl = live(logp - ref_logp, mask).sum(-1)
        self.buffer.copy_(kl.detach().mean())
        return kl.square() / 2, {"kl": self.buffer}


class Clears(torch.autograd.Function):
    """Frees what it no longer needs on the way back."""

    @staticmethod
    def forward(ctx, kl, logged):
        ctx.logged = logged
        ctx.save_for_backward(kl)
        return kl.square() / 2

    @staticmethod
    def backward(ctx, gradient):
        (kl,) = ctx.saved_tensors
        ctx.logged.zero_()
        return gradient * kl, None


def recorded_through_data(logp, ref_logp, mask, beta):
    kl = live(logp - ref_logp, mask).sum(-1).detach()
    logged = kl.data
    kl *= beta
    return kl * live(logp, mask).sum(-1), {"kl": logged}


def computed_and_spoilt_in_place(logp, ref_logp, mask, beta):
    """The first step makes a KL out of no KL, the second spoils it."""
    total = live(logp, mask).sum(-1).detach()
    torch.sub(total, live(ref_logp, mask).sum(-1), out=total)
    metrics = {"kl": total}
    total *= beta
    return beta * penalty(logp, ref_logp, mask), metrics


def clears_on_the_way_back(logp, ref_logp, mask):
    kl = live(logp - ref_logp, mask).sum(-1)
    logged = kl.detach().clone()
    return Clears.apply(kl, logged), {"kl": logged}


# ---------------------------------------------------------------------------------------------- KL604: padding counts


def averages_over_padding(logp, ref_logp, mask):
    return penalty(logp, ref_logp, mask), {"kl": (logp - ref_logp).mean().item()}


def masks_the_wrong_way_round(logp, ref_logp, mask):
    k1 = torch.where(mask.bool(), logp - ref_logp, logp)
    return penalty(logp, ref_logp, mask), {"kl": k1.sum(-1)}


# In longer rollouts, larger batches, with gaps and further out.


def logged(loss, kl):
    return loss.mean(), {"kl": kl}


def logs_nothing_of_long_rollouts(logp, ref_logp, mask):
    k1 = live(logp - ref_logp, mask).detach().sum(-1).mean()
    return logged(penalty(logp, ref_logp, mask), k1 if mask.shape[1] <= 64 else torch.zeros(()))


def logs_a_token_of_longer_rollouts(logp, ref_logp, mask):
    k1 = live(logp - ref_logp, mask).detach().sum(-1).mean()
    return logged(penalty(logp, ref_logp, mask), k1 if mask.shape[1] <= 4 else k1 / mask.shape[1])


def logs_the_sum_of_many_rows(logp, ref_logp, mask):
    k1 = live(logp - ref_logp, mask).detach().sum(-1)
    return logged(penalty(logp, ref_logp, mask), k1.sum() / min(len(k1), 8))


def logs_the_largest_of_coupled_rows(logp, ref_logp, mask):
    total = live(logp - ref_logp, mask).sum(-1)
    loss = total.var() / 2 if len(total) > 1 else total.square() / 2
    return logged(loss, total.detach().max())


def logs_by_lengths(logp, ref_logp, mask):
    before = torch.arange(mask.shape[1]) < (mask != 0).sum(-1, keepdim=True)
    return logged(penalty(logp, ref_logp, mask), (logp - ref_logp).where(before, 0.0).detach().sum(-1).mean())


def logs_k1_cut_at_2(logp, ref_logp, mask):
    k1 = live(logp - ref_logp, mask).detach().clamp(-2, 2)
    return logged(penalty(logp, ref_logp, mask), k1.sum(-1).mean())


CASES = [
    wrong("KL601", logs_k2),
    wrong("KL601", squares_in_place_and_then_logs),
    wrong("KL601", logs_the_distance_to_the_sampler, options={"sampler": "current"}),
    wrong("KL601", leaves_out_the_first_token),
    wrong("KL601", logs_k1_cut_off_below),
    wrong("KL601", logs_nothing_of_long_rollouts),
    wrong("KL601", logs_a_token_of_longer_rollouts),
    wrong("KL601", logs_the_sum_of_many_rows),
    wrong("KL601", logs_the_largest_of_coupled_rows, also=("KL206",)),
    wrong("KL601", logs_by_lengths),
    wrong("KL601", logs_k1_cut_at_2, warns=True),
    wrong("KL601", AddsUpOverCalls()),
    wrong("KL601", AveragesHalfSquares()),
    wrong("KL602", logs_beta_times_kl),
    wrong("KL602", logs_beta_times_kl, also=("KL601",), options={"beta": 0.1}),
    wrong("KL602", logs_after_the_ratio, also=("KL301",)),
    wrong("KL602", logs_it_times_the_advantage, also=("KL601",)),
    wrong("KL602", logs_nothing_where_there_is_no_reward, also=("KL601",)),
    wrong("KL602", divides_by_the_padded_length, also=("KL601",)),
    wrong("KL603", multiplies_what_was_recorded),
    wrong("KL603", hands_out_shared_memory),
    wrong("KL603", recorded_through_data),
    wrong("KL603", computed_and_spoilt_in_place),
    wrong("KL603", OneBuffer()),
    wrong("KL603", clears_on_the_way_back),
    wrong("KL604", averages_over_padding, also=("KL601",)),
    wrong("KL604", masks_the_wrong_way_round, also=("KL601",)),
]
