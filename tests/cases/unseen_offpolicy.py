"""Losses with a ratio to the sampler, or that ought to have one, each wrong in one way."""

from dataclasses import dataclass

import torch
from torch import Tensor


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1)


@dataclass
class CorrectionConfig:
    token_cap: float = 5.0
    sequence_cap: float = 100.0
    log_ratio_bound: float = 2.0
    veto_log_ratio: float = 4.5


def truncated_token_ratio(
    logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float, cap: float = 3.0
) -> Tensor:
    """DEFECT: truncated importance sampling; token ratios above 3 are cut to 3."""
    weight = torch.clamp((logps - old_logps).exp(), max=cap).detach()
    return beta * row_sum(weight * 0.5 * (logps - ref_logps) ** 2, mask).mean()


def bias_corrected_with_cap(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    completion_mask: Tensor,
    config: CorrectionConfig,
) -> Tensor:
    """DEFECT: ratio times k3 with the ratio capped at 5, where its gradient ends."""
    ratio = torch.exp(per_token_logps - old_per_token_logps).clamp(max=config.token_cap)
    delta = ref_per_token_logps - per_token_logps
    return row_sum(ratio * (torch.expm1(delta) - delta), completion_mask).mean()


class OffPolicyCorrection:
    """Corrections for a sampler that differs from the policy."""

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        self.config = config or CorrectionConfig()

    def sequence_truncated(self, log_prob: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        """DEFECT: the ratio of the row is cut at 100."""
        ratio = row_sum(log_prob - old_log_prob, mask).exp().clamp(max=self.config.sequence_cap).detach()
        return (ratio * row_sum(log_prob - ref_log_prob, mask).square()).mean() / 2

    def bounded_log_ratio(self, log_prob: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        """DEFECT: log-ratios to the sampler are clamped to ±2 before they are added up over the prefix."""
        bound = self.config.log_ratio_bound
        steps = (log_prob.detach() - old_log_prob).clamp(-bound, bound)
        return row_sum((steps * mask).cumsum(-1).exp() * (log_prob - ref_log_prob) ** 2 / 2, mask).mean()

    def veto(self, log_prob: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        """DEFECT: rows that have drifted too far from the sampler are dropped."""
        drift = row_sum(log_prob - old_log_prob, mask).detach()
        keep = (drift.abs() <= self.config.veto_log_ratio).to(log_prob.dtype)
        return (keep * drift.exp() * row_sum(log_prob - ref_log_prob, mask).square() / 2).mean()

    def geometric_mask(self, logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """DEFECT: rows whose mean token ratio is above 4 or below 1/4 are masked."""
        total = row_sum(logps.detach() - old_logps, mask)
        mean_ratio = torch.exp(total / mask.sum(-1).clamp(min=1))
        inside = (mean_ratio < 4.0) & (mean_ratio > 0.25)
        losses = total.exp() * 0.5 * row_sum(logps - ref_logps, mask) ** 2
        return torch.where(inside, losses, torch.zeros_like(losses)).mean()

    def far_cap(self, logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """DEFECT, far out only: log-ratios of tokens to the sampler are clamped to ±12."""
        total = row_sum((logps.detach() - old_logps).clamp(-12, 12), mask)
        return (total.exp() * 0.5 * row_sum(logps - ref_logps, mask) ** 2).mean()


def missing_ratio_reward(rewards: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT: off-policy rollouts, yet the return with its KL is not weighted."""
    row = row_sum(logps, mask)
    kl = row.detach() - row_sum(ref_logps, mask)
    return -((rewards - beta * kl) * row).mean()


def token_ratio_only(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """DEFECT: each token has its own ratio, and the prefixes stay those of the sampler."""
    weight = (logps - old_logps).exp().detach()
    return kl_coef * row_sum(weight * (logps - ref_logps) ** 2 / 2, mask).mean()


def detached_ratio(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """DEFECT: the estimate ρ·k3 of the row with its ratio detached, so that the forward KL is left."""
    ratio = row_sum(logps.detach() - old_logps, mask).exp()
    delta = row_sum(ref_logps - logps, mask)
    return (ratio * (delta.exp() - 1 - delta)).mean()


def broadcast_sequence_ratio(
    per_token_logps: Tensor, old_per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor
) -> Tensor:
    """DEFECT: one geometric-mean ratio of the row weighs the k2 of each of its tokens."""
    lengths = completion_mask.sum(-1).clamp(min=1)
    ratio = (row_sum(per_token_logps - old_per_token_logps, completion_mask) / lengths).exp().detach()
    return row_sum(ratio[:, None] * (per_token_logps - ref_per_token_logps) ** 2 / 2, completion_mask).mean()


def stale_kl_reward(
    log_probs: Tensor, log_probs_old: Tensor, log_probs_ref: Tensor, action_mask: Tensor, kl_coef: float
) -> Tensor:
    """DEFECT: the KL in the return was computed when the rollouts were drawn, from the sampler's log-probs."""
    ratio = row_sum(log_probs - log_probs_old, action_mask).exp()
    kl = row_sum(log_probs_old - log_probs_ref, action_mask)
    return kl_coef * (ratio * kl).mean()


def sampler_as_reference(logps: Tensor, old_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT: the penalty is taken against the rollout policy instead of the reference."""
    return beta * 0.5 * row_sum(logps - old_logps, mask).square().mean()


def clipped_penalty_ratio(
    logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor, cliprange: float = 0.2
) -> Tensor:
    """DEFECT: the penalty goes through PPO's clip of the row's ratio."""
    ratio = row_sum(logps - old_logps, mask).exp()
    cost = row_sum(logps - ref_logps, mask).detach()
    return torch.max(ratio * cost, ratio.clamp(1 - cliprange, 1 + cliprange) * cost).mean()


def self_moving_reference(logps: Tensor, ref_logps: Tensor, mask: Tensor, decay: float = 0.9) -> Tensor:
    """DEFECT: the averaged reference mixes in the policy itself, in probabilities and without detaching it."""
    average = torch.log(decay * ref_logps.exp() + (1 - decay) * logps.exp())
    return (0.5 * row_sum(logps - average, mask) ** 2).mean()


def inverse_ratio(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """DEFECT: the ratio is upside down, sampler over policy."""
    weight = row_sum(old_logps - logps, mask).exp().detach()
    return (weight * row_sum(logps - ref_logps, mask) ** 2).mean() / 2
