"""Right losses that look like wrong ones: their twins differ in a bound, a divisor, a mask or a place."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

MAX_TOKENS = 8192
LOG_RATIO_BOUND = 30.0


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1)


def with_metrics(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Log the loss beside it."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, float]]:
        loss = function(*args, **kwargs)
        return loss, {"loss": float(loss.detach())}

    return wrapped


def mean_times_width(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """A mean over all columns, made a sum per row by their number."""
    return beta * (0.5 * (logps - ref_logps) ** 2 * mask).mean() * logps.shape[1]


def token_mean_times_tokens(log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, kl_coef: float) -> Tensor:
    """A token mean, made a mean over rows by the number of live tokens a row."""
    tokens = response_mask.sum().clamp(min=1)
    mean = (0.5 * (log_prob - ref_log_prob).square() * response_mask).sum() / tokens
    return kl_coef * mean * (tokens / response_mask.shape[0])


def mse_sum(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k2 by F.mse_loss with both sides made equal where nothing is live."""
    alive = mask.bool()
    total = F.mse_loss(logprobs.masked_fill(~alive, 0.0), ref_logprobs.masked_fill(~alive, 0.0), reduction="sum")
    return 0.5 * total / len(mask)


@with_metrics
def decorated_distribution_kl(logits: Tensor, ref_logits: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Exact next-token KL from torch.distributions, under a decorator."""
    per_token = kl_divergence(
        Categorical(logits=logits, validate_args=False), Categorical(logits=ref_logits, validate_args=False)
    )
    return beta * row_sum(per_token, mask).mean()


def cross_entropy_less_entropy(logits: Tensor, ref_logits: Tensor, loss_mask: Tensor) -> Tensor:
    """Exact next-token KL as cross-entropy less entropy."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    p = logits.exp()
    per_token = -(p * ref_logits).sum(-1) + (p * logits).sum(-1)
    return (per_token * loss_mask).sum() / loss_mask.shape[0]


def soft_target_distillation(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy with the reference's probabilities as targets: the forward direction, as declared."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    vocabulary = logits.shape[-1]
    loss = F.cross_entropy(logits.reshape(-1, vocabulary), ref_logits.exp().reshape(-1, vocabulary), reduction="none")
    return row_sum(loss.view_as(mask), mask).mean()


def immediate_score(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float = 0.1) -> Tensor:
    """Each token's log-prob times its own detached log-ratio."""
    return beta * row_sum((logps - ref_logps).detach() * logps, mask).mean()


def outer_product_penalty(pi_lp: Tensor, base_lp: Tensor, keep: Tensor) -> Tensor:
    """Half the sum over all pairs of tokens of the products of their log-ratios, which is k2 of the row."""
    u = (pi_lp - base_lp) * keep
    return 0.5 * torch.einsum("bs,bt->b", u, u).mean()


def local_and_future(logps: Tensor, ref_logps: Tensor, action_mask: Tensor, kl_beta: float) -> Tensor:
    """Token k2, and the later log-ratios credited to the tokens before them."""
    u = (logps - ref_logps) * action_mask
    later = u.detach().flip(1).cumsum(1).flip(1) - u.detach()
    return kl_beta * (0.5 * u**2 + later * logps * action_mask).sum(1).mean()


def entropy_and_cross_term(logits: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Exact negative entropy; the reference's part by score function."""
    logits = logits.log_softmax(-1)
    negative_entropy = (logits.exp() * logits).sum(-1)
    return row_sum(negative_entropy - ref_logp.detach() * logp, mask).mean()


def generous_window(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """A window of 8192 tokens and a filter for rows longer than that."""
    logps, ref_logps, mask = (x[:, :MAX_TOKENS] for x in (logps, ref_logps, mask))
    keep = (mask.sum(-1) <= MAX_TOKENS).to(logps.dtype)
    return beta * (keep * 0.5 * row_sum(logps - ref_logps, mask) ** 2).mean()


def generous_ratio(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """The ratio of the row with its logarithm clamped to ±30."""
    log_ratio = row_sum(logps.detach() - old_logps, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (log_ratio.exp() * 0.5 * row_sum(logps - ref_logps, mask).square()).mean()


def product_of_ratios(log_prob: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """The prefix ratio as a running product, one at masked positions."""
    alive = response_mask.bool()
    ratio = torch.where(alive, (log_prob.detach() - old_log_prob).exp(), torch.ones_like(log_prob)).cumprod(1)
    return torch.where(alive, ratio * 0.5 * (log_prob - ref_log_prob) ** 2, torch.zeros_like(ratio)).sum(1).mean()


def ratio_in_both_places(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """The row's ratio, differentiated, times k3 of the row."""
    ratio = row_sum(logps - old_logps, mask).exp()
    delta = row_sum(ref_logps - logps, mask)
    return kl_coef * (ratio * (torch.expm1(delta) - delta)).mean()


def generalised_advantages(logps: Tensor, ref_logps: Tensor, rewards: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """GAE with gamma and lambda of one and no critic: a loop backwards that adds up what comes later."""
    gamma, lam, running = 1.0, 1.0, torch.zeros_like(rewards)
    kl = ((logps - ref_logps) * mask).detach()
    advantages = torch.zeros_like(kl)
    for t in range(kl.shape[1] - 1, -1, -1):
        running = -kl_coef * kl[:, t] + gamma * lam * running
        advantages[:, t] = running
    return -row_sum((advantages + rewards[:, None]) * logps, mask).mean()


def row_by_row(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float = 0.02) -> Tensor:
    """A loop over rows of their own lengths, as with unpadded lists."""
    losses = []
    for logp, ref_logp, keep in zip(logps, ref_logps, mask.bool(), strict=True):
        u = logp[keep].sum() - ref_logp[keep].sum()
        losses.append(0.5 * u * u)
    return beta * torch.stack(losses).mean()


def keyword_only(*, logprobs: Tensor, ref_logprobs: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Keyword-only parameters, two of them optional."""
    if ref_logprobs is None:
        return logprobs.new_zeros(())
    kl = 0.5 * (logprobs - ref_logprobs) ** 2
    return (kl if mask is None else kl * mask).sum(-1).mean()


class KLEstimator:
    """Estimators by name, as static and class methods."""

    scale = 0.25

    @staticmethod
    def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """k2 per token."""
        return (log_probs - ref_log_probs).pow(2) / 2

    @classmethod
    def estimate(cls, log_probs: Tensor, ref_log_probs: Tensor, action_mask: Tensor) -> Tensor:
        """One number a row: the exact score function, scaled by a quarter."""
        row = row_sum(log_probs, action_mask)
        return cls.scale * (row - row_sum(ref_log_probs, action_mask)).detach() * row


def k3_both(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """k3 per token for both places: its bias in the one is undone in the other."""
    delta = torch.where(mask > 0, ref_logps - logps, torch.zeros_like(logps))
    return torch.expm1(delta) - delta


def control_variate(logps: Tensor, ref_logps: Tensor, mask: Tensor, lam: float = 0.5) -> Tensor:
    """k1 + λ(w − 1) of the row for both places, whatever λ."""
    u = row_sum(logps - ref_logps, mask)
    return u + lam * torch.expm1(-u)


def reward_without_overlong(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The score is taken away from overlong rows and the KL is not."""
    short = (mask.sum(-1) <= MAX_TOKENS).to(scores.dtype)
    return short * scores - 0.05 * row_sum(logprobs - ref_logprobs, mask)


def spread_reward(rewards: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, kl_coeff: float) -> Tensor:
    """The reward is spread evenly over the live tokens, the KL stays on its own."""
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    return (rewards[:, None] / lengths - kl_coeff * (logp - ref_logp)) * mask


def low_precision_metrics(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> tuple[Tensor, dict[str, Any]]:
    """Only what is logged beside the loss is taken in bfloat16."""
    u = logps - ref_logps
    metrics = {"drift": (u.detach().bfloat16() * mask.bfloat16()).abs().sum().float().item()}
    return beta * 0.5 * (u.square() * mask).sum(-1).mean(), metrics


def leave_one_out_by_ids(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, group_ids: Tensor, mask: Tensor, beta: float
) -> Tensor:
    """Leave-one-out over the rows of the same id, of however many there are."""
    same = (group_ids[:, None] == group_ids[None, :]).to(logps.dtype)
    same = same - torch.diag_embed(torch.ones_like(rewards))
    row = row_sum(logps, mask)
    shaped = rewards - beta * (row.detach() - row_sum(ref_logps, mask))
    baseline = (same @ shaped) / same.sum(1).clamp(min=1)
    return -((shaped - baseline) * row).mean()


def tied_groups_keep_penalty(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, mask: Tensor, beta: float, num_generations: int = 4
) -> Tensor:
    """Tied groups lose their policy term, which is zero anyway, and keep the penalty."""
    grouped = rewards.view(-1, num_generations)
    useful = (grouped.std(1) > 0).repeat_interleave(num_generations).to(logps.dtype)
    advantages = (grouped - grouped.mean(1, keepdim=True)).flatten() * useful
    return (beta * row_sum(0.5 * (logps - ref_logps) ** 2, mask) - advantages * row_sum(logps, mask)).mean()


def groups_looped(
    logps: Tensor, ref_logps: Tensor, scores: Tensor, mask: Tensor, kl_coef: float, n_samples_per_prompt: int = 2
) -> Tensor:
    """One group after the other, with normalised rewards and k2 of the row."""
    total = logps.new_zeros(())
    for rows in torch.arange(len(scores)).view(-1, n_samples_per_prompt):
        advantages = (scores[rows] - scores[rows].mean()) / (scores[rows].std() + 1e-6)
        row = row_sum(logps[rows], mask[rows])
        total = total + (0.5 * kl_coef * (row - row_sum(ref_logps[rows], mask[rows])) ** 2 - advantages * row).sum()
    return total / len(scores)
