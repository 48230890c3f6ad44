"""Correct losses that an earlier check failed or kltest could not grade, written without sight of the checks."""

import numpy as np
import torch
import torch.nn.functional as F
from cases.parts import live, total
from cases.table import right


def squared_sum_of_the_batch(logp, ref_logp, mask):
    """Cross terms of different rows vanish in expectation: a mean, though doubling a batch moves each row twice."""
    return total(logp - ref_logp, mask).sum().square() / (2 * len(logp))


def differences_of_pairs(logp, ref_logp, mask, group):
    """Leave-one-out in groups of two, spelt as one product a pair; a group of another size has no baseline."""
    cost, score = total(logp - ref_logp, mask).detach(), total(logp, mask)
    loss = score.sum() * 0
    for each in group.unique():
        rows = (group == each).nonzero().flatten()
        if len(rows) == 2:
            loss = loss + (cost[rows[0]] - cost[rows[1]]) * (score[rows[0]] - score[rows[1]])
        else:
            loss = loss + (cost[rows] * score[rows]).sum()
    return loss / len(logp)


def another_divisor(logp, ref_logp, mask):
    """The others' sum over n and not n − 1: less of a baseline, and as unbiased."""
    cost = total(logp - ref_logp, mask).detach()
    return ((cost - (cost.sum() - cost) / len(cost)) * total(logp, mask)).mean()


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
        return total(one - ref_logp, mask).square().mean() / 2

    gradient, value = torch.func.grad_and_value(inner)(logp.detach())
    return _Given.apply(logp, gradient, value)


def huber_with_a_bound_that_nothing_reaches(logp, ref_logp, mask):
    return F.huber_loss(total(logp, mask), total(ref_logp, mask), delta=1e9)


def total_variation_of_rows(logits, ref_logits, mask):
    """Bounded, as declared; in half precision signs turn if both probabilities round to one number."""
    keep = (mask != 0)[..., None]
    p, q = (part.masked_fill(~keep, 0.0).softmax(-1) for part in (logits, ref_logits))
    return ((p - q).abs().sum(-1) / 2 * mask).sum(-1).mean()


def forward_by_sequence_weights(logp, ref_logp, mask):
    """The exponent is limited far away, against overflow only."""
    weight = (-total(logp - ref_logp, mask)).detach().clamp(max=50).exp()
    return -(weight * total(logp, mask)).mean()


def defaults_that_nobody_uses(logp, ref_logp, mask=None, old_logp=None, reduction="mean"):
    alive = torch.ones_like(logp) if mask is None else mask
    penalty = total(logp - ref_logp, alive).square() / 2
    return penalty.mean() if reduction == "mean" else penalty


def numpy_scalars_one_by_one(logp, ref_logp, mask):
    cost, score = total(logp - ref_logp, mask).detach().numpy(), total(logp, mask)
    return sum(cost[row] * score[row] for row in range(len(score))) / np.int64(len(score))


def gradient_scaled_by_a_hook(logp, ref_logp, mask):
    score = total(logp, mask)
    cost = (score - total(ref_logp, mask)).detach()
    score.register_hook(lambda gradient: gradient * cost)
    return score.sum() / len(score)


def segments_by_scatter_add(logp, ref_logp, mask):
    flat, alive = (logp - ref_logp).flatten(), mask.flatten().bool()
    row = torch.arange(mask.numel()) // mask.shape[1]
    return torch.zeros(len(mask), dtype=logp.dtype).scatter_add(0, row[alive], flat[alive]).pow(2).mean() / 2


def prefixes_in_a_magic_box(logp, ref_logp, mask):
    """DiCE: each token's term is differentiated through everything that led to it."""
    score = live(logp, mask)
    return (torch.exp((score - score.detach()).cumsum(-1)) * live(logp - ref_logp, mask)).sum(-1).mean()


def differentiable_ratio_times_the_cost(logp, old_logp, ref_logp, mask):
    """∇(ρu) = ρ(u + 1)∇log π, and the 1 is nothing on average."""
    return (total(logp - old_logp, mask).exp() * total(logp - ref_logp, mask)).mean()


def whole_objective_in_one_coefficient(logp, ref_logp, mask, reward):
    score = total(logp, mask)
    return ((score - total(ref_logp, mask) - reward).detach() * score).mean()


def distilled_by_cross_entropy(logits, ref_logits, mask):
    alive = mask.bool()
    return F.cross_entropy(logits[alive], ref_logits[alive].softmax(-1), reduction="sum") / len(mask)


def filled_at_padding(logprobs, ref_logprobs, padding_mask):
    return (logprobs - ref_logprobs).masked_fill(padding_mask.bool(), 0.0).sum(-1).square() / 2


CASES = [
    right(squared_sum_of_the_batch, slow=True),
    right(differences_of_pairs, {"group_size": 2}, slow=True),
    right(another_divisor),
    right(by_vmap),
    right(filled_at_padding),
    right(gradient_in_the_forward_pass),
    right(huber_with_a_bound_that_nothing_reaches),
    right(total_variation_of_rows, {"expect": "local_total_variation"}),
    right(forward_by_sequence_weights, {"expect": "forward_kl", "sampler": "current"}),
    right(defaults_that_nobody_uses),
    right(numpy_scalars_one_by_one),
    right(gradient_scaled_by_a_hook),
    right(segments_by_scatter_add),
    right(prefixes_in_a_magic_box),
    right(differentiable_ratio_times_the_cost, {"sampler": "both"}),
    right(whole_objective_in_one_coefficient, {"expect": "reverse_kl - expected_reward"}),
    right(distilled_by_cross_entropy, {"expect": "local_forward_kl"}),
]
