"""Losses whose expected gradient is not that of KL(π‖ref)."""

import torch
from cases.parts import total
from cases.table import wrong


def value_baseline_left_out(logp, ref_logp):
    return (logp - ref_logp) - (logp - ref_logp).detach().mean()


def log_ratio_summed(logp, ref_logp, mask):
    return torch.where(mask.bool(), logp - ref_logp, 0).sum(-1).mean()


def schulman_k3(logp, ref_logp, mask):
    delta = torch.where(mask.bool(), ref_logp - logp, 0.0)
    return (torch.expm1(delta) - delta).sum(-1)


def cross_entropy_of_the_reference(logits, ref_logits):
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return -(ref_logits.exp() * logits).sum(-1)


def reward_bonus(logp, ref_logp):
    return -(logp - ref_logp)


def swapped_arguments(logp, ref_logp, mask):
    total = torch.where(mask.bool(), ref_logp - logp, 0.0).sum(-1)
    return total.detach() * torch.where(mask.bool(), logp, 0.0).sum(-1)


def k2_in_the_reward(logp, ref_logp):
    return 0.5 * (logp - ref_logp).square()


def k3_in_the_reward(logp, ref_logp):
    ratio = torch.exp(ref_logp - logp)
    return ratio - 1 - torch.log(ratio)


def square_root(logp, ref_logp, mask):
    total = torch.where(mask.bool(), logp - ref_logp, 0.0).sum(-1)
    return torch.sqrt(1 + total * total)


def doubled(logp, ref_logp, mask):
    return torch.where(mask.bool(), logp - ref_logp, 0.0).sum(-1).pow(2)


def scaled_by_a_constant(logp, ref_logp, mask):
    total = torch.where(mask.bool(), logp - ref_logp, 0.0).sum(-1)
    return 0.1 * total.detach() * torch.where(mask.bool(), logp, 0.0).sum(-1)


def capped_coefficient(most):
    """The coefficient of the KL term is at most this."""

    def loss(logp, ref_logp, mask, beta=0.1):
        total = torch.where(mask.bool(), logp - ref_logp, 0.0).sum(-1)
        return min(beta, most) * total.square() / 2

    loss.__name__ = loss.__qualname__ = f"coefficient_of_at_most_{most:g}"
    return loss


REWARD = {"placement": "reward"}


def falls_with_the_steps(logp, ref_logp, mask, kl_coef, global_step, total_steps=1000):
    """The coefficient is kl_coef at first."""
    return kl_coef * max(1 - global_step / total_steps, 0.0) * (total(logp - ref_logp, mask).square() / 2).mean()


def half_at_each_step(logp, ref_logp, mask, kl_coef, global_step):
    return kl_coef * (global_step >= 0) * (total(logp - ref_logp, mask).square() / 4).mean()


CASES = [
    wrong("KL101", value_baseline_left_out, options={"environment": "bandit,sequence"}),
    wrong("KL101", log_ratio_summed),
    wrong("KL102", schulman_k3, also=("KL503",)),
    wrong("KL102", cross_entropy_of_the_reference),
    wrong("KL103", reward_bonus, options=REWARD),
    wrong("KL103", swapped_arguments),
    wrong("KL104", k2_in_the_reward, also=("KL105",), options=REWARD),
    wrong("KL104", k3_in_the_reward, also=("KL503",), options=REWARD),
    wrong("KL105", square_root),
    wrong("KL106", doubled, warns=True),
    wrong("KL106", falls_with_the_steps, also=("KL105",), warns=True),
    wrong("KL106", half_at_each_step),
    wrong("KL510", capped_coefficient(0.02)),
    wrong("KL106", capped_coefficient(1.0), warns=True),
    wrong("KL106", scaled_by_a_constant, warns=True),
]
