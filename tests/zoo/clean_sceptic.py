"""Right losses, written by somebody who had not seen the checks, on which one of them fired or kltest gave up."""

import torch
from zoo.table import Clean


def live(values, mask):
    return values.where(mask != 0, 0.0)


def log_ratios(logp, ref_logp, mask):
    return live(logp - ref_logp, mask).sum(-1)


def squared_sum_of_the_batch(logp, ref_logp, mask):
    """Cross terms of different rows vanish in expectation: a mean, though doubling a batch moves each row twice."""
    return log_ratios(logp, ref_logp, mask).sum().square() / (2 * len(logp))


def differences_of_pairs(logp, ref_logp, mask, group):
    """Leave-one-out in groups of two, spelt as one product a pair; a group of another size has no baseline."""
    cost, score = log_ratios(logp, ref_logp, mask).detach(), live(logp, mask).sum(-1)
    total = score.sum() * 0
    for each in group.unique():
        rows = (group == each).nonzero().flatten()
        if len(rows) == 2:
            total = total + (cost[rows[0]] - cost[rows[1]]) * (score[rows[0]] - score[rows[1]])
        else:
            total = total + (cost[rows] * score[rows]).sum()
    return total / len(logp)


def another_divisor(logp, ref_logp, mask):
    """The others' sum over n and not n − 1: less of a baseline, and as unbiased."""
    cost = log_ratios(logp, ref_logp, mask).detach()
    return ((cost - (cost.sum() - cost) / len(cost)) * live(logp, mask).sum(-1)).mean()


def by_vmap(logp, ref_logp, mask):
    def row(one, other, alive):
        return torch.where(alive != 0, one - other, 0.0).sum().square() / 2

    return torch.vmap(row)(logp, ref_logp, mask).mean()


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, gradient, value):
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx, weight):
        return weight * ctx.saved_tensors[0], None, None


def gradient_in_the_forward_pass(logp, ref_logp, mask):
    """As fused kernels do: torch.func takes the gradient, backward hands it over."""

    def inner(one):
        return log_ratios(one, ref_logp, mask).square().mean() / 2

    gradient, value = torch.func.grad_and_value(inner)(logp.detach())
    return _Given.apply(logp, gradient, value)


CLEAN = [
    Clean(squared_sum_of_the_batch),
    Clean(differences_of_pairs, {"group_size": 2}),
    Clean(another_divisor),
    Clean(by_vmap),
    Clean(gradient_in_the_forward_pass),
]
